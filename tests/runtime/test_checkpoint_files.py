"""The directories of a site's checkpoints: which is the newest, and which files are damaged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weightgrad.runtime.checkpoints.checkpoint_files import (
    all_checkpoints,
    damaged_file,
    has_facts,
    newest_step,
    newest_version,
    path_of,
    read_facts,
    write_digests,
    write_facts,
)


def made(directory: Path, step: int) -> Path:
    checkpoint = path_of(directory, step)
    checkpoint.mkdir()
    write_facts(checkpoint, {"step": step, "version": step // 10})
    return checkpoint


def test_the_newest_has_the_largest_step_however_many_digits(tmp_path: Path) -> None:
    assert newest_step(tmp_path) is None
    assert newest_version(tmp_path) == newest_version(None) == newest_version(tmp_path / "nowhere") == -1
    for step in (1000, 50, 900):
        made(tmp_path, step)
    (tmp_path / ".checkpoint-000000002000").mkdir()  # one that is being written
    assert [read_facts(path)["step"] for path in all_checkpoints(tmp_path)] == [50, 900, 1000]
    assert (newest_step(tmp_path), newest_version(tmp_path)) == (1000, 100)


def test_facts_that_cannot_be_read_are_passed_over(tmp_path: Path) -> None:
    made(tmp_path, 50)
    (torn,) = made(tmp_path, 100).iterdir()
    torn.write_text("{")
    path_of(tmp_path, 150).mkdir()
    assert not has_facts(path_of(tmp_path, 150))
    assert newest_step(tmp_path) == 50


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_has_changed_is_named(tmp_path: Path, rank: int) -> None:
    checkpoint = made(tmp_path, 50)
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp", "__10_0.distcp"):
        (checkpoint / name).write_bytes(name.encode())
    write_digests(checkpoint, rank)
    (checkpoint / "__10_0.distcp").write_bytes(b"another rank's")
    assert damaged_file(checkpoint, rank) is None
    (checkpoint / f"__{rank}_0.distcp").write_bytes(b"torn")
    assert damaged_file(checkpoint, rank) == f"__{rank}_0.distcp"


def test_rank_0_answers_for_the_facts_and_the_metadata(tmp_path: Path) -> None:
    checkpoint = made(tmp_path, 50)
    (checkpoint / ".metadata").write_bytes(b"m")
    write_digests(checkpoint, 0)
    (checkpoint / ".metadata").write_bytes(b"n")
    assert damaged_file(checkpoint, 0) == ".metadata"
    with pytest.raises(OSError, match="digests-1"):
        damaged_file(checkpoint, 1)


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_what_is_no_plain_file_is_not_waited_for_and_not_followed(tmp_path: Path, kind: str) -> None:
    checkpoint = made(tmp_path, 50)
    written, elsewhere = checkpoint / "__1_0.distcp", tmp_path / "elsewhere"
    written.write_bytes(b"w")
    write_digests(checkpoint, 1)
    written.rename(elsewhere)
    if kind == "fifo":
        os.mkfifo(written)
    else:
        written.symlink_to(elsewhere)
    with pytest.raises(OSError, match=r"plain file|symbolic links"):
        damaged_file(checkpoint, 1)
