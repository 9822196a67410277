"""One file of an input log: how records lie on the disk, and how they are checked. `input_log.py` is the log.

Little-endian, and the parser trusts nothing:

    file     magic 8 · version u32 · first position u64 · id 8 · XXH3-64 u64 · records
    record   id 8 · position u64 · time f64 · length u64 · kind u8 · XXH3-64 u64 · data

A record's checksum covers its other fields and its data. The id is random and common to all files and records of a
log. It finds the records that follow a damaged one, and a peer, who does not know it, cannot send data that looks like
a record.

The header is on the disk before the first record is written. So what a crash leaves is a header that is cut short, or
whole records and then bytes that are not a record. Both are removed from the last file of a log. A bad record with a
good one behind it is damage.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import struct
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import xxhash

from weightgrad.errors import CheckpointError
from weightgrad.runtime.checkpoints.plain_file import open_plain, reading, writing
from weightgrad.wire.versions import INPUT_LOG_VERSION

log = logging.getLogger("weightgrad.serve")

FILE_HEADER_BYTES = 36
RECORD_HEADER_BYTES = 41

_MAGIC = b"WGINPUTS"
_ID_BYTES = 8
_FILE_FIELDS = struct.Struct("<8sIQ8s")
_RECORD_FIELDS = struct.Struct("<8sQdQB")
_APPEND = os.O_RDWR | os.O_APPEND
_PIECE_BYTES = 1 << 18
_MAX_BUFFERS = 1024  # Linux takes no more in one writev


@dataclass(frozen=True)
class LogRecord:
    """One input of the state machine.

    Attributes:
        kind: 0 to 255; its meaning belongs to the caller.
        time: the caller's clock.
        data: the buffers that were appended, as one.
    """

    kind: int
    time: float
    data: bytes


class _Fields(NamedTuple):
    log_id: bytes
    position: int
    time: float
    length: int
    kind: int


class LogFile:
    """A file of records with consecutive positions, open for appending until it is closed.

    Attributes:
        path: where it is.
        first: the position of its first record.
        log_id: the id of the log.
    """

    def __init__(self, path: Path, first: int, log_id: bytes, handle: int) -> None:
        self.path, self.first, self.log_id = path, first, log_id
        self._ends = array("Q", [FILE_HEADER_BYTES])  # of the header and of each record
        self._handle = handle
        self._is_torn = False  # whether there may be bytes behind the last record
        self._is_synced = True

    @classmethod
    def create(cls, path: Path, first: int, log_id: bytes | None) -> LogFile:
        """Make an empty file; its header is on the disk when this returns.

        Args:
            path: where; nothing may be there.
            first: the position of its first record.
            log_id: the id of the log; None for a new log.

        Raises:
            CheckpointError: it could not be written, and is not there.
        """
        with writing(path):
            handle = open_plain(path, _APPEND | os.O_CREAT | os.O_EXCL)
            file = cls(path, first, log_id or secrets.token_bytes(_ID_BYTES), handle)
            try:
                file._write_header()
            except BaseException:
                file.close()
                path.unlink(missing_ok=True)
                raise
        return file

    @classmethod
    def load(cls, path: Path, first: int, log_id: bytes | None, *, max_record: int, is_last: bool) -> LogFile:
        """Check all bytes of a file and find its records; of the last file, remove what a crash has left.

        Args:
            path: where it is.
            first: the position of its first record, by its name.
            log_id: the id of the log; None to take that of this file.
            max_record: the most bytes of data in a record.
            is_last: whether it is the last file of the log.

        Raises:
            CheckpointError: it is damaged, of another log or version, or cannot be read. It is as it was.
        """
        with reading(path):
            file = cls(path, first, log_id or secrets.token_bytes(_ID_BYTES), open_plain(path, _APPEND))
            try:
                file._load(is_new_id=log_id is None, max_record=max_record, is_last=is_last)
            except BaseException:
                file.close()
                raise
        return file

    @property
    def last(self) -> int:
        """The position of the last record; `first` - 1 if there is none."""
        return self.first + len(self._ends) - 2

    @property
    def is_empty(self) -> bool:
        """Whether there is no record."""
        return self.last < self.first

    @property
    def nbytes(self) -> int:
        """The bytes of the header and of all records."""
        return self._ends[-1]

    def bytes_after(self, position: int) -> int:
        """Return the bytes of the records after a position."""
        return self.nbytes - self._ends[max(0, min(position, self.last) + 1 - self.first)]

    def append(self, kind: int, time: float, views: list[memoryview]) -> None:
        """Append a record of these bytes; no view is empty.

        Raises:
            CheckpointError: it could not be written; the file is as before.
        """
        length = sum(map(len, views))
        fields = _RECORD_FIELDS.pack(self.log_id, self.last + 1, time, length, kind)
        header = memoryview(fields + _checksum(fields, *views))
        with writing(self.path):
            self._remove_torn()
            self._is_torn, self._is_synced = True, False
            try:
                _write(self._handle, header, *views)
                self._ends.append(self.nbytes + RECORD_HEADER_BYTES + length)
                self._is_torn = False
            except BaseException:  # Ctrl-C leaves half a record, too
                with contextlib.suppress(OSError):  # then the next append or sync does it
                    self._remove_torn()
                raise

    def sync(self) -> None:
        """Make every record durable; does nothing if they are.

        Raises:
            CheckpointError: the disk refused.
        """
        if self._is_synced:
            return
        with writing(self.path):
            self._remove_torn()
            os.fsync(self._handle)
        self._is_synced = True

    def records(self, after: int, last: int) -> Iterator[tuple[int, LogRecord]]:
        """Read the records after one position up to another, one at a time.

        Yields:
            The position of a record, and the record.

        Raises:
            CheckpointError: the file was damaged or removed since it was loaded.
        """
        positions = range(max(after + 1, self.first), min(last, self.last) + 1)
        if not positions:
            return
        with reading(self.path):
            handle = open_plain(self.path, os.O_RDONLY)
        with open(handle, "rb") as stream:
            for position in positions:
                with reading(self.path):
                    record = self._read(stream, position)
                yield position, record
                del record  # or it would be in memory beside the next one

    def close(self) -> None:
        """End appending; records can still be read."""
        if self._handle >= 0:
            handle, self._handle = self._handle, -1
            with contextlib.suppress(OSError):  # what matters was synced
                os.close(handle)

    def _write_header(self) -> None:
        fields = _FILE_FIELDS.pack(_MAGIC, INPUT_LOG_VERSION, self.first, self.log_id)
        _write(self._handle, memoryview(fields + _checksum(fields)))
        os.fsync(self._handle)

    def _remove_torn(self) -> None:
        if self._is_torn:
            os.ftruncate(self._handle, self.nbytes)
            self._is_torn = False

    def _load(self, *, is_new_id: bool, max_record: int, is_last: bool) -> None:
        self._is_synced = False  # nobody knows whether the process that wrote the last records has synced them
        size = os.fstat(self._handle).st_size
        with open(self._handle, "rb", _PIECE_BYTES, closefd=False) as stream:
            header = stream.read(FILE_HEADER_BYTES)
            was_begun = size > FILE_HEADER_BYTES or (size == FILE_HEADER_BYTES and any(header))
            if was_begun or not is_last:
                self._check_header(header, is_new_id=is_new_id)
                self._find_records(stream, size, max_record)
                if self.nbytes < size and (not is_last or _has_record(stream, self.nbytes + 1, size, self.log_id)):
                    raise self._damaged(self.nbytes, "its bytes are not the ones that were written")
        if was_begun and self.nbytes == size:
            return
        end = self.nbytes if was_begun else 0
        log.warning("%s: removed %d bytes after input %d, which a crash cut short", self.path, size - end, self.last)
        with writing(self.path):
            os.ftruncate(self._handle, end)
            if not was_begun:
                self._write_header()

    def _check_header(self, header: bytes, *, is_new_id: bool) -> None:
        fields = header[: _FILE_FIELDS.size]
        if len(header) < FILE_HEADER_BYTES or header[:8] != _MAGIC or fields + _checksum(fields) != header:
            raise self._damaged(0, "it does not begin like a file of a log")
        _, version, first, log_id = _FILE_FIELDS.unpack(fields)
        if version != INPUT_LOG_VERSION:
            raise CheckpointError(
                f"{self.path} has version {version} at byte 8, this program reads version {INPUT_LOG_VERSION}; finish "
                "the run with the program that began it"
            )
        if first != self.first:
            raise self._damaged(0, f"it was written as the file of input {first}, and renamed")
        if log_id != self.log_id and not is_new_id:
            raise CheckpointError(
                f"{self.path} is of another log than the files before it, by its id at byte 20; put the files of each "
                "log into a directory of its own"
            )
        self.log_id = log_id

    def _find_records(self, stream: BinaryIO, size: int, max_record: int) -> None:
        while found := _good_record(stream, self.nbytes, size, self.log_id):
            if found.position != self.last + 1:
                raise self._damaged(self.nbytes, f"input {found.position} is where {self.last + 1} belongs")
            if found.length > max_record:
                raise CheckpointError(
                    f"{self.path} has an input of {found.length} bytes at byte {self.nbytes}, the limit is "
                    f"{max_record}; open the log with the limit that it was written with"
                )
            self._ends.append(self.nbytes + RECORD_HEADER_BYTES + found.length)

    def _read(self, stream: BinaryIO, position: int) -> LogRecord:
        start, end = self._ends[position - self.first], self._ends[position - self.first + 1]
        stream.seek(start)
        header, data = stream.read(RECORD_HEADER_BYTES), stream.read(end - start - RECORD_HEADER_BYTES)
        fields = header[: _RECORD_FIELDS.size]
        if len(header) < RECORD_HEADER_BYTES or fields + _checksum(fields, data) != header:
            raise self._damaged(start, "its bytes are not the ones that were written")
        found = _Fields(*_RECORD_FIELDS.unpack(fields))
        if (found.log_id, found.position, found.length) != (self.log_id, position, len(data)):
            raise self._damaged(start, f"input {position} was replaced by another")
        return LogRecord(found.kind, found.time, data)

    def _damaged(self, at: int, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is damaged at byte {at}: {what}. Restore the file from a backup. If there is none, give up "
            f"what follows: truncate -s {at} {self.path}, remove the later files of this log, and the states of sites "
            "that are ahead then"
        )


def _checksum(fields: bytes, *data: memoryview | bytes) -> bytes:
    digest = xxhash.xxh3_64(fields)
    for piece in data:
        digest.update(piece)
    return digest.intdigest().to_bytes(8, "little")


def _write(handle: int, *buffers: memoryview) -> None:
    """Write buffers, none of them empty; the system may take them in parts."""
    left = deque(buffers)
    while left:
        count = os.writev(handle, list(islice(left, _MAX_BUFFERS)))
        while left and count >= len(left[0]):
            count -= len(left.popleft())
        if left:
            left[0] = left[0][count:]


def _good_record(stream: BinaryIO, at: int, size: int, log_id: bytes) -> _Fields | None:
    """Return the fields of the record at this byte; None if there is none, or not a whole and undamaged one."""
    stream.seek(at)
    header = stream.read(RECORD_HEADER_BYTES)
    if len(header) < RECORD_HEADER_BYTES:
        return None
    found = _Fields(*_RECORD_FIELDS.unpack_from(header))
    if found.log_id != log_id or found.length > size - at - RECORD_HEADER_BYTES:
        return None
    digest, left = xxhash.xxh3_64(header[: _RECORD_FIELDS.size]), found.length
    while piece := stream.read(min(left, _PIECE_BYTES)):
        digest.update(piece)
        left -= len(piece)
    is_good = not left and digest.intdigest() == int.from_bytes(header[_RECORD_FIELDS.size :], "little")
    return found if is_good else None


def _has_record(stream: BinaryIO, at: int, size: int, log_id: bytes) -> bool:
    """Tell whether a good record begins at this byte or behind it."""
    kept = b""  # an id may lie across two pieces
    while at < size:
        stream.seek(at)
        window = kept + stream.read(_PIECE_BYTES)
        start = at - len(kept)
        found = window.find(log_id)
        while found >= 0:
            if _good_record(stream, start + found, size, log_id):
                return True
            found = window.find(log_id, found + 1)
        at, kept = start + len(window), window[1 - _ID_BYTES :]
    return False
