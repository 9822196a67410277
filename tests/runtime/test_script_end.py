"""A script that ends without `leave`: when the site leaves for it, and when not."""

from __future__ import annotations

import atexit
import os
import sys

import pytest

from weightgrad import cli
from weightgrad.errors import CheckpointError
from weightgrad.runtime.site.script_end import ScriptEnd


@pytest.mark.parametrize(
    ("error", "resumable", "leaves"),
    [
        (None, False, True),
        (None, True, True),
        (KeyboardInterrupt, True, True),
        (RuntimeError, False, True),
        (RuntimeError, True, False),
    ],
)
def test_a_site_leaves_unless_it_may_be_started_again(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | None, resumable: bool, leaves: bool
) -> None:
    monkeypatch.setattr(sys, "last_type", error, raising=False)
    calls: list[str] = []
    ScriptEnd(lambda: calls.append("left"), resumable=resumable).reached()
    assert calls == ["left"] * leaves


def test_a_site_of_the_command_line_does_not_leave_for_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """`weightgrad train` prints one line. A worker that died while the checkpoint was written is such an error."""

    def fails() -> None:
        raise CheckpointError("cannot write the checkpoint: connection closed by peer")

    monkeypatch.setattr(sys, "last_type", None, raising=False)
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(SystemExit):
        cli.main()
    calls: list[str] = []
    ScriptEnd(lambda: calls.append("left"), resumable=True).reached()
    assert not calls


def test_a_forked_child_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    end = ScriptEnd(lambda: calls.append("left"), resumable=False)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    end.reached()
    assert not calls


def test_it_is_called_at_exit_until_the_site_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[object] = []
    monkeypatch.setattr(atexit, "register", known.append)
    monkeypatch.setattr(atexit, "unregister", known.remove)
    end = ScriptEnd(lambda: None, resumable=False)
    end.watch()
    assert known == [end.reached]
    end.forget()
    assert not known
