"""A site with a valid certificate that abuses how a push comes: twice, with other values, without them, too often."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from weightgrad.codecs import Fp32
from weightgrad.runtime.admission_messages import AdmissionRequest
from weightgrad.runtime.security import certificates
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_bytes import pack
from weightgrad.wire.messages import Push, Segment

from .deployment import PATIENCE_S, Hub
from .test_hostile_sites import close_rounds
from .test_refusals import LAYOUT, NUMEL, Hand, hand, holding, model, part_of, rules, weights

SITES = ("east", "west")
UPDATE = torch.ones(NUMEL)


@pytest.fixture(name="made", scope="module")
def fixture_made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs") / "all"
    certificates.create(directory, [], SITES)
    return directory


def with_update(push: Push, update: torch.Tensor) -> Push:
    """The same push with other values, also with some that no encoder takes."""
    payload, _ = Fp32().encode(torch.zeros(NUMEL), {}, 0)
    payload = dataclasses.replace(payload, body=update.view(torch.uint8))
    return dataclasses.replace(push, segments=(Segment(0, payload),))


def pushed_twice(hub: Hub, west: Hand, update: torch.Tensor) -> None:
    """A push that the guard lets through, and other values for the same round before it closes."""
    west.send_push(push := west.push(UPDATE))
    hub.until(lambda: hub.core.is_open("west", 1))
    west.send(part_of(with_update(push, update)))
    west.send_push(west.push(UPDATE))  # handled after it
    hub.until(lambda: hub.core.is_open("west", 2) or not hub.core.is_open("west", 1))


@pytest.mark.parametrize("value", [1e6, -100.0, float("nan")], ids=str)
def test_values_that_are_sent_again_move_the_model_no_further_than_those_that_were_judged(
    made: Path, value: float
) -> None:
    with Hub(rules(), certs=made) as hub, hand(hub, "east", made) as east, hand(hub, "west", made) as west:
        pushed_twice(hub, west, UPDATE * value)
        east.send_push(east.push(UPDATE))
        hub.until(lambda: hub.version >= 1)
        moved = hub.shard.global_model.vector - weights()
        assert moved.abs().max() <= 1.0


def test_pushes_whose_values_do_not_come_are_kept_only_within_the_window(made: Path) -> None:
    """A push brings up to 768 KB of buffers; with async_ a site may count 4096 rounds ahead."""
    with Hub(rules(consistency="async_()"), certs=made) as hub, hand(hub, "east", made) as east:
        with hand(hub, "west", made) as west:
            west.flood(west.push(after=0, buffers={"mean": torch.zeros(10_000)}) for _ in range(40))
            assert "the values of 8 of its pushes have not come" in west.refused()
        assert hub.server.rounds is not None
        assert len(hub.server.rounds.pending) <= 8
        close_rounds(hub, east)


def test_a_push_that_is_known_is_not_written_to_the_log_for_ever(made: Path, tmp_path: Path) -> None:
    with Hub(rules(t_global=600.0), certs=made, state=tmp_path) as hub, hand(hub, "east", made):
        with hand(hub, "west", made) as west:
            known = west.push()
            west.flood(known for _ in range(200))
            assert "that are known more often than once a second" in west.refused()
        assert hub.server.process.storage is not None
        assert hub.server.process.storage.last < 100


def test_values_that_come_again_and_again_do_not_fill_the_disk(made: Path, tmp_path: Path) -> None:
    with Hub(rules(t_global=600.0), certs=made, state=tmp_path) as hub, hand(hub, "east", made) as east:
        with hand(hub, "west", made) as west:
            serving = hub.server.process.serving
            assert serving is not None
            serving.most_push_bytes = 20_000
            most = 2 * serving.most_bytes
            part = part_of(west.push(UPDATE))
            west.flood(part for _ in range(2 * most // len(pack(part))))
            assert "sends its pushes again and again" in west.refused()
        assert hub.server.process.storage is not None
        assert hub.server.process.storage.last < 2 * most // len(pack(part))
        east.send_push(east.push(UPDATE))
        hub.until(lambda: hub.core.is_open("east", 1))


def test_a_rank_cannot_have_results_cut_into_any_number_of_stretches(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightgrad.runtime.server.shard_server._SPANS", 3)
    even, odd = (Intervals(tuple((at, at + 1) for at in range(first, NUMEL, 2))) for first in (0, 1))
    with Hub(rules(), certs=made) as hub, hand(hub, "east", made) as east:
        with hand(hub, "west", made) as west:
            west.send(holding("west", ranks=2, epoch=1, held=even))
            west.send(holding("west", ranks=2, rank=1, epoch=1, held=odd))
            assert "the ranks of west hold 8 intervals" in west.refused()
        assert [len(one.spans) for ranks in hub.shard.holdings.values() for one in ranks] == [1, 1]
        close_rounds(hub, east, 0)


def test_before_there_is_a_model_holdings_have_a_bound_too(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 256 ranks may say what it holds, in a message of up to 16 MB."""
    monkeypatch.setattr("weightgrad.runtime.server.shard_server._SPANS", 3)
    with Hub(rules(), certs=made) as hub, hand(hub, "west", made, enter=False) as west:
        west.client.enter(AdmissionRequest("west", LAYOUT, -1).pack(), PATIENCE_S)
        west.client.start()
        west.send(holding("west", held=Intervals(tuple((at, at + 1) for at in range(0, NUMEL, 2)))))
        assert "the ranks of west hold 8 intervals" in west.refused()
        assert not hub.server.process.take_early()


