"""A push that is encoded beside the training: who does it, and who hears what went wrong."""

from __future__ import annotations

import threading

import pytest

from weightgrad.errors import NonFiniteError
from weightgrad.runtime.site.background_push import BackgroundPush


def test_a_push_is_encoded_by_a_thread_of_its_own_or_by_who_cannot_wait() -> None:
    push, by = BackgroundPush(), []

    def work() -> None:
        by.append(threading.current_thread())

    push.finish()
    push.start()
    pending = [push.pending]
    push.leave(work)
    pending.append(push.pending)
    assert pending == [False, True]
    assert by == []
    push.start()
    push.finish()
    push.leave(work)
    push.finish()
    assert not push.pending
    assert by[0].name.startswith("push")
    assert by[1] is threading.current_thread()


def test_one_push_is_complete_before_the_next_is_taken() -> None:
    push, done = BackgroundPush(), []
    for number in range(20):
        push.leave(lambda number=number: done.append(number))  # type: ignore[misc]
        if number % 3:
            push.start()
    push.finish()
    assert done == list(range(20))


def test_what_went_wrong_is_raised_once_where_it_is_waited_for() -> None:
    push = BackgroundPush()

    def work() -> None:
        raise NonFiniteError("a NaN")

    push.leave(work)
    push.start()
    with pytest.raises(NonFiniteError, match="a NaN"):
        push.finish()
    push.finish()
    assert not push.pending
