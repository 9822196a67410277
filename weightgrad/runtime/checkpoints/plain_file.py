"""Plain files of a state directory: opened so that nothing else can be in their way, and locked.

Every failure is a CheckpointError that says what to do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from weightgrad.errors import CheckpointError
from weightgrad.runtime.checkpoints.durable_files import cannot_write


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into the CheckpointError of a file that cannot be written."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error, 0) from error


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError into the CheckpointError of a file that cannot be read."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}; correct this and run the same command again") from error


def open_plain(path: Path, flags: int) -> int:
    """Open a plain file for its owner alone; nothing else, as a FIFO would block and a link may lead anywhere.

    Raises:
        CheckpointError: something else is there.
        OSError: it cannot be opened.
    """
    in_the_way = CheckpointError(f"{path} is not a plain file; remove it, or choose another directory for the state")
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise in_the_way from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise in_the_way
    return handle


def lock(path: Path) -> int:
    """Lock a directory for this process.

    Args:
        path: the lock file in this directory; made if it is not there, and never removed.

    Returns:
        The handle that holds the lock until it is closed.

    Raises:
        CheckpointError: another process holds the lock, or the file cannot be written.
    """
    with writing(path):
        handle = open_plain(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(handle, 20, 0).strip()
            os.close(handle)
            who = f"another process (pid {int(text)})" if text.isdigit() else "another process"
            raise CheckpointError(
                f"{who} uses {path.parent}; stop it, or choose another directory for the state"
            ) from None
        except BaseException:
            os.close(handle)
            raise
        with contextlib.suppress(OSError):  # a full disk: the lock holds without the number
            os.ftruncate(handle, 0)
            os.pwrite(handle, b"%d\n" % os.getpid(), 0)
    return handle
