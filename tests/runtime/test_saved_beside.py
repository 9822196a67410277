"""Work beside the steps: one piece at a time, and its errors are told once, to those who begin, look or wait."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from weightgrad.runtime.saved_beside import Beside


def test_steps_go_on_while_it_works_and_the_next_piece_waits() -> None:
    beside, free, done = Beside(), threading.Event(), []

    def slow() -> None:
        free.wait(60)
        done.append("first")

    beside.begin(slow)
    beside.look()
    assert not done, "begin and look return while it works"
    threading.Timer(0.05, free.set).start()
    beside.begin(lambda: done.append("second"))
    assert done[0] == "first", "the second began when the first was done"
    beside.wait()
    assert done == ["first", "second"]
    beside.wait()


@pytest.mark.parametrize("ask", [lambda beside: beside.begin(list), Beside.look, Beside.wait])
def test_what_went_wrong_is_told_once(ask: Callable[[Beside], None]) -> None:
    beside = Beside()

    def fails() -> None:
        raise OSError("no room")

    beside.begin(fails)
    assert beside._work is not None
    assert isinstance(beside._work.exception(60), OSError)
    with pytest.raises(OSError, match="no room"):
        ask(beside)
    beside.look()
    beside.wait()
