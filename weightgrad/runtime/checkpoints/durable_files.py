"""What all that writes state to a disk needs: a thread that writes, durable names, errors that say what to do."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError

from weightgrad.errors import CheckpointError


def cannot_write(target: Path, error: Exception, size: int) -> CheckpointError:
    """Return the error for a file of `size` bytes that could not be written; it says what to do.

    safetensors reports a failed write without its errno, so the free space of the disk is compared with `size`.
    """
    if getattr(error, "errno", None) == errno.ENOSPC or (
        isinstance(error, SafetensorError) and _is_full(target.parent, size)
    ):
        why = "the disk is full; the previous state is kept. Free some space and run the same command again"
    else:
        why = f"{error}; the previous state is kept. Correct this and run the same command again"
    return CheckpointError(f"cannot write {target}: {why}")


class BackgroundWriter:
    """Writes checkpoints in a thread of its own while training goes on.

    It does one piece of work at a time. A process that ends waits for the work to be done.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._work: Future[object] | None = None

    def begin(self, work: Callable[[], object]) -> None:
        """Wait for the work before, then start this work and return. Raises what went wrong before."""
        self.wait()
        self._work = self._thread.submit(work)

    @property
    def busy(self) -> bool:
        """Whether there is work whose end nobody has waited for."""
        return self._work is not None

    def look(self) -> None:
        """Raise what went wrong, if the work has ended. Never waits."""
        if self._work is not None and self._work.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the work is done. Raises what went wrong."""
        work, self._work = self._work, None
        if work is not None:
            work.result()


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_full(directory: Path, size: int) -> bool:
    try:
        return shutil.disk_usage(directory).free < size
    except OSError:
        return False
