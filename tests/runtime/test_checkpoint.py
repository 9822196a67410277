"""Checkpoints: whole or not there, damage is noticed, a full disk loses nothing, another run's are refused."""

from __future__ import annotations

import errno
import logging
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from weightgrad.codecs import Fp32
from weightgrad.errors import CheckpointError
from weightgrad.runtime import checkpoint
from weightgrad.runtime.checkpoint import DiskResultLog
from weightgrad.wire.messages import RoundResult, Segment, nbytes

from .deployment import Hub, Runner, finish, tiny

FACTS = {"step": 10, "strategy": {"trigger": "every(4)"}}


def tensors(seed: int = 0) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {
        "weights": torch.randn(5, 3, generator=chance),
        "clock": torch.tensor([seed, 2**40]),
        "nothing": torch.zeros(0),
        "bytes": torch.randint(0, 255, (7,), dtype=torch.uint8, generator=chance),
        "number": torch.tensor(2.5, dtype=torch.float64),
    }


def assert_is(found: checkpoint.Checkpoint | None, number: int) -> None:
    assert found is not None
    assert found.number == number
    assert found.facts == {**FACTS, "step": number}
    wanted = tensors(number)
    assert found.tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)


def write(directory: Path, *numbers: int) -> Path:
    """Generations of these numbers; the path of the last."""
    for number in numbers:
        last = checkpoint.write(directory, "server", number, tensors(number), {**FACTS, "step": number})
    return last


# -- generations --------------------------------------------------------------------------------


def test_the_two_newest_are_kept_and_the_newest_is_read(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "not there", "server") is None
    for number in range(1, 6):
        write(tmp_path / "state", number)
        assert_is(checkpoint.newest(tmp_path / "state", "server"), number)
    assert sorted(os.listdir(tmp_path / "state")) == [f"server-{n:012d}.safetensors" for n in (4, 5)]
    assert_is(checkpoint.exact(tmp_path / "state", "server", 4), 4)


def test_names_do_not_mix(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    checkpoint.write(tmp_path, "server-1", 9, tensors(9), {})
    checkpoint.write(tmp_path, "rank-0", 7, tensors(7), {})
    (tmp_path / "server-x.safetensors").write_bytes(b"")
    assert [path.name for path in checkpoint.generations(tmp_path, "server")] == [
        "server-000000000002.safetensors",
        "server-000000000003.safetensors",
    ]


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    write(tmp_path, 1)
    torn = tmp_path / ".server-000000000002.safetensors.4711"
    torn.write_bytes(b"half of it")
    assert_is(checkpoint.newest(tmp_path, "server"), 1)
    write(tmp_path, 2)
    assert not torn.exists()


# -- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 7, 8, 200, -1])
def test_a_truncated_newest_is_said_and_the_one_before_it_is_used(left: int, tmp_path: Path) -> None:
    last = write(tmp_path, 1, 2, 3)
    last.write_bytes(last.read_bytes()[:left])
    found = checkpoint.newest(tmp_path, "server")
    assert_is(found, 2)
    assert found is not None
    (line,) = found.damaged
    assert line.startswith("server-000000000003.safetensors is damaged")
    assert checkpoint.readable(tmp_path, "server") == ([2], [line])
    write(tmp_path, 3)
    assert_is(checkpoint.newest(tmp_path, "server"), 3)


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path, 10)
    whole, chance = path.read_bytes(), random.Random(1)
    places = [(at, 1 << chance.randrange(8)) for at in range(len(whole))]
    for at, bit in places:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match="damaged"):
            checkpoint.exact(tmp_path, "server", 10)


def test_when_all_are_damaged_the_error_says_what_to_do(tmp_path: Path) -> None:
    last = write(tmp_path, 1, 2)
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    (tmp_path / "server-000000000001.safetensors").write_bytes(b"")
    for reads in (checkpoint.newest, checkpoint.readable):
        with pytest.raises(CheckpointError) as caught:
            reads(tmp_path, "server")
        said = str(caught.value)
        assert f"no checkpoint in {tmp_path} can be read" in said
        assert "server-000000000002.safetensors is damaged: its bytes are not the ones that were written" in said
        assert "server-000000000001.safetensors is damaged or not a checkpoint" in said
        assert "Restore one from a backup, or remove the directory to start from the beginning" in said


# -- a full disk --------------------------------------------------------------------------------


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_for(directory: Path) -> Callable[..., None]:
    """A `save_file` that finds no room in that directory."""

    def save(tensors: dict[str, torch.Tensor], path: str, **options: Any) -> None:
        if Path(path).parent == directory:
            full()
        save_file(tensors, path, **options)

    return save


