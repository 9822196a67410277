"""Snapshots: whole or not there, in parts, damage is noticed, a full disk loses nothing."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from weightgrad.errors import CheckpointError
from weightgrad.runtime.checkpoints import snapshot
from weightgrad.runtime.checkpoints.snapshot import Snapshot

FACTS = {"position": 10, "strategy": {"trigger": "every(4)"}}


def tensors(seed: int = 0) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {
        "weights": torch.randn(5, 3, generator=chance),
        "clock": torch.tensor([seed, 2**40]),
        "nothing": torch.zeros(0),
        "bytes": torch.randint(0, 255, (7,), dtype=torch.uint8, generator=chance),
        "number": torch.tensor(2.5, dtype=torch.float64),
        "half": torch.randn(9, generator=chance).bfloat16(),
        "columns": torch.randn(4, 6, generator=chance).T,
    }


def assert_is(found: Snapshot | None, number: int) -> None:
    assert found is not None
    assert found.number == number
    assert found.facts == {**FACTS, "position": number}
    wanted = tensors(number)
    assert found.tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert found.tensors[name].shape == tensor.shape
        assert torch.equal(found.tensors[name], tensor)


def write(directory: Path, *numbers: int) -> Path:
    """Snapshots of these numbers; the directory of the last."""
    for number in numbers:
        snapshot.write(directory, "state", number, tensors(number), {**FACTS, "position": number})
    return directory / f"state-{numbers[-1]:012d}"


# -- which one is read ----------------------------------------------------------------------------


def test_the_two_newest_are_kept_and_the_newest_is_read(tmp_path: Path) -> None:
    assert snapshot.newest(tmp_path / "not there", "state") is None
    assert snapshot.oldest_kept(tmp_path / "not there", "state", "position") is None
    for number in range(1, 6):
        write(tmp_path / "disk", number)
        assert_is(snapshot.newest(tmp_path / "disk", "state"), number)
        assert snapshot.oldest_kept(tmp_path / "disk", "state", "position") == max(1, number - 1)
    assert sorted(os.listdir(tmp_path / "disk")) == ["state-000000000004", "state-000000000005"]


def test_names_do_not_mix(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    snapshot.write(tmp_path, "state-1", 9, tensors(9), {})
    (tmp_path / "state-x").mkdir()
    (tmp_path / "state-000000000009").write_text("a file")
    assert_is(snapshot.newest(tmp_path, "state"), 3)


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    write(tmp_path, 1)
    torn = tmp_path / ".state-000000000002.4711"
    torn.mkdir()
    (torn / "part-00000.safetensors").write_bytes(b"half of it")
    assert_is(snapshot.newest(tmp_path, "state"), 1)
    write(tmp_path, 2)
    assert not torn.exists()
    write(tmp_path, 2)
    assert_is(snapshot.newest(tmp_path, "state"), 2)


# -- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("part_bytes", [8, 16, 64, 100])
def test_tensors_are_cut_over_parts_and_put_together_again(
    part_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "PART_BYTES", part_bytes)
    last = write(tmp_path, 1)
    sizes = [sum(size for _, size in values(path)) for path in sorted(last.glob("part-*"))]
    assert len(sizes) >= sum(tensor.nbytes for tensor in tensors(1).values()) // (part_bytes + 8)
    assert all(size <= part_bytes for size in sizes)
    assert_is(snapshot.newest(tmp_path, "state"), 1)


def values(path: Path) -> list[tuple[str, int]]:
    """Name and bytes of each tensor in a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    return [(name, entry["data_offsets"][1] - entry["data_offsets"][0]) for name, entry in header.items()]


# -- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["part-00000.safetensors", "index.json"])
@pytest.mark.parametrize("left", [0, 7, 8, 200, -1])
def test_a_truncated_newest_is_said_and_the_one_before_it_is_used(name: str, left: int, tmp_path: Path) -> None:
    last = write(tmp_path, 1, 2, 3)
    (last / name).write_bytes((last / name).read_bytes()[:left])
    found = snapshot.newest(tmp_path, "state")
    assert_is(found, 2)
    assert found is not None
    (line,) = found.damaged
    assert line.startswith("state-000000000003")
    assert "is damaged" in line
    write(tmp_path, 3)
    assert_is(snapshot.newest(tmp_path, "state"), 3)


@pytest.mark.parametrize("name", ["part-00000.safetensors", "part-00001.safetensors", "index.json"])
def test_a_missing_file_is_damage(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "PART_BYTES", 64)
    last = write(tmp_path, 1, 2)
    (last / name).unlink()
    assert_is(snapshot.newest(tmp_path, "state"), 1)


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    last, chance = write(tmp_path, 10), random.Random(1)
    for path in sorted(last.iterdir()):
        whole = path.read_bytes()
        for at in range(len(whole)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << chance.randrange(8))]) + whole[at + 1 :])
            with pytest.raises(CheckpointError, match="damaged"):
                snapshot.newest(tmp_path, "state")
        path.write_bytes(whole)
    assert_is(snapshot.newest(tmp_path, "state"), 10)


def test_when_all_are_damaged_the_error_says_what_to_do(tmp_path: Path) -> None:
    last = write(tmp_path, 1, 2)
    part = last / "part-00000.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    (tmp_path / "state-000000000001" / "index.json").write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        snapshot.newest(tmp_path, "state")
    said = str(caught.value)
    assert f"no snapshot in {tmp_path} can be read" in said
    assert "state-000000000002/part-00000.safetensors is damaged: its bytes are not those written" in said
    assert "state-000000000001 is damaged or not a snapshot" in said
    assert "Restore one from a backup, or remove the directory to start from the beginning" in said


# -- a full disk ----------------------------------------------------------------------------------


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["save_file", "os.fsync", "os.replace", "Path.write_text", "Path.mkdir"])
def test_a_full_disk_keeps_the_last_state_and_is_named(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(f"weightgrad.runtime.checkpoints.snapshot.{where}", full)
        with pytest.raises(CheckpointError, match=r"cannot write .*state-000000000003: the disk is full; the previous"):
            write(tmp_path, 3)
    assert_is(snapshot.newest(tmp_path, "state"), 2)
    assert len(os.listdir(tmp_path)) == 2, "nothing half written is left"
    write(tmp_path, 3)


def test_another_cause_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*Not a directory.* Correct this"):
        write(tmp_path / "file" / "state", 1)


TINY_DISK = """
import sys, torch
from pathlib import Path
from weightgrad.errors import CheckpointError
from weightgrad.runtime.checkpoints import snapshot
directory = Path(sys.argv[1])
for number in range(1, 9):
    try:
        snapshot.write(directory, "state", number, {"weights": torch.full((10_000 * number,), float(number))}, {})
    except CheckpointError as error:
        print(error)
        break
found = snapshot.newest(directory, "state")
print(found.number, set(found.tensors["weights"].tolist()), len(list(directory.iterdir())))
"""


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    enter = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size=500k tiny {tmp_path} && exec "$@"', "sh"]
    try:
        subprocess.run([*enter, "true"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("a small file system cannot be mounted here")
    ran = subprocess.run(
        [*enter, sys.executable, "-c", TINY_DISK, str(tmp_path)], capture_output=True, text=True, timeout=240
    )
    said, *rest = ran.stdout.splitlines()
    assert re.fullmatch(r"cannot write .*state-00000000000\d: the disk is full; the previous state is kept.*", said)
    number = int(said.split("state-")[1][:12])
    assert rest == [f"{number - 1} {{{float(number - 1)}}} 2"]