@pytest.mark.parametrize("place", range(5), ids=["beta1", "beta2", "eps", "rate of a group", "weight decay"])
def test_options_of_an_optimizer_with_which_no_step_can_be_taken_end_nobody(
    made: Path, tmp_path: Path, place: int
) -> None:
    """Of two sites the lower number holds: with these a step raised, in the server and from its log again."""
    adam = torch.optim.Adam(model().parameters(), lr=0.1)
    options = [0.9, 0.999, 1e-8, 1.0, 0.0]
    options[place] = -1e308
    with Hub(rules("baseline"), certs=made, state=tmp_path) as hub, hand(hub, "east", made, optimizer=adam) as east:
        with hand(hub, "west", made, optimizer=adam) as west:
            west.send_push(west.push(UPDATE, rate=0.1, options=tuple(options)))
            assert "where the optimizer of the run has" in west.refused()
        with hand(hub, "west", made, optimizer=adam) as west:
            for site in (east, west):
                site.send_push(site.push(UPDATE, rate=0.1, options=(0.85, 0.999, 1e-8, 0.5, 0.01)))
            hub.until(lambda: hub.version == 1)
            assert hub.global_model.vector.isfinite().all()


def test_a_rank_may_send_no_longer_messages_than_the_model_has(made: Path) -> None:
    """A site may have 256 ranks, and two messages of each wait: with 24 MB each, 12 GB for any small model."""
    with Hub(rules(), certs=made) as hub, hand(hub, "east", made) as east:
        assert hub.transport.max_message is not None
        assert 16 * NUMEL < hub.transport.max_message < 3 << 20
        close_rounds(hub, east, 0)


def test_a_push_whose_values_do_not_come_does_not_keep_the_log_from_being_cut(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be slow, and other sites may close ten thousand rounds meanwhile; after a restart it is still known."""
    monkeypatch.setattr("weightgrad.runtime.server.storage._LEAST_LOG", 0)
    monkeypatch.setattr("weightgrad.runtime.server.storage._LOG_PER_STATE", 0.0)
    slow = rules(consistency="async_()")
    with (
        Hub(slow, certs=made, state=tmp_path) as hub,
        hand(hub, "east", made) as east,
        hand(hub, "west", made) as west,
    ):
        push = west.push(UPDATE)
        west.send(dataclasses.replace(push, segments=()))
        hub.until(lambda: hub.server.rounds is not None and hub.server.rounds.pending)
        first = hub.server.process._positions["west", 1]
        close_rounds(hub, east, 5)
        hub.until(lambda: hub.server.process._positions["west", 1] > first)
    with Hub(slow, certs=made, state=tmp_path) as again:
        assert again.server.rounds is not None
        assert again.server.rounds.pending.keys() == {("west", 1)}
        with hand(again, "west", made) as west:
            west.send(part_of(push))
            again.until(lambda: again.core.members.by_name["west"].included_round == 1)
