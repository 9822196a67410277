"""The input log: what was synced survives kill -9, power failure and full disks; damage is an error, never other data.

Truncations, flipped bytes and power failures come from Hypothesis. A power failure keeps of every file any length from
what was synced to what was written.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from weightgrad.errors import CheckpointError
from weightgrad.runtime.checkpoints import input_log_file
from weightgrad.runtime.checkpoints.input_log import InputLog, LogRecord
from weightgrad.runtime.checkpoints.input_log_file import FILE_HEADER_BYTES, RECORD_HEADER_BYTES

SMALL = 300  # bytes of a file: four records of `some`

records_st = st.builds(LogRecord, st.integers(0, 255), st.floats(allow_nan=False), st.binary(max_size=90))
many = st.lists(records_st, min_size=1, max_size=15)


def some(count: int, size: int = 30) -> list[LogRecord]:
    chance = random.Random(count)
    return [LogRecord(n % 256, n / 3, chance.randbytes(size + n % 3)) for n in range(count)]


def opened(directory: Path, file_bytes: int = SMALL, **options: Any) -> InputLog:
    return InputLog(directory, "inputs", file_bytes=file_bytes, **options)


def extend(log: InputLog, records: Sequence[LogRecord]) -> None:
    for record in records:
        log.append(record.kind, record.time, record.data[:7], memoryview(record.data)[7:])
    log.sync()


def fill(directory: Path, records: Sequence[LogRecord], file_bytes: int = SMALL) -> list[Path]:
    """A closed log of these records; its files."""
    with closing(opened(directory, file_bytes)) as log:
        extend(log, records)
    return files(directory)


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("inputs-*.log"))


def contents(log: InputLog, first: int = 1) -> list[LogRecord]:
    """All records; their positions must follow one another."""
    found = list(log.records())
    assert [position for position, _ in found] == list(range(first, first + len(found)))
    assert log.last == first + len(found) - 1
    return [record for _, record in found]


def reread(directory: Path, first: int = 1) -> list[LogRecord]:
    with closing(opened(directory)) as log:
        return contents(log, first)


def nbytes(record: LogRecord) -> int:
    return RECORD_HEADER_BYTES + len(record.data)


class Layout(NamedTuple):
    """Where the records lie, computed from the rule alone: which are in each file, and where each of them ends."""

    records: list[list[LogRecord]]
    ends: list[list[int]]


def layout(records: Sequence[LogRecord], file_bytes: int = SMALL) -> Layout:
    found = Layout([[]], [[FILE_HEADER_BYTES]])
    for record in records:
        if found.ends[-1][-1] >= file_bytes and found.records[-1]:
            found.records.append([])
            found.ends.append([FILE_HEADER_BYTES])
        found.records[-1].append(record)
        found.ends[-1].append(found.ends[-1][-1] + nbytes(record))
    return found


@contextmanager
def fresh() -> Iterator[Path]:
    """A directory for one of the many runs of a property; nothing in it outlives the process, so nothing is synced."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield Path(directory) / "state"


# -- what is written is read --------------------------------------------------------------------


def test_a_new_log_is_empty(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as log:
        assert (log.first, log.last, log.nbytes, log.bytes_after(0)) == (1, 0, FILE_HEADER_BYTES, 0)
        assert list(log.records()) == []
        log.cut(5)
        assert (log.first, log.last) == (1, 0)
    assert reread(tmp_path) == []


def test_the_bytes_are_those_of_the_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_bytes", lambda count: bytes(range(count)))
    log_id = bytes(range(8))

    def sealed(fields: bytes, data: bytes = b"") -> bytes:
        return fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields + data)) + data

    (path,) = fill(tmp_path, [LogRecord(7, 1.5, b"hello, world"), LogRecord(255, -2.0, b"")])
    assert path.name == "inputs-000000000001.log"
    assert path.read_bytes() == (
        sealed(struct.pack("<8sIQ8s", b"WGINPUTS", 1, 1, log_id))
        + sealed(struct.pack("<8sQdQB", log_id, 1, 1.5, 12, 7), b"hello, world")
        + sealed(struct.pack("<8sQdQB", log_id, 2, -2.0, 0, 255))
    )


