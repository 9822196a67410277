"""A site with a valid certificate that does its worst, and strangers at the port: everybody else goes on."""

from __future__ import annotations

import dataclasses
import http.client
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from weightgrad.core.global_model import digest_of
from weightgrad.core.server.outbox import Decisions
from weightgrad.errors import LinkError, RefusedError
from weightgrad.runtime import health
from weightgrad.runtime.admission_messages import AdmissionRequest
from weightgrad.runtime.checkpoints.input_log import InputLog
from weightgrad.runtime.metrics import ServerMetrics
from weightgrad.runtime.run_config import RunConfig
from weightgrad.runtime.security import certificates
from weightgrad.runtime.telemetry import Telemetry
from weightgrad.runtime.transport.transport import EntryRequest, Peer
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_bytes import pack, unpack
from weightgrad.wire.messages import FinalPart, Join, Leave, Push, RoundResult

from .deployment import PATIENCE_S, Hub
from .test_refusals import LAYOUT, NUMEL, Hand, first_model, hand, holding, part_of, rules, weights

SITES = ("east", "west")
LARGEST = 2**32 - 1
UPDATE = torch.ones(NUMEL)


@pytest.fixture(name="made", scope="module")
def fixture_made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs") / "all"
    certificates.create(directory, [], SITES)
    return directory


@pytest.fixture(autouse=True)
def _log_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def quick(**changes: Any) -> RunConfig:
    """Rounds that do not wait long for a site that is gone."""
    return rules(t_global=0.5, **changes)


def close_rounds(hub: Hub, site: Hand, count: int = 3) -> None:
    """An honest site pushes, and gets its results."""
    for _ in range(count):
        site.send_push(push := site.push(UPDATE))
        while not _has(site.receive(), push):
            pass
    assert hub.server.status()["healthy"]


def _has(message: object, push: Push) -> bool:
    """Whether a message is the result of the round that a push is in; results of before may come again after a Join."""
    return isinstance(message, RoundResult) and message.included.get(push.site, -1) >= push.round


# -- poisoned numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [{"round": LARGEST}, {"step": LARGEST}, {"rate": 1e39}], ids=str)
def test_a_poisoned_number_stops_nobody_and_never_reaches_the_disk(
    made: Path, tmp_path: Path, poison: dict[str, Any]
) -> None:
    state = tmp_path / "state"
    with Hub(quick(), certs=made, state=state) as hub, hand(hub, "east", made) as east:
        with hand(hub, "west", made) as west:
            west.send(dataclasses.replace(west.push(), **poison))
            west.refused()
        close_rounds(hub, east)
        version = hub.version
    log = InputLog(state, "inputs")
    pushes = [unpack(record.data) for _, record in log.records() if record.kind == 1]
    log.close()
    assert not [one for one in pushes if isinstance(one, Push) and one.site == "west"]
    with Hub(quick(), certs=made, state=state) as again, hand(again, "east", made) as east:
        assert again.version == version
        close_rounds(again, east)


# -- memory -------------------------------------------------------------------------------------


def test_pushes_for_future_rounds_are_kept_only_within_the_window(made: Path) -> None:
    with Hub(quick(), certs=made) as hub, hand(hub, "east", made) as east:
        with hand(hub, "west", made) as west:
            west.flood(part_of(west.push(), round=number) for number in range(1, 200))
            assert "wait for their rounds to close" in west.refused()
        serving = hub.server.process.serving
        assert serving is not None
        assert len(serving.incomplete) + len(hub.shard.pushes) <= serving.most_pushes
        close_rounds(hub, east)


def test_a_slow_push_is_taken_however_many_rounds_close_meanwhile(made: Path) -> None:
    """Its values cross a thin line; a site that is there is not given up, or it would wait for ever."""
    with Hub(rules(consistency="async_()"), certs=made) as hub, hand(hub, "east", made) as east:
        with hand(hub, "west", made) as west:
            west.send(dataclasses.replace(push := west.push(UPDATE), segments=()))
            close_rounds(hub, east, 60)
            west.send(part_of(push))
            while not _has(west.receive(), push):
                pass
        close_rounds(hub, east)


