"""Before there is a model: a majority of the sites says which one is trained, whoever came first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weightgrad.core.layout import Layout
from weightgrad.core.strategies import find
from weightgrad.errors import LinkError, RefusedError
from weightgrad.runtime.admission_messages import AdmissionRequest
from weightgrad.runtime.run_config import RunConfig
from weightgrad.runtime.security import certificates
from weightgrad.runtime.server.votes import LayoutVote
from weightgrad.runtime.transport.transport import EntryRequest

from .deployment import PATIENCE_S, Hub
from .test_refusals import LAYOUT, hand

SITES = ("east", "mallory", "west")
SMALL = Layout.of_shapes([("weight", (2,))])
OTHER = [("weight", [7, 7])]


def vote(sites: int, *, now: list[float] | None = None) -> LayoutVote:
    clock = now or [0.0]
    return LayoutVote(sites, 20.0, lambda: clock[0])


def ask(hub: Hub, name: str, request: bytes) -> bytes:
    """Ask once; a client would try again until its time is up."""
    return hub.server.enter(EntryRequest(name, 0, "1", request, name, None, ""))


@pytest.mark.parametrize("sites", [1, 2])
def test_without_a_majority_the_first_site_decides(sites: int) -> None:
    votes = vote(sites)
    assert votes.agreed() is None
    votes.cast("a", "x", SMALL)
    assert votes.agreed() == "x"


def test_more_than_half_of_all_sites_decide_whoever_came_first() -> None:
    votes = vote(4)
    for site, wants in (("a", "bad"), ("b", "good"), ("c", "good")):
        votes.cast(site, wants, SMALL)
        assert votes.agreed() is None
    votes.cast("d", "good", SMALL)
    assert votes.agreed() == "good"


def test_a_site_has_one_vote_however_often_it_asks() -> None:
    votes = vote(3)
    for wants in ("bad", "worse", "bad", "bad"):
        votes.cast("a", wants, SMALL)
    assert votes.agreed() is None
    assert votes.standing() == "1 of the 3 sites, and 2 are needed"
    votes.cast("b", "bad", SMALL)
    votes.cast("b", "good", SMALL)
    assert votes.agreed() is None


def test_after_the_deadline_those_that_have_come_decide() -> None:
    now = [100.0]
    votes = vote(5, now=now)
    votes.cast("a", "bad", SMALL)
    now[0] = 119.0
    votes.cast("b", "good", SMALL)
    votes.cast("c", "good", SMALL)
    assert votes.agreed() is None
    now[0] = 120.0
    assert votes.agreed() == "good"


def test_an_insider_that_comes_first_does_not_choose_the_model(tmp_path: Path) -> None:
    made = tmp_path / "certs"
    certificates.create(made, [], SITES)
    config = RunConfig(sites=SITES, fit=lambda numel: find("diloco", {"every": 1, "aggregator": "mean"}), seed=3)
    with (
        Hub(config, certs=made, agree_s=PATIENCE_S) as hub,
        hand(hub, "mallory", made, enter=False) as mallory,
        hand(hub, "east", made, enter=False) as east,
        hand(hub, "west", made, enter=False) as west,
    ):
        hostile = AdmissionRequest("mallory", OTHER, -1).pack()
        for name, request in (("mallory", hostile), ("east", AdmissionRequest("east", LAYOUT, -1).pack())):
            with pytest.raises(LinkError, match="have not agreed on a model yet: so far it is that of 1 of the 3"):
                ask(hub, name, request)
        reply = json.loads(west.client.enter(AdmissionRequest("west", LAYOUT, -1).pack(), PATIENCE_S))
        assert reply["init_model"]
        reply = json.loads(east.client.enter(AdmissionRequest("east", LAYOUT, -1).pack(), PATIENCE_S))
        assert not reply["init_model"]
        with pytest.raises(RefusedError, match="is not the one that is being trained: it has a parameter weight"):
            mallory.client.enter(hostile, PATIENCE_S)


def test_an_insider_with_other_frozen_weights_shuts_nobody_out(tmp_path: Path) -> None:
    made = tmp_path / "certs"
    certificates.create(made, [], SITES)
    config = RunConfig(sites=SITES, fit=lambda numel: find("diloco", {"every": 1}), seed=3)
    requests = {
        name: AdmissionRequest(name, LAYOUT, -1, frozen={"embedding": "bad" if name == "mallory" else "good"}).pack()
        for name in SITES
    }
    with (
        Hub(config, certs=made) as hub,
        hand(hub, "mallory", made, enter=False) as mallory,
        hand(hub, "east", made, enter=False) as east,
        hand(hub, "west", made, enter=False) as west,
    ):
        mallory.client.enter(requests["mallory"], PATIENCE_S)
        with pytest.raises(LinkError, match="No majority has said yet which is right"):
            ask(hub, "east", requests["east"])
        for site in (west, east):
            site.client.enter(requests[site.name], PATIENCE_S)
        with pytest.raises(RefusedError, match="mallory has other values in it than"):
            mallory.client.enter(requests["mallory"], PATIENCE_S)


def test_a_site_that_the_majority_does_not_follow_is_told_what_differs(tmp_path: Path) -> None:
    made = tmp_path / "certs"
    certificates.create(made, [], SITES)
    config = RunConfig(sites=SITES, fit=lambda numel: find("diloco", {"every": 1}), seed=3)
    with Hub(config, certs=made, agree_s=PATIENCE_S) as hub:
        hub.server.admission.first_site.vote.cast("east", "good", SMALL)
        hub.server.admission.first_site.vote.cast("west", "good", SMALL)
        with hand(hub, "mallory", made, enter=False) as mallory, pytest.raises(RefusedError, match="most sites have"):
            mallory.client.enter(AdmissionRequest("mallory", OTHER, -1).pack(), PATIENCE_S)