@settings(max_examples=60)
@given(many, st.sampled_from([1, SMALL, 10**6]))
def test_the_files_are_cut_where_they_are_said_to_be(records: list[LogRecord], file_bytes: int) -> None:
    with fresh() as directory:
        paths = fill(directory, records, file_bytes)
        wanted = layout(records, file_bytes)
        assert [path.stat().st_size for path in paths] == [ends[-1] for ends in wanted.ends]
        firsts = accumulate((len(part) for part in wanted.records), initial=1)
        assert [path.name for path in paths] == [f"inputs-{n:012d}.log" for n, _ in zip(firsts, paths, strict=False)]
        assert reread(directory) == records


def test_buffers_are_concatenated(tmp_path: Path) -> None:
    numbers = memoryview(struct.pack("<4I", 1, 2, 3, 4)).cast("I", (2, 2))
    with closing(opened(tmp_path)) as log:
        assert log.append(1, 0.0) == 1
        assert log.append(2, 0.0, b"", b"a", memoryview(bytearray(b"bc")), memoryview(b""), numbers) == 2
        assert log.append(3, 0.0, *[b"%d," % n for n in range(3000)]) == 3, "more than one writev takes"
        first, second, third = contents(log)
    assert first.data == b""
    assert second.data == b"abc" + numbers.tobytes()
    assert third.data == b"".join(b"%d," % n for n in range(3000))


def test_a_record_beyond_the_limit_or_of_no_kind_is_refused(tmp_path: Path) -> None:
    with closing(opened(tmp_path, max_record=10)) as log:
        with pytest.raises(CheckpointError, match="an input has 11 bytes; the log inputs takes up to 10"):
            log.append(1, 0.0, b"12345678", b"901")
        for kind in (-1, 256):
            with pytest.raises(ValueError, match=f"from 0 to 255, got {kind}"):
                log.append(kind, 0.0)
        with pytest.raises(ValueError, match="at least 1, got 0"):
            log.restart(0)
        with pytest.raises(TypeError):
            log.append(1, 0.0, memoryview(b"abcdef")[::2])
        log.append(1, 0.0, b"1234567890")
        assert contents(log) == [LogRecord(1, 0.0, b"1234567890")]
    with pytest.raises(CheckpointError, match=r"01\.log has an input of 10 bytes at byte 36, the limit is 9; open"):
        opened(tmp_path, max_record=9)
    assert reread(tmp_path) == [LogRecord(1, 0.0, b"1234567890")], "a limit that is too small destroys nothing"


def test_names_do_not_mix(tmp_path: Path) -> None:
    fill(tmp_path, some(3))
    for name in ("inputs-2", "in", "outputs"):
        with closing(InputLog(tmp_path, name)) as log:
            assert log.last == 0
            log.append(9, 9.0, b"another")
    for name in ("inputs-1.log", "inputs-0000000000001.log", "inputs-00000000000\u0661.log"):
        (tmp_path / name).write_bytes(b"not a number in twelve digits")
    assert reread(tmp_path) == some(3)


