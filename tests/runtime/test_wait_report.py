"""Who waits for whom is said at both ends: by the server, by the sites that wait, and by the one that they wait for."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from weightgrad.runtime.admission_messages import AdmissionRequest
from weightgrad.runtime.metrics import ServerMetrics
from weightgrad.runtime.security import certificates
from weightgrad.runtime.server.wait_report import AGAIN_S, WaitReport
from weightgrad.runtime.telemetry import SERVER, Telemetry
from weightgrad.wire.messages import Join, Message, Waiting

from .deployment import PATIENCE_S, Hub, Runner, finish, tiny
from .test_refusals import LAYOUT, SITES, hand, rules


@pytest.fixture(autouse=True)
def _log_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.fixture(autouse=True)
def _short_waits_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightgrad.runtime.telemetry._LONG_WAIT_S", 0.05)


def test_a_site_that_keeps_the_others_waiting_is_named_by_everybody(caplog: pytest.LogCaptureFixture) -> None:
    recipe = tiny("{name: diloco, every: 4, t_global: 600}", workers=1, steps=8)
    with Hub(recipe, waiting_s=0) as hub:
        east, west = Runner(recipe, "east", hub.address), Runner(recipe, "west", hub.address, to=3)
        hub.until(lambda: "east waits for west (" in caplog.text)
        assert "for west" in next(line for line in caplog.messages if line.startswith("round 1 has waited"))
        assert east.site.stats()["waiting_for"] == ["west"]
        assert hub.server.status()["waiting_for"] == ["west"]
        finish(east, west)
        assert "the other sites wait for west, for its push of round 1" in caplog.text
        assert next(line for line in caplog.messages if line.startswith("east waited")).count("for west (") == 1
        assert east.site.stats()["waiting_for"] == []


def test_a_site_says_that_it_waits_for_the_server_when_that_is_away(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    recipe = tiny("{name: diloco, every: 4, t_global: 600}", workers=1, steps=8)
    with Hub(recipe, state=tmp_path) as hub:
        sites = [Runner(recipe, name, hub.address, to=3) for name in ("east", "west")]
        hub.until(lambda: all(site.site.steps == 3 for site in sites))
        hub.stop()
        for site in sites:
            site.limit = 10**9
        hub.until(lambda: "east waits for the global server" in caplog.text)
        assert sites[0].site.stats()["waiting_for"] == [SERVER]
        with Hub(recipe, state=tmp_path, listen=hub.address):
            finish(*sites)


def test_sites_hear_for_whom_they_wait_before_there_is_a_model(tmp_path: Path) -> None:
    made = tmp_path / "certs"
    certificates.create(made, [], SITES)
    with (
        Hub(rules(), certs=made, waiting_s=0) as hub,
        hand(hub, "west", made, enter=False) as west,
        hand(hub, "east", made, enter=False) as east,
    ):
        for site in (west, east):
            site.client.enter(AdmissionRequest(site.name, LAYOUT, -1).pack(), PATIENCE_S)
            site.client.start()
        east.send(Join(site="east", version=0))
        heard: list[Message] = []
        while not heard:
            hub.tick()
            heard += east.heard()
        (waiting,) = heard
        assert isinstance(waiting, Waiting)
        assert (waiting.round, waiting.missing) == (0, {"west": 0})


def test_a_wait_is_told_once_and_again_when_it_changes_or_lasts(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[tuple[str, Waiting]] = []
    report = WaitReport(Telemetry(None, ServerMetrics()), lambda site, what: sent.append((site, what)), 5.0)

    def look(now: float, *missing: str, late: bool = True) -> None:
        waiting = Waiting(round=3, seconds=int(now), missing=dict.fromkeys(missing, 2))
        report.look(waiting if missing else None, now, SITES, late=late)

    look(4.0, "west")
    look(6.0, "west", late=False)
    look(7.0)
    assert not sent
    look(8.0, "west")
    look(9.0, "west")
    assert [site for site, _ in sent] == list(SITES)
    assert caplog.messages == ["round 3 has waited 8 s for west"]
    look(10.0, "east", "west")
    look(10.0 + AGAIN_S, "east", "west")
    assert caplog.messages[1:] == ["round 3 has waited 10 s for east, west", "round 3 has waited 40 s for east, west"]
