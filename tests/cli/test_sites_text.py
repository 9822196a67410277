"""What `weightgrad sites` prints, for an operator who sees it for the first time."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from weightgrad.cli import app, sites
from weightgrad.errors import UnitError

SERVER = ["--server", "127.0.0.1:7443", "--insecure"]


def row(name: str, state: str) -> dict[str, Any]:
    facts = {"added": False, "ranks": 1, "connected": True, "round": 3, "waited_for": False, "certificate": None}
    return {"site": name, "state": state, **facts}


def answer(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> None:
    """Let the server answer with these sites."""
    found = {"version": 3, "step": 12, "paused": False, "durable": True, **facts}
    monkeypatch.setattr(sites, "ask", lambda *given, **more: found)


def test_the_sites_of_a_paused_run_do_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, paused=True, sites=[row("east", "training"), row("west", "set aside")])
    lines = CliRunner().invoke(app, ["sites", "list", *SERVER]).output.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["east", "paused"], ["west", "set"]]
    assert lines[-1].endswith("the run is paused.")


def test_who_may_join_needs_a_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, sites=[row("north", "not joined")])
    done = CliRunner().invoke(app, ["sites", "add", "north", *SERVER])
    assert "weightgrad certs add-site DIR north" in done.output.splitlines()[0]


def test_a_bandwidth_has_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, sites=[])
    done = CliRunner().invoke(app, ["sites", "add", "north", "--bandwidth", "20", *SERVER])
    assert isinstance(done.exception, UnitError)
    assert "--bandwidth '20 Mbit/s'" in str(done.exception)


@pytest.mark.parametrize("given", ["0", "0 Mbit/s"])
def test_a_bandwidth_of_nothing_is_none(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, sites=[])
    done = CliRunner().invoke(app, ["sites", "add", "north", "--bandwidth", given, *SERVER])
    assert isinstance(done.exception, UnitError)
    assert "wanted more than 0" in str(done.exception)