def test_a_closed_log_takes_nothing(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.close()
    log.close()
    for call in (lambda: log.append(1, 0.0), log.sync, lambda: log.cut(1), lambda: log.restart(1)):
        with pytest.raises(CheckpointError, match=r"the log inputs in .* is closed"):
            call()


# -- any sequence of operations -----------------------------------------------------------------

acts = st.lists(
    st.one_of(
        st.tuples(st.just("append"), records_st),
        st.tuples(st.just("append"), records_st),
        st.tuples(st.just("append"), records_st),
        st.tuples(st.just("sync"), st.none()),
        st.tuples(st.just("cut"), st.integers(0, 20)),
        st.tuples(st.just("reopen"), st.none()),
        st.tuples(st.just("power"), st.integers(0, 2**32)),
        st.tuples(st.just("full"), st.integers(0, 140)),
        st.tuples(st.just("restart"), st.integers(1, 50)),
    ),
    max_size=40,
)


class Disk:
    """Knows what of each file and of the directory was synced, and is full on demand."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.synced: dict[int, int] = {}
        self.names: list[str] = []
        self.room: int | None = None
        self._fsync, self._writev = os.fsync, os.writev
        patch.setattr(os, "fsync", self.fsync)
        patch.setattr(os, "writev", self.writev)

    def fsync(self, handle: int) -> None:
        found = os.fstat(handle)
        self.synced[found.st_ino] = found.st_size
        if stat.S_ISDIR(found.st_mode):
            self.names = os.listdir(handle)

    def writev(self, handle: int, buffers: Sequence[memoryview]) -> int:
        if self.room is None:
            return self._writev(handle, buffers)
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = os.write(handle, b"".join(buffers)[: self.room])
        self.room -= taken
        return taken

    def fail_power(self, directory: Path, chance: random.Random) -> None:
        for path in files(directory):
            found = path.stat()
            os.truncate(path, chance.randint(min(self.synced[found.st_ino], found.st_size), found.st_size))


@settings(max_examples=150)
@given(acts)
def test_any_sequence_of_operations(sequence: list[tuple[str, Any]]) -> None:
    with fresh() as directory, pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)
        log = opened(directory)
        first, wanted, durable = 1, list[LogRecord](), 0  # durable: the last position that was synced
        for act, what in sequence:
            if act == "append":
                assert log.append(what.kind, what.time, what.data) == first + len(wanted)
                wanted.append(what)
            elif act == "full":
                disk.room = what
                try:
                    log.append(1, 0.0, bytes(90))
                    wanted.append(LogRecord(1, 0.0, bytes(90)))
                except CheckpointError as error:
                    assert "the disk is full" in str(error)  # noqa: PT017
                disk.room = None
            elif act == "sync":
                log.sync()
                durable = log.last
            elif act == "cut":
                log.cut(what)
                assert log.first >= first
                assert log.first <= max(what, first), "nothing from there on is lost"
                del wanted[: log.first - first]
                first = log.first
            elif act == "restart":
                log.restart(what)
                first, wanted, durable = what, [], what - 1
            else:
                log.close()
                if act == "power":
                    disk.fail_power(directory, random.Random(what))
                log = opened(directory)
                assert durable <= log.last < first + len(wanted)
                assert act == "power" or log.last == first + len(wanted) - 1
                del wanted[log.last + 1 - first :]
                durable = log.last
            assert contents(log, first) == wanted
            assert log.first == first
            assert log.nbytes == sum(path.stat().st_size for path in files(directory))
            assert sorted(disk.names) == sorted(os.listdir(directory)), "files that came or went did so on the disk"
        for after in (0, first - 1, first, log.last - 1, log.last, log.last + 9):
            later = wanted[max(0, after + 1 - first) :]
            assert [record for _, record in log.records(after)] == later
            assert log.bytes_after(after) == sum(map(nbytes, later))
        log.close()


def test_a_cut_removes_whole_files_and_keeps_the_position(tmp_path: Path) -> None:
    records = some(12)
    fill(tmp_path, records)
    firsts = list(accumulate((len(part) for part in layout(records).records), initial=1))[:-1]
    assert len(firsts) >= 3
    with closing(opened(tmp_path)) as log:
        log.cut(firsts[2] - 1)
        assert log.first == firsts[1]
        log.cut(firsts[2])
        assert log.first == firsts[2]
        log.cut(100)
        assert (log.first, log.last, log.nbytes) == (13, 12, FILE_HEADER_BYTES)
        assert [path.name for path in files(tmp_path)] == ["inputs-000000000013.log"]
    with closing(opened(tmp_path)) as log:
        assert (log.first, log.last) == (13, 12)
        assert log.append(1, 0.0) == 13


def test_a_file_is_synced_before_the_next_one_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    with closing(opened(tmp_path)) as log:
        for record in some(10):
            log.append(record.kind, record.time, record.data)
    *before, last = [path.stat() for path in files(tmp_path)]
    assert len(before) == 2
    assert [disk.synced[found.st_ino] for found in before] == [found.st_size for found in before]
    assert disk.synced[last.st_ino] == FILE_HEADER_BYTES
    disk.fail_power(tmp_path, random.Random(1))
    assert len(reread(tmp_path)) >= 8


def test_reading_ends_where_the_log_ended_when_it_began(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as log:
        extend(log, some(5))
        positions = []
        for position, record in log.records():
            positions.append(position)
            log.append(record.kind, record.time, record.data)
        assert positions == [1, 2, 3, 4, 5]
        assert log.last == 10


# -- torn and damaged files ---------------------------------------------------------------------


@settings(max_examples=150)
@given(many, st.data())
def test_a_last_file_cut_at_any_byte_keeps_every_whole_record(records: list[LogRecord], data: st.DataObject) -> None:
    with fresh() as directory:
        paths, wanted = fill(directory, records), layout(records)
        at = data.draw(st.integers(0, wanted.ends[-1][-1]))
        os.truncate(paths[-1], at)
        whole = sum(end <= at for end in wanted.ends[-1][1:])
        kept = records[: len(records) - len(wanted.records[-1]) + whole]
        with closing(opened(directory)) as log:
            assert contents(log) == kept
            extend(log, records[:2])
        assert reread(directory) == kept + records[:2]


@settings(max_examples=100)
@given(many, st.one_of(st.binary(min_size=1, max_size=200), st.integers(1, 9000).map(bytes)))
def test_garbage_after_the_last_record_is_removed(records: list[LogRecord], garbage: bytes) -> None:
    with fresh() as directory:
        path = fill(directory, records)[-1]
        with open(path, "ab") as file:
            file.write(garbage)
        assert reread(directory) == records
        assert path.stat().st_size == layout(records).ends[-1][-1]


def assert_flip_is_noticed(directory: Path, records: list[LogRecord], number: int, at: int, mask: int) -> None:
    """Flip bits of a byte and open the log; then flip them back."""
    paths, wanted = files(directory), layout(records)
    whole = {path: path.read_bytes() for path in paths}
    data = bytearray(whole[paths[number]])
    data[at] ^= mask
    paths[number].write_bytes(data)
    if number == len(paths) - 1 and at >= wanted.ends[-1][-2] and wanted.records[-1]:
        assert reread(directory) == records[:-1], "as if the last write was torn"
    else:
        with pytest.raises(CheckpointError) as caught:
            opened(directory)
        start = max([0, *(end for end in wanted.ends[number] if end <= at)])
        assert f"{paths[number]} is damaged at byte {start}: " in str(caught.value)
        assert f"truncate -s {start} {paths[number]}, remove the later files of this log" in str(caught.value)
        assert paths[number].read_bytes() == data, "an error changes nothing"
    for path, old in whole.items():
        path.write_bytes(old)


@settings(max_examples=150)
@given(many, st.integers(1, 255), st.data())
def test_a_flipped_byte_is_an_error_that_names_it(records: list[LogRecord], mask: int, data: st.DataObject) -> None:
    with fresh() as directory:
        sizes = [path.stat().st_size for path in fill(directory, records)]
        number = data.draw(st.integers(0, len(sizes) - 1))
        assert_flip_is_noticed(directory, records, number, data.draw(st.integers(0, sizes[number] - 1)), mask)


@pytest.mark.parametrize("piece", [11, 1 << 20])
def test_every_flipped_byte_of_a_log_is_noticed(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_log_file, "_PIECE_BYTES", piece)  # 11: what follows the damage lies across pieces
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    records, chance = some(6), random.Random(1)
    sizes = [path.stat().st_size for path in fill(tmp_path, records)]
    assert len(sizes) == 2
    for number, size in enumerate(sizes):
        for at in range(size):
            assert_flip_is_noticed(tmp_path, records, number, at, 1 << chance.randrange(8))
    assert reread(tmp_path) == records


@settings(max_examples=150)
@given(many, st.integers(1, 5), st.integers(0, 2**32))
def test_whatever_happens_to_the_bytes_no_other_data_is_read(records: list[LogRecord], times: int, seed: int) -> None:
    chance = random.Random(seed)
    with fresh() as directory:
        fill(directory, records)
        for _ in range(times):
            path = chance.choice(files(directory))
            data = bytearray(path.read_bytes())
            start, end = sorted(chance.randint(0, len(data)) for _ in range(2))
            piece = data[start:end]
            choices = [b"", bytes(len(piece)), piece * 2, chance.randbytes(3), bytes(reversed(piece))]
            data[start:end] = chance.choice(choices)
            path.write_bytes(data)
        try:
            found = reread(directory)
        except CheckpointError:
            return
        assert found == records[: len(found)]
        assert reread(directory) == found


def test_what_a_crash_left_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = fill(tmp_path, some(3))[-1]
    with open(path, "ab") as file:
        file.write(bytes(100))
    reread(tmp_path)
    assert [(line.name, line.levelno) for line in caplog.records] == [("weightgrad.serve", logging.WARNING)]
    assert caplog.messages == [f"{path}: removed 100 bytes after input 3, which a crash cut short"]
    caplog.clear()
    reread(tmp_path)
    assert caplog.messages == []


@pytest.mark.parametrize("left", [b"", b"WGINP", bytes(FILE_HEADER_BYTES)], ids=["empty", "cut", "zeros"])
@pytest.mark.parametrize("first", [1, 50])
def test_a_file_that_was_not_begun_is_begun_again(left: bytes, first: int, tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as log:
        log.restart(first)
        extend(log, some(4))
    last = tmp_path / f"inputs-{first + 4:012d}.log"
    last.write_bytes(left)
    with closing(opened(tmp_path)) as log:
        assert contents(log, first) == some(4)
        assert log.append(1, 0.0) == first + 4
    for path in files(tmp_path)[:-1]:
        path.unlink()
    last.write_bytes(left)
    with closing(opened(tmp_path)) as log:
        assert (log.first, log.last) == (first + 4, first + 3), "its name remembers the position"


def test_a_torn_record_may_contain_records_of_another_log(tmp_path: Path) -> None:
    (other,) = fill(tmp_path / "other", some(9), file_bytes=10**6)
    (path,) = fill(tmp_path / "log", [LogRecord(1, 1.0, b"first"), LogRecord(2, 2.0, other.read_bytes())])
    os.truncate(path, path.stat().st_size - 1)
    assert reread(tmp_path / "log") == [LogRecord(1, 1.0, b"first")]


def test_a_record_of_another_log_is_not_read(tmp_path: Path) -> None:
    here, there = (fill(tmp_path / name, some(3))[0] for name in ("here", "there"))
    start, end = layout(some(3)).ends[0][1:3]
    mine, other = here.read_bytes(), there.read_bytes()
    here.write_bytes(mine[:start] + other[start:end] + mine[end:])
    with pytest.raises(CheckpointError, match=f"is damaged at byte {start}: "):
        opened(tmp_path / "here")
    here.write_bytes(mine[:start] + other[start:])
    assert reread(tmp_path / "here") == some(3)[:1]


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    paths = fill(tmp_path, some(12))
    assert len(paths) > 2
    data = paths[1].read_bytes()
    paths[1].unlink()
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path)
    assert f"{paths[2]} begins with input 9 at byte 0, but {paths[0].name} ends with input 4. Restore" in str(
        caught.value
    )
    paths[1].write_bytes(data)
    assert reread(tmp_path) == some(12)


def test_files_of_two_logs_are_not_mixed(tmp_path: Path) -> None:
    here, there = (fill(tmp_path / name, some(12)) for name in ("here", "there"))
    here[1].write_bytes(there[1].read_bytes())
    with pytest.raises(CheckpointError, match=r"05\.log is of another log than the files before it, by its id at byte"):
        opened(tmp_path / "here")
    here[1].write_bytes(here[0].read_bytes())
    with pytest.raises(CheckpointError, match=r"05\.log is damaged at byte 0: it was written as the file of input 1, "):
        opened(tmp_path / "here")


def test_a_later_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(input_log_file, "INPUT_LOG_VERSION", 2)
        fill(tmp_path, some(1))
    with pytest.raises(CheckpointError, match=r"has version 2 at byte 8, this program reads version 1; finish the run"):
        opened(tmp_path)


def test_the_advice_for_damage_works(tmp_path: Path) -> None:
    paths = fill(tmp_path, some(12))
    with open(paths[1], "r+b") as file:
        file.seek(200)
        file.write(b"????")
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path)
    command = str(caught.value).split("give up what follows: ")[1].split(",")[0]
    subprocess.run(command.split(), check=True)
    for path in paths[2:]:
        path.unlink()
    assert reread(tmp_path) == some(12)[:6]


def test_a_repeated_record_is_damage(tmp_path: Path) -> None:
    (path,) = fill(tmp_path, some(2))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[FILE_HEADER_BYTES:])
    with pytest.raises(CheckpointError, match=r"is damaged at byte \d+: input 1 is where 3 belongs"):
        opened(tmp_path)


def test_damage_after_opening_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    records = some(6)
    paths = fill(tmp_path, records)
    start = layout(records).ends[0][1]
    with closing(opened(tmp_path)) as log:
        whole = paths[0].read_bytes()
        for damaged in (whole[: start + 50] + b"?" + whole[start + 51 :], whole[: start + 50], whole[: start + 5]):
            paths[0].write_bytes(damaged)
            reader = log.records()
            assert next(reader) == (1, records[0])
            with pytest.raises(CheckpointError, match=rf"01\.log is damaged at byte {start}: its bytes are not"):
                next(reader)
        (other,) = fill(tmp_path / "other", records, file_bytes=10**6)
        paths[0].write_bytes(other.read_bytes())
        with pytest.raises(CheckpointError, match=r"is damaged at byte 36: input 1 was replaced by another"):
            next(log.records())
        paths[0].unlink()
        with pytest.raises(CheckpointError, match=r"cannot read .*01\.log: .*No such file"):
            next(log.records())
        os.mkfifo(paths[0])
        with pytest.raises(CheckpointError, match=r"01\.log is not a plain file"):
            next(log.records())
        assert [record for _, record in log.records(after=4)] == records[4:]


# -- a full disk --------------------------------------------------------------------------------


def test_a_full_disk_at_any_byte_leaves_the_log_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = LogRecord(3, 1.0, bytes(range(30)))
    for room in range(nbytes(record)):
        directory = tmp_path / str(room)
        with closing(opened(directory, 10**6)) as log, monkeypatch.context() as patch:
            extend(log, some(2))
            disk = Disk(patch)
            disk.room = room
            with pytest.raises(CheckpointError, match=r"cannot write .*01\.log: the disk is full; the previous state"):
                log.append(record.kind, record.time, record.data[:10], record.data[10:])
            assert contents(log) == some(2)
            assert log.nbytes == files(directory)[0].stat().st_size
            disk.room = None
            extend(log, [record])
        assert reread(directory) == [*some(2), record]


def test_a_disk_that_takes_a_few_bytes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def writev(handle: int, buffers: Sequence[memoryview]) -> int:
        calls.append(len(buffers))
        return os.write(handle, b"".join(buffers)[:5])

    monkeypatch.setattr(os, "writev", writev)
    fill(tmp_path, some(6))
    assert len(calls) > 60
    monkeypatch.undo()
    assert reread(tmp_path) == some(6)


@pytest.mark.parametrize("room", [0, 20, FILE_HEADER_BYTES - 1])
def test_a_full_disk_when_a_file_begins(room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(opened(tmp_path)) as log, monkeypatch.context() as patch:
        extend(log, some(4))
        disk = Disk(patch)
        for call in (lambda: log.append(1, 0.0), lambda: log.cut(9)):
            disk.room = room
            with pytest.raises(CheckpointError, match=r"cannot write .*05\.log: the disk is full"):
                call()
            assert len(files(tmp_path)) == 1, "nothing half written is left"
            assert contents(log) == some(4)
        disk.room = None
        assert log.append(1, 0.0) == 5


def test_a_full_disk_when_the_log_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        Disk(patch).room = 0
        with pytest.raises(CheckpointError, match=r"cannot write .*01\.log: the disk is full"):
            opened(tmp_path)
    assert reread(tmp_path) == [], "the lock is free again"


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_torn_record_that_cannot_be_removed_is_removed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for later in ("append", "sync", "roll", "reopen"):
        directory = tmp_path / later
        with closing(opened(directory, 10**6 if later != "roll" else 1)) as log:
            extend(log, some(2))
            with monkeypatch.context() as patch:
                Disk(patch).room = 50 if later != "roll" else FILE_HEADER_BYTES + 20
                patch.setattr(os, "ftruncate", failing(errno.EIO))
                with pytest.raises(CheckpointError, match="the disk is full"):
                    log.append(1, 0.0, bytes(100))
                if later != "reopen":
                    with pytest.raises(CheckpointError, match="Input/output error"):
                        log.append(1, 0.0)
            assert sum(path.stat().st_size for path in files(directory)) > log.nbytes
            if later == "sync":
                log.sync()
                assert files(directory)[-1].stat().st_size == log.nbytes
            if later != "reopen":
                extend(log, some(3))
        assert reread(directory) == some(2) + (some(3) if later != "reopen" else [])


def test_ctrl_c_in_an_append_leaves_no_half_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(handle: int, buffers: Sequence[memoryview]) -> int:
        os.write(handle, b"".join(buffers)[:60])
        raise KeyboardInterrupt

    with closing(opened(tmp_path)) as log:
        extend(log, some(2))
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", interrupted)
            with pytest.raises(KeyboardInterrupt):
                log.append(1, 0.0, bytes(50))
        assert contents(log) == some(2)
        extend(log, some(1))
        assert contents(log) == some(2) + some(1)


def test_a_failed_sync_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(opened(tmp_path)) as log:
        extend(log, some(2))
        log.append(1, 0.0, b"lost?")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing(errno.EIO))
            with pytest.raises(CheckpointError, match=r"cannot write .*01\.log: .*Input/output error; the previous"):
                log.sync()
        for call in (log.sync, lambda: log.append(1, 0.0)):
            with pytest.raises(CheckpointError, match="Input/output error"):
                call()
    assert reread(tmp_path)[:2] == some(2)


def test_a_sync_with_nothing_to_do_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(opened(tmp_path)) as log:
        extend(log, some(2))
        monkeypatch.setattr(os, "fsync", failing(errno.EIO))
        log.sync()


def test_a_restart_that_fails_ends_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(opened(tmp_path)) as log:
        extend(log, some(6))
        with monkeypatch.context() as patch:
            Disk(patch).room = 0
            with pytest.raises(CheckpointError, match="the disk is full"):
                log.restart(90)
        with pytest.raises(CheckpointError, match="the disk is full"):
            log.append(1, 0.0)
    with closing(opened(tmp_path)) as log:
        assert log.last == 0, "what a crash at this moment leaves"
        log.restart(90)
        assert log.append(1, 0.0) == 90


TINY_DISK = """
import sys
from pathlib import Path
from weightgrad.errors import CheckpointError
from weightgrad.runtime.checkpoints.input_log import InputLog
state = Path(sys.argv[1]) / "state"
filler = Path(sys.argv[1]) / "filler"
filler.write_bytes(bytes(200_000))
log = InputLog(state, "inputs", file_bytes=100_000)
def more():
    try:
        while True:
            log.append(1, 0.0, b"%d" % (log.last + 1) * 1000)
            log.sync()
    except CheckpointError as error:
        print(error)
more()
before = log.last
filler.unlink()
more()
print(before, log.last)
log.cut(before)
log.append(2, 0.0, b"%d" % (log.last + 1) * 1000)
log.sync()
log.close()
log = InputLog(state, "inputs")
assert all(record.data == b"%d" % position * 1000 for position, record in log.records())
print(log.first <= before, log.last)
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
    assert ran.returncode == 0, ran.stderr
    full, again, numbers, end = ran.stdout.splitlines()
    for said in (full, again):
        assert said.startswith(f"cannot write {tmp_path}/state/inputs-0000000")
        assert ".log: the disk is full; the previous state is kept. Free some space" in said
    before, last = map(int, numbers.split())
    assert 0 < before < last
    assert end == f"True {last + 1}"


# -- one process, plain files -------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
from weightgrad.runtime.checkpoints.input_log import InputLog
log = InputLog(Path(sys.argv[1]), "inputs", file_bytes=20_000)
while True:
    position = log.append((log.last + 1) % 256, 0.5, b"%d " % (log.last + 1) * 200)
    if position % 3 == 0:
        log.sync()
        print(position, flush=True)
"""


def test_what_was_synced_survives_kill_9_and_the_lock_does_not(tmp_path: Path) -> None:
    seen = 0
    for lines in (1, 40, 333):
        command = [sys.executable, "-c", CHILD, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            try:
                printed = [int(child.stdout.readline()) for _ in range(lines)]
                with pytest.raises(CheckpointError) as caught:
                    opened(tmp_path)
                assert str(caught.value) == (
                    f"another process (pid {child.pid}) uses {tmp_path}; stop it, or choose another directory for the "
                    "state"
                )
            finally:
                child.kill()
            printed += [int(line) for line in child.stdout.read().splitlines()]
        with closing(opened(tmp_path)) as log:
            assert log.last >= printed[-1] > seen
            seen = log.last
            for position, record in log.records():
                assert record == LogRecord(position % 256, 0.5, b"%d " % position * 200)


def test_one_opener_at_a_time(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as log:
        with pytest.raises(CheckpointError, match=rf"another process \(pid {os.getpid()}\) uses .*; stop it"):
            opened(tmp_path)
        (tmp_path / "inputs.lock").write_text("?")
        with pytest.raises(CheckpointError, match="another process uses "):
            opened(tmp_path)
        log.append(1, 0.0)
    assert len(reread(tmp_path)) == 1


def test_only_the_owner_can_read(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        fill(tmp_path / "a" / "b", some(6))
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a").rglob("*")}
    assert modes.pop("b") == 0o700
    assert modes == dict.fromkeys(["inputs.lock", "inputs-000000000001.log", "inputs-000000000005.log"], 0o600)


@pytest.mark.parametrize(
    ("mode", "said"), [(0o700, False), (0o755, False), (0o770, True), (0o777, True), (0o1777, False)]
)
def test_a_directory_that_others_may_write_to_is_told(
    mode: int, said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """0o1777 is that of /tmp: there others cannot replace what they do not own."""
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(mode)
    fill(state, some(1))
    assert ("may replace the state in it" in caplog.text) == said


def in_the_way(kind: str, path: Path) -> None:
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as there:
            here = os.getcwd()
            os.chdir(path.parent)  # the name of a socket must be short
            try:
                there.bind(path.name)
            finally:
                os.chdir(here)
    else:
        path.symlink_to(path.parent / ("nowhere" if kind == "dangling" else "there"))
        (path.parent / "there").touch()


@pytest.mark.parametrize("kind", ["fifo", "directory", "socket", "dangling", "link"])
@pytest.mark.parametrize("name", ["inputs.lock", "inputs-000000000001.log", "inputs-000000000005.log"])
def test_something_in_the_way_is_named_and_never_waited_for(kind: str, name: str, tmp_path: Path) -> None:
    fill(tmp_path, some(6))
    in_the_way(kind, tmp_path / name)
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / name} is not a plain file; remove it, or choose another directory for the state"
    )


@pytest.mark.parametrize("kind", ["fifo", "directory", "socket", "dangling", "link"])
def test_something_in_the_way_of_the_next_file_is_not_overwritten(kind: str, tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as log:
        extend(log, some(4))
        in_the_way(kind, tmp_path / "inputs-000000000005.log")
        with pytest.raises(CheckpointError, match=r"cannot write .*05\.log: .*File exists"):
            log.append(1, 0.0)
        assert contents(log) == some(4)
        assert os.path.lexists(tmp_path / "inputs-000000000005.log")


@pytest.mark.parametrize("kind", ["file", "fifo", "dangling"])
def test_something_in_the_way_of_the_directory_is_named(kind: str, tmp_path: Path) -> None:
    if kind == "file":
        (tmp_path / "state").touch()
    else:
        in_the_way(kind, tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"cannot write .*state: .*File exists"):
        opened(tmp_path / "state")


# -- memory -------------------------------------------------------------------------------------


@contextmanager
def at_most(size: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < size


def test_memory_is_that_of_one_record(tmp_path: Path) -> None:
    mega = 1 << 20
    buffer = bytes(8 * mega)
    with closing(opened(tmp_path, 20 * mega)) as log, at_most(mega):
        for _ in range(5):
            log.append(1, 0.0, buffer, memoryview(buffer)[:100])
        log.sync()
    os.truncate(files(tmp_path)[-1], files(tmp_path)[-1].stat().st_size - 1)
    with at_most(2 * mega):
        log = opened(tmp_path)
    with closing(log), at_most(9 * mega):
        reader, count = log.records(), 0
        while next(reader, None) is not None:
            count += 1
    assert count == 4


def test_a_length_is_not_believed(tmp_path: Path) -> None:
    (path,) = fill(tmp_path, some(2))
    length_at = layout(some(2)).ends[0][1] + 24
    data = bytearray(path.read_bytes())
    data[length_at : length_at + 8] = struct.pack("<Q", 2**63)
    path.write_bytes(data)
    with at_most(2 << 20):
        assert reread(tmp_path) == some(2)[:1]
