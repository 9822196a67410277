"""The log of a server process, taken once more."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from weightgrad.errors import CheckpointError, ProtocolError
from weightgrad.runtime.checkpoints.input_log_file import LogRecord
from weightgrad.runtime.server.process import ServerProcess
from weightgrad.runtime.server.replay import load, replay
from weightgrad.runtime.server.storage import Input, ServerStorage


class Process:
    """A process with a disk and nothing to serve."""

    def __init__(self, storage: ServerStorage | None) -> None:
        self.storage, self.replaying = storage, False
        self.forgotten = 0
        self.serving = SimpleNamespace(forget_connections=self._forget)

    def _forget(self) -> None:
        assert not self.replaying
        self.forgotten += 1


def process_of(directory: Path) -> tuple[ServerProcess, Process]:
    """The same one as the code sees it, and as the test does."""
    made = Process(ServerStorage(directory))
    return cast(ServerProcess, made), made


def test_what_was_refused_then_is_refused_again_and_the_rest_is_taken(tmp_path: Path) -> None:
    process, seen = process_of(tmp_path)
    assert process.storage is not None
    assert load(process) is None
    for number in range(4):
        process.storage.append(Input.BULK, float(number), bytes([number]))
    process.storage.write({"x": torch.zeros(2)}, {}, 1, wait=True)
    assert load(process) is not None
    taken: list[bytes] = []

    def take(position: int, record: LogRecord) -> None:
        assert seen.replaying
        if record.data == b"\x02":
            raise ProtocolError("as it was then")
        taken.append(record.data)

    replay(process, take)
    assert taken == [b"\x01", b"\x03"], "the first is in the snapshot"
    assert seen.forgotten == 1
    process.storage.close()


def test_a_log_that_cannot_be_taken_ends_it(tmp_path: Path) -> None:
    process, seen = process_of(tmp_path)
    assert process.storage is not None
    process.storage.append(Input.BULK, 0.0, b"x")

    def take(position: int, record: LogRecord) -> None:
        raise CheckpointError("torn")

    with pytest.raises(CheckpointError, match="torn"):
        replay(process, take)
    assert not seen.replaying
    process.storage.close()


def test_without_a_disk_there_is_nothing_to_go_on_from() -> None:
    assert load(cast(ServerProcess, Process(None))) is None