@pytest.mark.parametrize("where", ["save_file", "os.fsync", "os.replace"])
def test_a_full_disk_keeps_the_last_state_and_is_named(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(f"weightgrad.runtime.checkpoint.{where}", full)
        with pytest.raises(CheckpointError, match=r"cannot write .*000003\.safetensors: the disk is full; the previ"):
            write(tmp_path, 3)
    assert_is(checkpoint.newest(tmp_path, "server"), 2)
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
from weightgrad.runtime import checkpoint
directory = Path(sys.argv[1])
for number in range(1, 9):
    try:
        checkpoint.write(directory, "server", number, {"weights": torch.full((10_000 * number,), float(number))}, {})
    except CheckpointError as error:
        print(error)
        break
found = checkpoint.newest(directory, "server")
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
    assert re.fullmatch(
        r"cannot write .*server-00000000000\d\.safetensors: the disk is full; the previous state.*", said
    )
    number = int(said.split("server-")[1][:12])
    assert rest == [f"{number - 1} {{{float(number - 1)}}} 2"]


def test_a_server_whose_disk_is_full_ends_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = tiny("{name: diloco, every: 4, t_global: null}", workers=1, steps=24)
    with Hub(recipe) as whole:
        finish(*[Runner(recipe, name, whole.address) for name in ("east", "west")])
        wanted = whole.core.global_model.digest()
    out = tmp_path / "out"
    out.mkdir()
    hub = Hub(recipe, state=tmp_path / "state", out=out)
    sites = [Runner(recipe, name, hub.address, to=6) for name in ("east", "west")]
    hub.until(lambda: all(site.version == 1 for site in sites))
    with monkeypatch.context() as patch:
        patch.setattr("weightgrad.runtime.checkpoint.save_file", full)
        patch.setattr("weightgrad.runtime.server.save_file", full)
        for site in sites:
            site.limit = 12
        hub.join()
    assert isinstance(hub.error, CheckpointError)
    assert "the disk is full; the previous state is kept" in str(hub.error), "and not that of the last global model"
    assert "model.safetensors: the disk is full" in caplog.text
    assert hub.server.status()["healthy"] is False
    before = checkpoint.newest(tmp_path / "state", "server")
    assert before is not None
    assert int(before.tensors["clock"][0]) == 1
    with Hub(recipe, state=tmp_path / "state", listen=hub.address) as again:
        finish(*sites)
        assert again.core.global_model.digest() == wanted


def test_a_site_whose_disk_is_full_ends_and_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny("{name: diloco, every: 4, t_global: null}", workers=1, steps=16)
    with Hub(recipe) as whole:
        finish(*[Runner(recipe, name, whole.address) for name in ("east", "west")])
        wanted = whole.core.global_model.digest()
    with Hub(recipe, state=tmp_path / "server") as hub:
        east = Runner(recipe, "east", hub.address, state=tmp_path / "east", checkpoint_every=3)
        west = Runner(recipe, "west", hub.address, to=5, state=tmp_path / "west", checkpoint_every=3)
        hub.until(lambda: west.site.steps == 5)
        assert west.site._checkpoint is not None
        west.site._checkpoint.writer.wait()
        with monkeypatch.context() as patch:
            patch.setattr("weightgrad.runtime.checkpoint.save_file", full_for(tmp_path / "west"))
            west.limit = 12
            hub.until(lambda: west.error is not None)
        assert isinstance(west.error, CheckpointError), "told at a step after it, not lost with its thread"
        assert "rank-0-000000000006.safetensors: the disk is full" in str(west.error)
        assert west.site.steps < 10, "at the next checkpoint at the latest"
        west = Runner(recipe, "west", hub.address, state=tmp_path / "west", checkpoint_every=3)
        finish(east, west)
        assert hub.core.global_model.digest() == wanted


def test_a_full_disk_of_the_results_ends_the_server_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = DiskResultLog(tmp_path, 10**6)
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*000000000001\.result: the disk is full"):
        log.append(result(1))


# -- states of another run ----------------------------------------------------------------------


def test_the_state_of_another_run_is_refused_by_the_server(tmp_path: Path) -> None:
    strategy = "{name: diloco, every: 4, t_global: 60}"
    with Hub(tiny(strategy, workers=1, steps=4), state=tmp_path) as hub:
        finish(*[Runner(tiny(strategy, workers=1, steps=4), name, hub.address) for name in ("east", "west")])
    other = tiny("{name: diloco, every: 8, t_global: 60}", workers=1)
    with pytest.raises(
        CheckpointError,
        match=r"is of another run: its strategy is another, trigger is 'every\(8\)' here and 'every\(4\)'",
    ):
        Hub(other, state=tmp_path)
    seeded = tiny(strategy, workers=1).model_copy(update={"seed": 4})
    with pytest.raises(
        CheckpointError, match=r"its seed is 3, here it is 4; give --state another directory, or the rec"
    ):
        Hub(seeded, state=tmp_path)


def test_the_state_of_another_run_is_refused_by_the_site(tmp_path: Path) -> None:
    strategy = "{name: diloco, every: 4, t_global: 60}"

    def train(recipe: Any, module: torch.nn.Module | None = None) -> None:
        with Hub(recipe) as hub:
            options: dict[str, Any] = {"state": tmp_path / "east", "checkpoint_every": 2, "module": module}
            finish(Runner(recipe, "east", hub.address, **options))

    recipe = tiny(strategy, workers=1)
    with Hub(recipe) as hub:
        east = Runner(recipe, "east", hub.address, to=3, state=tmp_path / "east", checkpoint_every=2)
        hub.until(lambda: east.site.steps == 3)
        east.vanish()
    with pytest.raises(
        CheckpointError, match=r"east is of another run: its strategy is another, trigger is 'every\(2\)'"
    ):
        train(tiny("{name: diloco, every: 2, t_global: 60}", workers=1, steps=8))
    with pytest.raises(
        CheckpointError, match=r"east is of another run: its seed is 3, now it is 4; give state another"
    ):
        train(tiny(strategy, workers=1, steps=8).model_copy(update={"seed": 4}))
    with pytest.raises(
        CheckpointError, match=r"east is of another run: its model is another, parameter 0 is 1\.weight"
    ):
        train(tiny(strategy, workers=1, steps=8), torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)))


