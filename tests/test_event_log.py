"""The record of a run: exact bytes, whole lines, damage that is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightgrad import event_log
from weightgrad.errors import RunError
from weightgrad.event_log import EventLog

LINE = '{"kind":"step","loss":2.5,"site":"ohio","step":1,"t":0.1}\n'


def test_a_line_has_exactly_these_bytes(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as book:
        book.write("run", 0, sites=("b", "a"), row={"z": 1, "a": None}, loss=0.1 + 0.2)
        book.write("step", 1e-7, name="Köln", big=2**60, none=None, yes=True)
    assert path.read_bytes() == (
        b'{"kind":"run","loss":0.30000000000000004,"row":{"a":null,"z":1},"sites":["b","a"],"t":0}\n'
        b'{"big":1152921504606846976,"kind":"step","name":"K\\u00f6ln","none":null,"t":1e-07,"yes":true}\n'
    )


def test_a_diverged_loss_is_null(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as book:
        book.write("step", 1.0, loss=float("nan"), deep={"list": [float("inf"), (1.0, -float("inf"))]})
    assert event_log.read(path) == [{"kind": "step", "t": 1.0, "loss": None, "deep": {"list": [None, [1.0, None]]}}]


@pytest.mark.parametrize("t", [float("nan"), float("inf")])
def test_a_line_without_a_time_is_refused(tmp_path: Path, t: float) -> None:
    with EventLog(tmp_path / "events.jsonl") as book, pytest.raises(ValueError, match="finite time"):
        book.write("step", t)
    assert (tmp_path / "events.jsonl").read_bytes() == b""


def test_a_line_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as book, pytest.raises(TypeError):
        book.write("step", 1.0, first=1, model=object())
    assert (tmp_path / "events.jsonl").read_bytes() == b""


def test_an_old_event_log_is_safe(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(LINE)
    with pytest.raises(RunError, match="exists already"):
        EventLog(path)
    assert path.read_text() == LINE
    EventLog(path, replace=True).close()
    assert path.read_text() == ""


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot write the event log"):
        EventLog(tmp_path / "no" / "events.jsonl")
    with pytest.raises(RunError, match="cannot read the event log"):
        event_log.read(tmp_path / "no" / "events.jsonl")


def test_a_killed_process_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    program = (
        "import sys; from weightgrad.event_log import EventLog\n"
        "book = EventLog(sys.argv[1])\n"
        "for step in range(3): book.write('step', step / 10, step=step)\n"
        "print('written', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        os.kill(process.pid, signal.SIGKILL)
    assert [entry["step"] for entry in event_log.read(path)] == [0, 1, 2]


@pytest.mark.parametrize("cut", range(1, len(LINE) - 1))
def test_an_incomplete_last_line_is_left_out(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(LINE + LINE[:cut])
    assert len(event_log.read(path)) == 1


def test_a_last_line_without_its_end_of_line_counts(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(LINE + LINE.rstrip("\n"))
    assert len(event_log.read(path)) == 2


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ('{"kind":"st\n', "line 2: not JSON"),
        ("\n", "line 2: not JSON"),
        ('{"kind":"step","t":NaN}\n', "line 2: not JSON .NaN"),
        ("[" * 100_000 + "\n", "line 2: not JSON"),
        ("[]\n", "line 2: wanted a JSON object, found list"),
        ("7", "line 2: wanted a JSON object, found int"),
        ('{"t":1}\n', "line 2: wanted a text 'kind'"),
        ('{"kind":"step"}\n', "line 2: .* a number 't'"),
        ('{"kind":"step","t":true}\n', "line 2: .* a number 't'"),
    ],
)
def test_damage_is_named_with_its_line(tmp_path: Path, damage: str, says: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(LINE + damage + ("" if damage == "7" else LINE))
    with pytest.raises(RunError, match=says):
        event_log.read(path)


def test_a_last_line_that_ended_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(LINE + '{"kind":"st\n')
    with pytest.raises(RunError, match="line 2"):
        event_log.read(path)


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"\xff\xfe\n" + LINE.encode())
    with pytest.raises(RunError, match="line 1"):
        event_log.read(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(), inside, max_size=3),
    max_leaves=8,
)


@given(fields=st.dictionaries(st.text().filter(lambda key: key not in ("kind", "t", "self")), JSON, max_size=4))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, fields: dict[str, object]) -> None:
    path = tmp_path_factory.mktemp("book") / "events.jsonl"
    with EventLog(path) as book:
        book.write("step", 0.5, **fields)
    assert event_log.read(path) == [{"kind": "step", "t": 0.5, **fields}]


def test_it_is_for_its_owner_alone(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as events:
        events.write("step", 0.0)
    assert (tmp_path / "events.jsonl").stat().st_mode & 0o077 == 0


def test_a_fifo_in_its_way_is_an_error_and_no_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(RunError, match="cannot write the event log"):
        EventLog(tmp_path / "events.jsonl", append=True)


def test_a_line_for_which_there_is_no_room_leaves_no_half_of_itself(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as events:
        events.write("step", 0.0)
        file, events._file = events._file, _Full(events._file)  # type: ignore[assignment]
        with pytest.raises(OSError, match="No space"):
            events.write("step", 1.0)
        events._file = file
        events.write("step", 2.0)
    assert [entry["t"] for entry in event_log.read(tmp_path / "events.jsonl")] == [0.0, 2.0]


class _Full:
    """A file on a disk with room for three more bytes."""

    def __init__(self, file: Any) -> None:
        self._file, self._left = file, 3

    def fileno(self) -> int:
        return int(self._file.fileno())

    def write(self, data: Any) -> int:
        if not self._left:
            raise OSError(28, "No space left on device")
        self._left = 0
        return int(self._file.write(data[:3]))