def test_parts_without_an_end_are_kept_only_up_to_a_few_models(made: Path) -> None:
    with Hub(quick(), certs=made) as hub, hand(hub, "east", made) as east:
        with hand(hub, "west", made) as west:
            serving = hub.server.process.serving
            assert serving is not None
            part = part_of(west.push(UPDATE), last=False)
            west.flood(part for _ in range(serving.most_bytes // 3000 + 10))
            assert "there is room for" in west.refused()
        close_rounds(hub, east)


def test_joins_that_nobody_reads_are_refused(made: Path) -> None:
    with Hub(quick(), certs=made) as hub, hand(hub, "east", made) as east:
        with hand(hub, "west", made) as west:
            west.flood(Join(site="west", version=-1) for _ in range(200))
            assert "more often than once a second" in west.refused()
        close_rounds(hub, east)


def test_pushes_that_follow_on_a_lost_one_are_answered_only_so_often(made: Path) -> None:
    """Each is small, and its answer is the way to the global model, after a write to the disk."""
    with Hub(quick(consistency="async_()"), certs=made) as hub, hand(hub, "east", made) as east:
        with hand(hub, "west", made) as west:
            push = dataclasses.replace(west.push(), round=2, after=1)

            def ask_often() -> None:
                for _ in range(100):
                    west.send(part_of(push))
                    west.send(push)
                    west.receive()

            with pytest.raises(RefusedError, match="asks for the way to the global model"):
                ask_often()
        close_rounds(hub, east)


@pytest.mark.parametrize("consistency", ["async_()", "backup(1)"])
def test_what_a_site_does_not_read_is_bounded_and_it_comes_back_to_the_global_model(
    made: Path, consistency: str
) -> None:
    with Hub(quick(consistency=consistency), certs=made) as hub, hand(hub, "east", made) as east:
        with hand(hub, "west", made) as west:
            hub.server.transport.max_queued = 20_000
            west.client.abort()  # it crashes without a word
            largest = 0
            for _ in range(150):
                close_rounds(hub, east, 1)
                session = hub.server.transport.sessions().get(Peer("west", 0))
                largest = max(largest, session.unacknowledged_bytes if session is not None else 0)
                if session is None:
                    break
            else:
                pytest.fail("its answers queue for ever")
            assert largest <= 21_000
        hub.server.transport.max_queued = 1 << 20  # there is always room for what a site has missed
        with hand(hub, "west", made, enter=False) as again:
            again.client.enter(AdmissionRequest("west", LAYOUT, 0).pack(), PATIENCE_S)
            again.client.start()
            again.send(holding("west", epoch=2))
            again.send(Join(site="west", version=0, epoch=2))
            assert again.receive().version == hub.version  # type: ignore[union-attr]


# -- before the first model -----------------------------------------------------------------------


def enter(site: Hand, layout: list[tuple[str, list[int]]] | None = None, timeout: float = PATIENCE_S) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        site.client.enter(AdmissionRequest(site.name, layout or LAYOUT, -1).pack(), timeout)
    )
    return found


@pytest.mark.parametrize("size", [[2**25, 2**25], [10**9], [2**62, 2**62]])
def test_a_model_larger_than_the_operator_allows_is_refused_before_anything_is_made_for_it(
    made: Path, size: list[int]
) -> None:
    with Hub(quick(), certs=made, max_parameters=1000) as hub:
        with hand(hub, "west", made, enter=False) as west, pytest.raises(RefusedError, match="at most 1,000"):
            enter(west, [("weight", size)])
        with hand(hub, "east", made) as east:
            close_rounds(hub, east)


def test_a_site_may_not_have_any_number_of_ranks(made: Path) -> None:
    with Hub(quick(), certs=made, max_ranks=4) as hub:
        with hand(hub, "west", made, enter=False) as west, pytest.raises(RefusedError, match="at most 4 of a site"):
            west.client.enter(AdmissionRequest("west", LAYOUT, -1, workers=5).pack(), PATIENCE_S)
        with hand(hub, "east", made) as east:
            close_rounds(hub, east)


def test_a_first_site_that_sends_no_model_lets_the_next_one(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Hub(quick(), certs=made, first_model_s=0.3) as hub, hand(hub, "west", made, enter=False) as west:
        assert enter(west)["init_model"]
        west.client.start()
        with hand(hub, "east", made, enter=False) as east:
            hub.until(lambda: "the next site may send it" in caplog.text)
            assert enter(east)["init_model"]
            east.client.start()
            east.send(first_model(weights()))
            east.send(holding("east"))
            east.send(Join(site="east", version=0, digest=digest_of(weights(), Intervals.whole(NUMEL))))
            east.receive()
            close_rounds(hub, east)


def test_a_first_model_that_is_not_finite_is_refused(made: Path) -> None:
    with Hub(quick(), certs=made) as hub, hand(hub, "west", made, enter=False) as west:
        enter(west)
        west.client.start()
        poisoned = first_model(weights())
        values = weights()
        values[3] = float("nan")
        (segment,) = poisoned.segments
        payload = dataclasses.replace(segment.payload, body=values.view(torch.uint8))
        west.send(dataclasses.replace(poisoned, segments=(dataclasses.replace(segment, payload=payload),)))
        assert "not finite" in west.refused()
        assert hub.server.rounds is None
        with hand(hub, "east", made) as east:
            close_rounds(hub, east)


def test_the_operator_may_name_the_site_that_brings_the_model(made: Path) -> None:
    with Hub(quick(), certs=made, first_site="east") as hub:
        with (
            hand(hub, "west", made, enter=False) as west,
            pytest.raises(LinkError, match="east sends the first global model"),
        ):
            enter(west, timeout=0.5)
        with hand(hub, "east", made) as east, hand(hub, "west", made):
            assert east.version == 0


# -- floods -----------------------------------------------------------------------------------------


def test_deadlines_come_also_while_a_site_keeps_messages_coming(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightgrad.runtime.server.duties._STARVED_S", 0.1)
    with Hub(quick(), certs=made) as hub, hand(hub, "east", made) as east, hand(hub, "west", made) as west:
        east.send_push(first := east.push(UPDATE))
        west.send_push(west.push(UPDATE))
        while not _has(east.receive(), first):
            pass
        again = bytes(pack(dataclasses.replace(first, segments=())))  # it has been received, and changes nothing
        east.send_push(east.push(UPDATE))
        hub.until(lambda: hub.core.waits_for() == ["west"])
        take = hub.server._next_input
        monkeypatch.setattr(hub.server, "_next_input", lambda timeout: take(0.0) or (Peer("east", 0), again))
        hub.until(lambda: hub.version == 2)
        assert hub.core.members.by_name["west"].faults == 1


def test_health_means_that_rounds_close(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def health_of(port: int) -> tuple[int, dict[str, Any]]:
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        line.request("GET", "/healthz")
        reply = line.getresponse()
        found = reply.status, json.loads(reply.read())
        line.close()
        return found

    with Hub(quick(), certs=made) as hub, hand(hub, "east", made) as east, hand(hub, "west", made):
        page = health.serve("127.0.0.1:0", hub.server.metrics, hub.server.status)
        try:
            with monkeypatch.context() as stuck:
                stuck.setattr(hub.core, "wake", lambda now: Decisions())  # the deadline does nothing
                east.send_push(push := east.push(UPDATE))
                hub.until(lambda: hub.core.waits_for() == ["west"])
                assert health_of(page.port)[0] == 200
                hub.server.telemetry.continue_from(hub.server.now + 1000)
                code, facts = health_of(page.port)
                assert (code, facts["healthy"], facts["waiting_for"]) == (503, False, ["west"])
            while not _has(east.receive(), push):
                pass
            assert health_of(page.port)[0] == 200
        finally:
            page.stop()


def test_a_site_that_enters_again_and_again_has_to_wait(made: Path) -> None:
    with Hub(quick(), certs=made) as hub, hand(hub, "east", made) as east:
        admission, request = hub.server.admission, AdmissionRequest("west", LAYOUT, -1).pack()
        entry = EntryRequest("west", 0, "1", request, "west", None, "")

        def enters_often() -> None:
            for _ in range(10_000):
                admission.enter(entry)

        with pytest.raises(LinkError, match="more often than twice a second"):
            enters_often()
        close_rounds(hub, east)


def test_what_strangers_do_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    metrics = ServerMetrics()
    telemetry = Telemetry(None, metrics)
    for _ in range(1000):
        telemetry.refused_connection("unknown site")
        telemetry.refused_update("west", "it is too large")
    assert 2 <= len(caplog.records) < 200
    counted = metrics.registry.get_sample_value("weightgrad_refused_connections_total", {"reason": "unknown site"})
    assert counted == 1000


# -- words and files ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_", [b"[" * 100_000, b'{"protocol":' * 20_000, b'{"protocol": 3, "layout": [["a", [Infinity]]]}']
)
def test_json_that_is_hostile_is_a_refusal_and_no_error_of_the_server(made: Path, request_: bytes) -> None:
    with (
        Hub(quick(), certs=made) as hub,
        hand(hub, "west", made, enter=False) as west,
        pytest.raises(RefusedError) as refusal,
    ):
        west.client.enter(request_, PATIENCE_S)
    assert "the global server failed" not in str(refusal.value)


def test_a_name_cannot_forge_a_line_of_the_log(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    forged = "a\n12:00:00 INFO    west leaves\x1b[2J"
    with Hub(quick(), certs=made) as hub, hand(hub, "east", made), hand(hub, "west", made, enter=False) as west:
        with pytest.raises(RefusedError):
            enter(west, [(forged, [1])])
        assert "west leaves" in caplog.text
        assert not [record for record in caplog.records if "\n" in record.getMessage() or "\x1b" in record.getMessage()]
        assert hub.server.status()["healthy"]


def test_a_long_text_of_a_site_is_not_a_long_line_of_the_log(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A megabyte in each line about it would fill the disk."""
    caplog.set_level("INFO")
    with Hub(quick(), certs=made) as hub, hand(hub, "east", made), hand(hub, "west", made, enter=False) as west:
        with pytest.raises(RefusedError):
            enter(west, [("long" * 100_000, [1])])
        assert "longlong" in caplog.text
        assert max(len(record.getMessage()) for record in caplog.records) < 5000
        hub.server.telemetry.refused_update("west", "long" * 100_000)
        assert max(len(record.getMessage()) for record in caplog.records) < 5000


def test_a_site_whose_sessions_are_ended_again_and_again_has_to_wait(made: Path) -> None:
    with Hub(quick(), certs=made) as hub, hand(hub, "east", made) as east:
        for _ in range(3):
            with hand(hub, "west", made, enter=False) as west:
                enter(west)
                west.client.start()
                west.send(Leave(site="east"))
                west.refused()
        with hand(hub, "west", made, enter=False) as west, pytest.raises(LinkError, match="try again in"):
            enter(west, timeout=0.1)
        close_rounds(hub, east)


def test_a_server_that_may_not_write_its_final_states_goes_on(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    os.mkfifo(out / "final-state-1.part")
    with Hub(quick(), certs=made, out=out) as hub, hand(hub, "east", made) as east, hand(hub, "west", made) as west:
        west.send(FinalPart(site="west", place=0, parts=1, data=b"x" * 100))
        close_rounds(hub, east)
        assert hub.server.status()["healthy"]