def test_a_site_with_a_damaged_newest_state_goes_on_from_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = tiny("{name: diloco, every: 4, t_global: null}", workers=1, steps=16)
    caplog.set_level(logging.INFO)
    with Hub(recipe, state=tmp_path / "server") as hub:
        east = Runner(recipe, "east", hub.address, state=tmp_path / "east", checkpoint_every=3)
        west = Runner(recipe, "west", hub.address, to=11, state=tmp_path / "west", checkpoint_every=3)
        hub.until(lambda: west.site.steps == 11)
        west.vanish()
        newest = checkpoint.generations(tmp_path / "west", "rank-0")[-1]
        assert newest.name == "rank-0-000000000009.safetensors"
        newest.write_bytes(newest.read_bytes()[:-5])
        west = Runner(recipe, "west", hub.address, state=tmp_path / "west", checkpoint_every=3)
        finish(east, west)
        assert "rank-0-000000000009.safetensors is damaged" in caplog.text
        assert "the checkpoint before it" in caplog.text
        assert "west goes on from step 6" in caplog.text
        assert west.global_model.digest() == hub.core.global_model.digest()


# -- the last answers ---------------------------------------------------------------------------


def result(version: int, numel: int = 50) -> RoundResult:
    payload, _ = Fp32().encode(torch.full((numel,), float(version)), {}, 0)
    return RoundResult(
        version=version, round=version, step=4 * version, segments=(Segment(0, payload),), included={"east": version}
    )


def versions(log: DiskResultLog, since: int, now: int) -> list[int] | None:
    found = log.since(since, now)
    return None if found is None else [one.version for one in found]


def test_results_come_back_after_a_restart(tmp_path: Path) -> None:
    log = DiskResultLog(tmp_path, 10**6)
    for number in range(1, 6):
        log.append(result(number))
    again = DiskResultLog(tmp_path, 10**6)
    assert versions(again, 0, 5) == [1, 2, 3, 4, 5]
    assert versions(again, 3, 5) == [4, 5]
    assert versions(again, 5, 5) == []
    found = again.since(4, 5)
    assert found is not None
    assert (found[0].round, found[0].step, found[0].included) == (5, 20, {"east": 5})
    out = torch.zeros(50)
    found[0].segments[0].into(out, 0)
    assert torch.equal(out, torch.full((50,), 5.0))


def test_a_restart_forgets_later_results(tmp_path: Path) -> None:
    log = DiskResultLog(tmp_path, 10**6)
    for number in range(1, 6):
        log.append(result(number))
    again = DiskResultLog(tmp_path, 10**6)
    again.restart(3)
    assert versions(again, 0, 3) == [1, 2, 3]
    assert versions(again, 3, 5) is None
    assert sorted(os.listdir(tmp_path)) == [f"{n:012d}.result" for n in (1, 2, 3)]


@pytest.mark.parametrize("damage", ["torn", "flipped", "gone", "another"])
def test_a_damaged_result_is_none(damage: str, tmp_path: Path) -> None:
    log = DiskResultLog(tmp_path, 10**6)
    for number in (1, 2, 3):
        log.append(result(number))
    path = tmp_path / "000000000002.result"
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        flipped = bytes([data[-1] ^ 1])
        path.write_bytes({
            "torn": data[:-1], "flipped": data[:-1] + flipped,
            "another": (tmp_path / "000000000003.result").read_bytes(),
        }[damage])  # fmt: skip
    assert versions(log, 0, 3) is None
    assert versions(log, 1, 3) is None
    assert versions(log, 2, 3) == [3]


def test_the_cap_keeps_the_newest_but_always_a_few(tmp_path: Path) -> None:
    size = nbytes(result(1))
    log = DiskResultLog(tmp_path / "six", 6 * size)
    few = DiskResultLog(tmp_path / "few", 1, least=2)
    for number in range(1, 11):
        log.append(result(number))
        few.append(result(number))
    assert versions(log, 4, 10) == [5, 6, 7, 8, 9, 10]
    assert versions(log, 3, 10) is None
    assert len(os.listdir(tmp_path / "six")) == 6
    assert versions(few, 8, 10) == [9, 10]
    assert len(os.listdir(tmp_path / "few")) == 2
