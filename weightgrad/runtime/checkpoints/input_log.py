"""The input log: every input of a state machine since its last snapshot, on disk before it is answered.

    log = InputLog(state, "inputs")
    for position, record in log.records(after=snapshot): ...    # a restart: the same inputs in the same order
    log.append(PUSH, now, header, body)
    log.sync()                                                  # only now may anybody be told
    log.cut(before=snapshot + 1)                                # a newer snapshot contains these inputs

A log is files NAME-<first position>.log; `input_log_file.py` has their layout. A file is synced before the next one
begins, so a crash can tear only the end of the last file. Files are removed from the oldest on, and the directory is
synced after each, so a crash leaves no hole between files.

If power fails between two appends and their sync, a disk may have kept the second and not the first. That cannot be
told from damage, and is an error when the log is opened. A sync after each append excludes it.

Left out: compression (payloads are encoded already), and locks between threads (one thread uses a log).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from weightgrad.errors import CheckpointError
from weightgrad.runtime.checkpoints.input_log_file import LogFile, LogRecord
from weightgrad.runtime.checkpoints.plain_file import lock, reading, writing

__all__ = ["InputLog", "LogRecord"]

log = logging.getLogger("weightgrad.serve")


class InputLog:
    """A log of records on disk. One process at a time has it open.

    Opening it checks every byte and syncs what was found. An end that a crash cut short is removed, with a warning.

    Args:
        directory: where the files are; made if it is not there.
        name: which of the logs in this directory.
        file_bytes: a file of at least this size is followed by a new one.
        max_record: the most bytes of data in a record.

    Raises:
        CheckpointError: the log is damaged, another process uses it, or it cannot be read or written.
    """

    def __init__(self, directory: Path, name: str, *, file_bytes: int = 64 << 20, max_record: int = 256 << 20) -> None:
        self._directory, self._name = directory, name
        self._file_bytes, self._max_record = file_bytes, max_record
        self._files: list[LogFile] = []
        self._handles: list[int] = []  # of the directory and of the lock
        self._unusable: str | None = None
        try:
            with writing(directory):
                _make(directory)
                self._handles.append(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))
            self._handles.append(lock(directory / f"{name}.lock"))
            self._load()
        except BaseException:
            self.close()
            raise

    @property
    def first(self) -> int:
        """The position of the oldest record; `last` + 1 if there is none."""
        return self._files[0].first

    @property
    def last(self) -> int:
        """The position of the newest record, whether it was cut or not; 0 if none was ever written."""
        return self._files[-1].last

    @property
    def log_id(self) -> str:
        """What its files have in common, and no other log has."""
        return self._files[0].log_id.hex()

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return sum(file.nbytes for file in self._files)

    def bytes_after(self, position: int) -> int:
        """Return the bytes of the records after a position: what a restart from there would read."""
        return sum(file.bytes_after(position) for file in self._files)

    def append(self, kind: int, time: float, *buffers: bytes | memoryview) -> int:
        """Append a record. It is durable after the next `sync`, not before.

        Args:
            kind: 0 to 255; its meaning belongs to the caller.
            time: the caller's clock.
            buffers: contiguous buffers; one after the other they are the data. They are not copied.

        Returns:
            The position of the record: 1, 2, 3, ... over the life of the log.

        Raises:
            CheckpointError: the record is too long or cannot be written. The log is as before, and a later append may
                succeed.
            ValueError: the kind is out of range.
        """
        self._check_usable()
        if not 0 <= kind <= 255:
            raise ValueError(f"the kind of a record must be from 0 to 255, got {kind}")
        views = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        length = sum(map(len, views))
        if length > self._max_record:
            raise CheckpointError(f"an input has {length} bytes; the log {self._name} takes up to {self._max_record}")
        if self._files[-1].nbytes >= self._file_bytes and not self._files[-1].is_empty:
            self._begin_file()
        self._files[-1].append(kind, time, views)
        return self.last

    def sync(self) -> None:
        """Make every record durable; does nothing if they are.

        Raises:
            CheckpointError: the disk refused. The log takes no more records then: after a failed fsync the system may
                have dropped the bytes, and the success of a second one would mean nothing.
        """
        self._check_usable()
        with self._or_unusable():
            self._files[-1].sync()

    def records(self, after: int = 0) -> Iterator[tuple[int, LogRecord]]:
        """Read the records after a position, in order and one at a time.

        Yields:
            The position of a record, and the record.

        Raises:
            CheckpointError: a file was damaged or removed since the log was opened.
        """
        last = self.last
        for file in list(self._files):
            yield from file.records(after, last)

    def cut(self, before: int) -> None:
        """Remove the files whose records all have positions below `before`. The next position stays the same.

        Raises:
            CheckpointError: a file could not be removed, or the next one not begun.
        """
        self._check_usable()
        self._remove_files(before)
        if before > self.last and not self._files[-1].is_empty:
            self._begin_file()  # an empty file remembers the position
            self._remove_files(before)

    def restart(self, position: int) -> None:
        """Remove all records; the next one has this position.

        Raises:
            CheckpointError: it was not done, or in part. The log takes no more records then; open it again.
            ValueError: the position is less than 1.
        """
        self._check_usable()
        if position < 1:
            raise ValueError(f"the position of a record must be at least 1, got {position}")
        with self._or_unusable():
            for file in self._files:  # before the new file: a crash in between must not leave a hole
                self._remove(file)
            self._files = [self._create(position)]

    def close(self) -> None:
        """Let another process open the log. Does not sync."""
        self._unusable = self._unusable or f"the log {self._name} in {self._directory} is closed"
        for file in self._files:
            file.close()
        while self._handles:
            os.close(self._handles.pop())

    def _check_usable(self) -> None:
        if self._unusable:
            raise CheckpointError(self._unusable)

    @contextlib.contextmanager
    def _or_unusable(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self._unusable = str(error)
            raise

    def _load(self) -> None:
        pattern = re.compile(re.escape(self._name) + r"-([0-9]{12}|[1-9][0-9]{12,})\.log")
        with reading(self._directory):
            found = {int(match[1]): match[0] for match in map(pattern.fullmatch, os.listdir(self._directory)) if match}
        for first, name in sorted(found.items()):
            self._load_file(self._directory / name, first, is_last=first == max(found))
        if not found:
            self._files.append(self._create(1))
        self._files[-1].sync()
        with writing(self._directory):
            os.fsync(self._handles[0])

    def _load_file(self, path: Path, first: int, *, is_last: bool) -> None:
        if self._files and first != self.last + 1:
            raise CheckpointError(
                f"{path} begins with input {first} at byte 0, but {self._files[-1].path.name} ends with input "
                f"{self.last}. Restore what is missing from a backup. If there is none, give up what follows: remove "
                "this file and the later files of this log, and the states of sites that are ahead then"
            )
        log_id = self._files[0].log_id if self._files else None
        file = LogFile.load(path, first, log_id, max_record=self._max_record, is_last=is_last)
        if not is_last:
            file.close()
        self._files.append(file)

    def _create(self, first: int) -> LogFile:
        path = self._directory / f"{self._name}-{first:012d}.log"
        file = LogFile.create(path, first, self._files[0].log_id if self._files else None)
        with writing(path):
            try:
                os.fsync(self._handles[0])
            except BaseException:
                file.close()
                path.unlink(missing_ok=True)
                raise
        return file

    def _begin_file(self) -> None:
        self.sync()  # or a crash could tear a file that is not the last
        self._files.append(self._create(self.last + 1))
        self._files[-2].close()

    def _remove_files(self, before: int) -> None:
        while len(self._files) > 1 and self._files[0].last < before:
            self._remove(self._files[0])
            del self._files[0]

    def _remove(self, file: LogFile) -> None:
        file.close()
        with writing(file.path):
            file.path.unlink(missing_ok=True)
            os.fsync(self._handles[0])  # after each, or a crash could bring back an older file without the next


def _make(directory: Path) -> None:
    if directory.is_dir():
        _warn_of_others(directory)
        return
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    parent = os.open(directory.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def _warn_of_others(directory: Path) -> None:
    """Say so if others may replace files in a state directory. It is used all the same: volumes are made so."""
    state = directory.stat()
    others = state.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not state.st_mode & stat.S_ISVTX
    if others or state.st_uid not in (os.geteuid(), 0):
        log.warning(
            "%s belongs to user %d and has mode %03o: others than this process may replace the state in it. If that is "
            "not meant, stop the server and run chmod 700 on it",
            directory,
            state.st_uid,
            stat.S_IMODE(state.st_mode),
        )
