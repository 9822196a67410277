"""Faults that meet each other, and what is written down about time and bytes."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from weightgrad.core.site.state import SiteState
from weightgrad.lab.sim.compute import Compute
from weightgrad.lab.sim.links import Link, Links
from weightgrad.lab.sim.local_network import LocalNetwork
from weightgrad.lab.sim.plan import Fault, SimulationPlan, SiteSpec
from weightgrad.lab.sim.simulator import Simulator
from weightgrad.lab.sim.site import SimSite
from weightgrad.wire.messages import JoinReply, Message, RoundResult

from .toy_task import assert_finished_with_one_model, plan, run

# -- faults ---------------------------------------------------------------------------------


def test_a_cut_that_heals_does_not_heal_a_slow_link(tmp_path: Path) -> None:
    slow = Fault(0.0, "slow", ("hub", "site-0"), 60.0, factor=0.05)
    cut = Fault(0.1, "cut", ("hub", "site-0"), 0.1)
    alone, _ = run(tmp_path, plan("baseline", faults=(slow,)))
    both, _ = run(tmp_path, plan("baseline", faults=(slow, cut)))
    assert both.clock.now > alone.clock.now
    assert_finished_with_one_model(both)


def test_a_site_killed_twice_comes_back_once(tmp_path: Path) -> None:
    faults = (Fault(0.40, "kill", ("site-1",), 0.3), Fault(0.50, "kill", ("site-1",), 0.21))
    slow = plan("baseline", changes={"consistency": "async_()"}, faults=faults, steps=60)
    simulator, log = run(tmp_path, dataclasses.replace(slow, sites=_sites(3, compute=Compute(0.05))))
    assert_finished_with_one_model(simulator)
    steps = [e["t"] for e in log if e["kind"] == "step" and e["site"] == "site-1"]
    assert min(b - a for a, b in pairwise(steps)) > 0.05 - 1e-9, "no step is shorter than it takes"


def test_a_server_killed_twice_comes_back_once(tmp_path: Path) -> None:
    faults = (Fault(0.40, "kill", ("hub",), 0.3), Fault(0.50, "kill", ("hub",), 0.3))
    simulator, log = run(tmp_path, plan("diloco", changes={"every": 4}, faults=faults))
    assert_finished_with_one_model(simulator)
    assert [e["what"] for e in log if e["kind"] == "fault"] == ["kill", "kill", "return"]


@pytest.mark.parametrize("dies", [0.52 + 0.01 * n for n in range(12)])
def test_a_server_that_dies_just_after_a_site_joined(dies: float, tmp_path: Path) -> None:
    faults = (Fault(0.5, "join", ("site-2",)), Fault(dies, "kill", ("hub",), 0.02))
    simulator, _ = run(tmp_path, plan("baseline", faults=faults, absent=frozenset({"site-2"})))
    assert_finished_with_one_model(simulator)


@pytest.mark.parametrize("fault", [Fault(0.4, "kill", ("hub",)), Fault(0.4, "cut", ("hub", "site-1"))])
def test_a_run_that_cannot_end_is_not_called_finished(fault: Fault, tmp_path: Path) -> None:
    simulator, log = run(tmp_path, plan("baseline", faults=(fault,)))
    assert simulator.status == "interrupted"
    assert log[-1]["status"] == "interrupted"


@pytest.mark.parametrize("name", ["weightgrad", "streaming", "diloco"])
@pytest.mark.parametrize("dies", [0.55, 0.7, 0.85])
def test_a_server_that_comes_back_still_has_its_results(name: str, dies: float, tmp_path: Path) -> None:
    # A site that was away applies them when it would have, and not all at once: the bits of an undisturbed run.
    changes = {"t_global": None, "overlap": 6} | ({"trigger": "staggered(4, 4)"} if name == "streaming" else {})
    undisturbed, _ = run(tmp_path, plan(name, changes=changes))
    faults = (Fault(0.3, "kill", ("site-1",), 0.6), Fault(dies, "kill", ("hub",), 0.05))
    simulator, _ = run(tmp_path, plan(name, changes=changes, faults=faults))
    assert_finished_with_one_model(simulator)
    assert simulator.server.global_model.digest() == undisturbed.server.global_model.digest()


def test_nothing_is_sent_to_the_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[float, str]] = []
    original = Links.send

    def watch(self: Links, now: float, sender: str, receiver: str, *rest: Any) -> None:
        sent.append((now, receiver))
        original(self, now, sender, receiver, *rest)

    monkeypatch.setattr(Links, "send", watch)
    dead = Fault(0.2, "kill", ("site-1",))
    run(tmp_path, plan("baseline", changes={"consistency": "async_()"}, faults=(dead,)))
    assert [now for now, receiver in sent if receiver == "site-0" and now > 0.21]
    assert not [now for now, receiver in sent if receiver == "site-1" and now > 0.2]


# -- order ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gaia", "weightgrad", "diloco"])
def test_without_faults_nothing_is_sent_twice(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    welcomes: list[Message] = []
    original = Simulator._from_server

    def watch(self: Simulator, to: str, message: Message) -> None:
        if isinstance(message, JoinReply):
            welcomes.append(message)
        original(self, to, message)

    monkeypatch.setattr(Simulator, "_from_server", watch)
    changes = {"consistency": "bounded(4)", "selector": "gaia(0.5)" if name == "gaia" else "all"}
    if name == "diloco":
        changes["every"] = "10"  # the last round and the flush leave at the same moment
    made = plan(name, changes=changes)
    links = tuple(Link(one.between, 2e4, 0.05) for one in made.links)  # messages queue up, small ones behind large ones
    simulator, log = run(tmp_path, dataclasses.replace(made, links=links))
    assert_finished_with_one_model(simulator)
    assert len(welcomes) == len(simulator.sites), "one each, at the start"
    up = sum(e["up_bytes"] for e in log if e["kind"] == "round")
    assert sum(both[0] for both in simulator.network.links.bytes) == up + len(simulator.sites) * (32 + len("site-0"))


def test_a_digest_is_of_the_version_it_stands_beside(tmp_path: Path) -> None:
    faults = (Fault(0.3, "cut", ("hub", "site-1"), 4.0),)
    changes = {"consistency": "bounded(3)", "t_global": 1.0}
    _, log = run(tmp_path, plan("baseline", changes=changes, faults=faults))
    rounds = [e for e in log if e["kind"] == "round" and e["down_bytes"] > 200]  # that moved anything
    assert len({e["t"] for e in rounds}) < len(rounds), "some were closed at once"
    assert len({e["digest"] for e in rounds}) == len(rounds)


# -- time and bytes -------------------------------------------------------------------------


def _sites(count: int, workers: int = 2, compute: Compute | None = None) -> tuple[SiteSpec, ...]:
    made = compute or Compute(0.01)
    return tuple(SiteSpec(f"site-{i}", workers, LocalNetwork(1e6, 1e-4), made) for i in range(count))


@pytest.mark.parametrize("name", ["baseline", "terngrad", "weightgrad", "gaia"])
def test_the_seconds_of_a_site_add_up(name: str, tmp_path: Path) -> None:
    # Codecs a million times slower than real: what is counted twice would show.
    made = dataclasses.replace(plan(name, sites=1), sites=_sites(1), codec_speed=1e-6)
    simulator, log = run(tmp_path, made)
    (one,) = simulator.sites
    (end,) = [e for e in log if e["kind"] == "site"]
    accounted = end["compute_seconds"] + end["codec_seconds"] + end["lan_seconds"] + end["waiting_seconds"]
    # What is not: the first round trip; encoding a push goes on while the site waits for its answer.
    assert accounted >= simulator.clock.now - 0.05
    pushing = accounted - simulator.clock.now
    assert pushing <= 0.6 * one.times.codec + 0.05
    assert one.times.lan == pytest.approx(_lan_seconds(made, one.times.lan_bytes), rel=0.5)


def _lan_seconds(made: SimulationPlan, nbytes: int) -> float:
    """Of so many bytes through one card; a ring of two moves both ways at once."""
    share = 2 if made.strategy.exchange == "allreduce" else 1
    return nbytes * 8 / made.sites[0].lan.bandwidth_bit_s / share


@pytest.mark.parametrize("exchange", ["server", "sharded"])  # two workers: the one that serves a tensor has it
def test_full_weights_through_the_local_server_are_not_free(exchange: str, tmp_path: Path) -> None:
    full, _ = run(tmp_path, plan("weightgrad", changes={"weights": "fp32", "exchange": exchange}))
    steps, numel = 40, full.task.layout.numel
    for one in full.sites:
        assert one.times.lan_bytes >= steps * 4 * numel


# -- T and the stall rule -------------------------------------------------------------------


def test_a_site_that_hears_nothing_within_t_stalls_until_the_link_heals(tmp_path: Path) -> None:
    """Workers get no new weights meanwhile; nothing is lost, and the bits are those of a run without a cut."""
    t, cut, seconds = 0.2, 0.5, 3.0
    changes = {"trigger": "every(2)", "hide": 0, "overlap": 1000, "t_global": None}
    fault = Fault(cut, "cut", ("hub", "site-0"), seconds)

    def trained(more: dict[str, Any], *faults: Fault) -> tuple[Simulator, list[dict[str, Any]]]:
        made = plan("weightgrad", changes=changes | more, faults=faults, steps=150)
        return run(tmp_path, dataclasses.replace(made, sites=_sites(3, compute=Compute(0.01))))

    _, free_log = trained({}, fault)
    assert not [e for e in free_log if e["kind"] == "wait"], "without t the site trains on"
    undisturbed, log = trained({"t": t})
    assert not [e for e in log if e["kind"] == "wait"], "a link that is well never stalls a site"
    simulator, log = trained({"t": t}, fault)
    assert_finished_with_one_model(simulator)
    assert simulator.server.global_model.digest() == undisturbed.server.global_model.digest()
    stalled = [e for e in log if e["kind"] == "wait" and e["site"] == "site-0"]
    (stall,) = [e for e in stalled if e["t"] >= cut + seconds]
    assert stall["why"] == "stall"
    began = stall["t"] - stall["seconds"]
    assert cut < began <= cut + t + 0.05, "the last word before the cut, T, and the step that was under way"
    steps = [e["t"] for e in log if e["kind"] == "step" and e["site"] == "site-0"]
    assert not [at for at in steps if began < at < cut + seconds], "no step between stall and release"
    assert [at for at in steps if at > stall["t"]]
    assert len([e["t"] for e in free_log if e["kind"] == "step" and began < e["t"] < cut + seconds]) > 50


def test_results_that_come_while_a_site_waits_are_handed_to_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled: list[tuple[str, int]] = []
    handed: list[tuple[str, int]] = []
    apply_results, hand_on = SiteState.apply_results, SimSite._hand_on

    def watch_settle(self: SiteState) -> list[RoundResult]:
        found = apply_results(self)
        settled.extend((self.name, result.version) for result in found if not self.finishing)
        return found

    def watch_hand_on(self: SimSite) -> float:
        handed.extend((self.place.name, one.version) for one in self.applied if isinstance(one, RoundResult))
        return hand_on(self)

    monkeypatch.setattr(SiteState, "apply_results", watch_settle)
    monkeypatch.setattr(SimSite, "_hand_on", watch_hand_on)
    run(tmp_path, plan("baseline", changes={"consistency": "backup(1)"}))
    missed = set(settled) - set(handed)
    last = {name: max(version for n, version in handed if n == name) for name, _ in settled}
    assert not [one for one in missed if one[1] < last[one[0]]], "only after its last step"
