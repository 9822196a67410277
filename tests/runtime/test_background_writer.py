"""Work beside the steps: one piece at a time, and its errors are told once, to those who begin, look or wait."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from weightgrad.runtime.checkpoints.durable_files import BackgroundWriter


def test_steps_go_on_while_it_works_and_the_next_piece_waits() -> None:
    writer, free, done = BackgroundWriter(), threading.Event(), []

    def slow() -> None:
        free.wait(60)
        done.append("first")

    writer.begin(slow)
    writer.look()
    assert not done, "begin and look return while it works"
    threading.Timer(0.05, free.set).start()
    writer.begin(lambda: done.append("second"))
    assert done[0] == "first", "the second began when the first was done"
    writer.wait()
    assert done == ["first", "second"]
    writer.wait()


@pytest.mark.parametrize("ask", [lambda writer: writer.begin(list), BackgroundWriter.look, BackgroundWriter.wait])
def test_what_went_wrong_is_told_once(ask: Callable[[BackgroundWriter], None]) -> None:
    writer = BackgroundWriter()

    def fails() -> None:
        raise OSError("no room")

    writer.begin(fails)
    assert writer._work is not None
    assert isinstance(writer._work.exception(60), OSError)
    with pytest.raises(OSError, match="no room"):
        ask(writer)
    writer.look()
    writer.wait()
