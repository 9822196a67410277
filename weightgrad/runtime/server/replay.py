"""How a server process goes on after its end: the newest snapshot, and every input of the log once more."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable

from weightgrad.errors import CheckpointError, WeightGradError
from weightgrad.runtime.checkpoints.input_log import LogRecord
from weightgrad.runtime.checkpoints.snapshot import Snapshot
from weightgrad.runtime.server.process import ServerProcess
from weightgrad.runtime.transport.transport import Peer
from weightgrad.wire.message_bytes import unpack

log = logging.getLogger("weightgrad.serve")


def load(process: ServerProcess) -> Snapshot | None:
    """The newest snapshot of a process; None if it has never had a state.

    Raises:
        CheckpointError: every snapshot is damaged.
    """
    found = None if process.storage is None else process.storage.load()
    for line in () if found is None else found.damaged:
        log.error("%s; continuing from the snapshot before it", line)
    return found


def replay(process: ServerProcess, take: Callable[[int, LogRecord], None]) -> None:
    """Take every input since the snapshot once more; the state machines end where they were.

    Args:
        process: the process, which has been restored from the snapshot.
        take: takes the input of a position; what it raises was refused then, too.

    Raises:
        CheckpointError: the log cannot be read.
    """
    assert process.storage is not None
    assert process.serving is not None
    process.replaying = True
    try:
        for position, record in process.storage.records():
            try:
                take(position, record)
            except CheckpointError:
                raise
            except WeightGradError:
                pass  # it was refused then, too
    finally:
        process.replaying = False
    process.serving.forget_connections()
    _return_memory()


def _return_memory() -> None:
    """Give the system what reading the log has freed: glibc keeps it, more of it the longer the log is."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def sender_of(process: ServerProcess, data: bytes) -> Peer:
    """Who has sent a bulk message of the log.

    Raises:
        WireError: it cannot be read.
    """
    message = unpack(data, process.limits())
    return Peer(getattr(message, "site", ""), getattr(message, "rank", 0))
