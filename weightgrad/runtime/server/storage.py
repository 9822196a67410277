"""What a server process has on its disk: a snapshot now and then, and the log of everything that came since.

The state machine is pure, so state is a snapshot and the inputs since. An input is appended when it comes and synced
before anybody is told what followed from it. A snapshot is written by a thread while the process waits for pushes;
nothing that it writes changes before the next round closes, and closing waits for it. Writing therefore costs about the
bytes that come in, and not the model at every round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from torch import Tensor

from weightgrad.errors import CheckpointError
from weightgrad.runtime.checkpoints import snapshot
from weightgrad.runtime.checkpoints.durable_files import BackgroundWriter
from weightgrad.runtime.checkpoints.input_log import InputLog, LogRecord
from weightgrad.runtime.checkpoints.snapshot import Snapshot

_NAME = "state"
_LOG = "inputs"
_LOG_PER_STATE = 2.5  # bytes of log for each byte of state, before a new snapshot
_LEAST_LOG = 64 << 20


class Input(IntEnum):
    """The kinds of records."""

    CONTROL = 1
    """A control message of a site."""
    BULK = 2
    """A bulk message of a rank."""
    WAKE = 3
    """A deadline has expired."""
    PROCESS = 4
    """An order or a note of another server process."""
    OPERATION = 5
    """What the operator of the run has asked for."""


class ServerStorage:
    """The state of one server process on disk.

    Args:
        directory: where; made if it is not there. One process at a time may use it.
        observe: called with the seconds that writing a snapshot took.

    Raises:
        CheckpointError: another process uses the directory, or it cannot be read.
    """

    def __init__(self, directory: Path, observe: Callable[[float], None] = lambda seconds: None) -> None:
        self._directory, self._observe = directory, observe
        self._log = InputLog(directory, _LOG)
        self._writer = BackgroundWriter()
        self._number = 0
        self._position = 0  # everything up to here is in the newest snapshot
        self._state_bytes = 0

    def load(self) -> Snapshot | None:
        """Read the newest snapshot; None if the process has never had a state.

        Raises:
            CheckpointError: every snapshot is damaged, or the log is not the one that belongs to it.
        """
        found = snapshot.newest(self._directory, _NAME)
        if found is not None:
            self._check_log(found)
            self._number, self._position = found.number, int(found.facts["position"])
            self._state_bytes = sum(tensor.nbytes for tensor in found.tensors.values())
        return found

    def _check_log(self, found: Snapshot) -> None:
        """That the log is of this run and has everything since the snapshot.

        Otherwise inputs would be missing without a word: those of a file that is gone, and those that are yet to come
        with positions that the snapshot has already.
        """
        position, end = int(found.facts["position"]), int(found.facts["end"])
        name = f"{_NAME}-{found.number:012d}"
        if self._log.log_id != found.facts["log"]:
            what = f"the log is another one than that of {name}"
        elif self._log.first > position + 1:
            what = f"the log begins with input {self._log.first}, and {name} needs those from {position + 1} on"
        elif self._log.last < end:
            what = f"the log ends with input {self._log.last}, and {name} was written after input {end}"
        else:
            return
        raise CheckpointError(
            f"{self._directory}: {what}. Restore {_NAME}-* and {_LOG}-* from one backup. If there is none, remove "
            f"{name}: the server goes on from the snapshot before it, and if there is none either, from the beginning; "
            "remove the states of sites that are ahead then"
        )

    def records(self) -> Iterator[tuple[int, LogRecord]]:
        """The inputs since the snapshot that `load` returned, with their positions."""
        return self._log.records(after=self._position)

    def append(self, kind: Input, now: float, *buffers: bytes | memoryview) -> int:
        """Append an input; it is durable after the next `sync`.

        Returns:
            Its position in the log.

        Raises:
            CheckpointError: it could not be written; the log is as before.
        """
        return self._log.append(kind, now, *buffers)

    def sync(self) -> None:
        """Make all inputs durable.

        Raises:
            CheckpointError: the disk refused.
        """
        self._log.sync()

    @property
    def last(self) -> int:
        """The position of the last input."""
        return self._log.last

    # -- snapshots -----------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether the log has grown so long that a new snapshot is worth its bytes."""
        return self._log.bytes_after(self._position) > max(_LEAST_LOG, _LOG_PER_STATE * self._state_bytes)

    def write(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], position: int, *, wait: bool) -> None:
        """Write a snapshot, and cut the log before the oldest one that is kept.

        Args:
            tensors: the state. Its tensors may not change before the snapshot is written.
            facts: what else belongs to it.
            position: the inputs up to here are in it, or have no effect any more.
            wait: whether to return only when it is on the disk; otherwise `settle` waits.

        Raises:
            CheckpointError: it, the snapshot before or the log could not be written.
        """
        self._number, self._position = self._number + 1, position
        self._state_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._log.sync()  # a snapshot must not be ahead of its log
        belongs = {"position": position, "end": self._log.last, "log": self._log.log_id}
        number, known = self._number, {**facts, **belongs}

        def work() -> None:
            began = time.monotonic()
            snapshot.write(self._directory, _NAME, number, tensors, known)
            self._observe(time.monotonic() - began)

        self._writer.begin(work)
        if wait:
            self.settle()

    def settle(self) -> None:
        """Wait for a snapshot that is being written, and cut the log.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._writer.busy:
            self._writer.wait()
            if (oldest := snapshot.oldest_kept(self._directory, _NAME, "position")) is not None:
                self._log.cut(before=oldest + 1)

    def restart(self) -> None:
        """Forget the inputs of another run: the state begins anew."""
        self._log.restart(self._log.last + 1)
        self._position = self._log.last

    def close(self) -> None:
        """Let another process use the directory."""
        self._writer.wait()
        self._log.close()
