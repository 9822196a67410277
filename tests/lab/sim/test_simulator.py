"""The simulated simulator: oracles, determinism, faults, accounting."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from weightgrad import event_log
from weightgrad.core.strategies import PRESETS
from weightgrad.lab.sim.compute import Compute, Straggler
from weightgrad.lab.sim.links import Link
from weightgrad.lab.sim.local_network import LocalNetwork
from weightgrad.lab.sim.plan import Fault, SimulationPlan, SiteSpec
from weightgrad.lab.sim.simulator import Simulator

from .toy_task import Toy, assert_finished_with_one_model, assert_one_model, plan, run


def large_batch(made: SimulationPlan, **options: float) -> torch.Tensor:
    """Plain PyTorch SGD on the mean of all workers' gradients."""
    task = Toy(len(made.sites))
    w = torch.nn.Parameter(task.initial())
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=options.get("momentum", 0.5))
    for step in range(made.steps):
        found = [g.vector for s in range(len(made.sites)) for g in task.gradients(s, w.detach(), step)]
        w.grad = torch.stack(found).mean(0)
        optimizer.step()
    return w.detach()


def test_n_sites_every_step_are_large_batch_sgd(tmp_path: Path) -> None:
    simulator, _ = run(tmp_path, plan("baseline"))
    torch.testing.assert_close(simulator.server.global_model.vector, large_batch(simulator.plan), rtol=1e-5, atol=1e-6)
    assert_one_model(simulator)


def test_diloco_every_step_with_plain_outer_sgd_is_the_baseline(tmp_path: Path) -> None:
    changes = {"every": 1, "aggregator": "outer('sgd', lr=1.0)"}
    simulator, _ = run(tmp_path, plan("diloco", changes=changes))
    torch.testing.assert_close(simulator.server.global_model.vector, large_batch(simulator.plan), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PRESETS)
def test_a_run_is_its_recipe_and_seed(name: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    simulator, _ = run(tmp_path / "a", plan(name))
    run(tmp_path / "b", plan(name))
    first, second = ((tmp_path / n / "events.jsonl").read_bytes() for n in "ab")
    assert first == second
    run(tmp_path / "b", plan(name, seed=1))
    assert (tmp_path / "b" / "events.jsonl").read_bytes() != first
    assert simulator.status == "finished"
    assert_one_model(simulator)
    assert all(s.state.finished for s in simulator.sites)


def test_bounded_0_is_sync_to_the_byte(tmp_path: Path) -> None:
    event_logs = []
    for number, consistency in enumerate(("sync", "bounded(0)")):
        place = tmp_path / str(number)
        place.mkdir()
        run(place, plan("diloco", changes={"every": 4, "consistency": consistency}))
        event_logs.append((place / "events.jsonl").read_bytes())
    assert event_logs[0] == event_logs[1]


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_staleness_stays_within_its_bound(bound: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightgrad.lab.sim.site import SimSite

    ahead: list[int] = []
    original = SimSite.compute

    def compute(self: SimSite) -> Any:
        ahead.append(self.state.pushed - self.state.version)
        return original(self)

    monkeypatch.setattr(SimSite, "compute", compute)
    made = plan("baseline", changes={"consistency": f"bounded({bound})"})
    run(tmp_path, made)
    assert max(ahead) == bound  # the bound is used, and kept


FAULTS = {
    "cut": [Fault(0.5, "cut", ("hub", "site-1"), 1.0)],
    "cut longer than the deadline": [Fault(0.3, "cut", ("hub", "site-1"), 4.0)],
    "slow": [Fault(0.2, "slow", ("hub", "site-0"), 1.0, factor=0.01)],
    "flap": [Fault(0.2, "flap", ("hub", "site-2"), 2.0, period=0.2)],
    "site dies": [Fault(0.4, "kill", ("site-1",), 0.7)],
    "site dies long": [Fault(0.4, "kill", ("site-1",), 5.0)],
    "server dies": [Fault(0.4, "kill", ("hub",), 0.5)],
    "server and site die": [Fault(0.4, "kill", ("hub",), 0.5), Fault(0.6, "kill", ("site-0",), 0.5)],
    "late joiner": [Fault(0.5, "join", ("site-2",))],
    "leaver": [Fault(0.5, "leave", ("site-0",))],
    "everything": [
        Fault(0.2, "cut", ("hub", "site-0"), 0.4),
        Fault(0.3, "kill", ("site-1",), 0.4),
        Fault(0.5, "kill", ("hub",), 0.3),
        Fault(0.6, "join", ("site-2",)),
        Fault(0.9, "flap", ("hub", "site-1"), 0.5, period=0.1),
    ],
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("name", ["baseline", "gaia", "weightgrad", "diloco", "streaming", "terngrad"])
def test_after_any_schedule_global_models_are_identical(name: str, faults: list[Fault], tmp_path: Path) -> None:
    changes = {"t_global": 2.0, **({"every": 4} if name == "diloco" else {})}
    absent = frozenset(f.where[0] for f in faults if f.what == "join")
    simulator, log = run(tmp_path, plan(name, changes=changes, faults=tuple(faults), absent=absent))
    assert simulator.status == "finished"
    assert_one_model(simulator)
    assert all(s.state.finished for s in simulator.sites if s.alive)
    assert {e["what"] for e in log if e["kind"] == "fault"} >= {faults[0].what if faults[0].what != "flap" else "cut"}


def test_bytes_of_the_baseline_are_what_arithmetic_says(tmp_path: Path) -> None:
    simulator, log = run(tmp_path, plan("baseline", sites=2))
    rounds = [e for e in log if e["kind"] == "round"]
    links = [e for e in log if e["kind"] == "link"]
    up = sum(r["up_bytes"] for r in rounds)
    down = sum(2 * r["down_bytes"] for r in rounds)
    reply = 2 * (32 + 32 + len("site-0"))
    assert sum(sum(e["bytes"]) for e in links) == up + down + reply
    assert up > 40 * 2 * 4 * simulator.task.layout.numel
    (ended,) = [e for e in log if e["kind"] == "end"]
    assert ended["status"] == "finished"


def test_a_slower_link_takes_longer_and_overlap_hides_it(tmp_path: Path) -> None:
    waits = {}
    for name, consistency in (("sync", "sync"), ("overlapped", "bounded(4)")):
        simulator, _ = run(tmp_path, plan("diloco", changes={"every": 5, "consistency": consistency}))
        waits[name] = (simulator.clock.now, sum(s.times.waiting for s in simulator.sites))
    assert waits["overlapped"][0] < waits["sync"][0]
    assert waits["overlapped"][1] < waits["sync"][1]


def test_with_backup_sites_a_slow_one_holds_nobody_up_and_does_not_do_the_others_steps_again(tmp_path: Path) -> None:
    """It ends with them, after as many rounds as steps, though it has taken part in a few only."""
    slow = Compute(0.01, 0.1, (Straggler(8.0, site="site-0"),))
    places = tuple(SiteSpec(f"site-{i}", 2, LocalNetwork(1e9, 1e-4), slow) for i in range(3))
    links = tuple(Link(("hub", f"site-{i}"), 1e8, 0.001) for i in range(3))
    steps, lasted = {}, {}
    for consistency in ("sync", "backup(1)"):
        simulator, log = run(tmp_path, replace(plan(changes={"consistency": consistency}), sites=places, links=links))
        assert_finished_with_one_model(simulator)
        steps[consistency] = [sum(e["kind"] == "step" and e["site"] == s.name for e in log) for s in places]
        lasted[consistency] = simulator.clock.now
        assert all(one.state.step == 40 for one in simulator.sites)
    assert steps["sync"] == [40, 40, 40]
    assert steps["backup(1)"][0] <= 8
    assert steps["backup(1)"][1:] == [40, 40]
    assert lasted["backup(1)"] < lasted["sync"] / 4


def test_stall_rule_releases_no_weights_after_t_without_news(tmp_path: Path) -> None:
    changes = {"consistency": "async_()", "t": 0.3}
    cut = (Fault(0.4, "cut", ("hub", "site-0"), 3.0),)
    _, log = run(tmp_path, plan("weightgrad", changes=changes, faults=cut, steps=200))
    steps = [e["t"] for e in log if e["kind"] == "step" and e["site"] == "site-0"]
    # The last news may be on its way when the cut comes; one step may be under way when T runs out.
    assert not [t for t in steps if 0.4 + 0.3 + 0.15 < t < 3.4]
    assert max(steps) > 3.4
    others = [e["t"] for e in log if e["kind"] == "step" and e["site"] == "site-2"]
    assert [t for t in others if 0.9 < t < 3.4]


def test_a_round_in_which_nobody_is_significant_completes(tmp_path: Path) -> None:
    changes = {"selector": "gaia(1e9)", "trigger": "every(2)"}
    simulator, log = run(tmp_path, plan("gaia", changes=changes))
    rounds = [e for e in log if e["kind"] == "round"]
    assert len(rounds) >= 20
    assert max(r["up_bytes"] for r in rounds[:-1]) <= 3 * (32 + 6)
    assert_one_model(simulator)


@pytest.mark.parametrize("name", ["baseline", "weightgrad", "weightgrad-paper", "dgc"])
def test_a_run_that_diverges_says_so(name: str, tmp_path: Path) -> None:
    simulator, log = run(tmp_path, plan(name, rate=lambda step: 1e6, steps=20))
    assert simulator.status == "diverged"
    assert log[-1]["status"] == "diverged"


def test_a_run_that_fails_is_not_called_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("as if the disk were full")

    monkeypatch.setattr(Simulator, "_closed", fail)
    with pytest.raises(RuntimeError):
        run(tmp_path, plan("baseline"))
    assert event_log.read(tmp_path / "events.jsonl")[-1]["status"] == "failed"


def test_a_sharded_local_server_computes_the_same_and_is_faster(tmp_path: Path) -> None:
    found = {}
    for exchange in ("server", "sharded"):
        # By tensor: what a worker holds is cut where its tensors end, and so is what a codec sees at a time.
        changes = {"exchange": exchange, "trigger": "every(4)", "consistency": "sync", "per": "tensor"}
        made = plan("weightgrad", changes=changes, workers=4)
        slow = tuple(dataclasses.replace(site, lan=LocalNetwork(1e6, 1e-4)) for site in made.sites)
        found[exchange], _ = run(tmp_path, dataclasses.replace(made, sites=slow), workers=4)
    assert torch.equal(found["server"].server.global_model.vector, found["sharded"].server.global_model.vector)
    assert found["sharded"].lan_bytes == found["server"].lan_bytes
    assert sum(s.times.lan for s in found["sharded"].sites) < sum(s.times.lan for s in found["server"].sites)


def test_the_quantized_allreduce_inside_a_site(tmp_path: Path) -> None:
    """Fewer LAN bytes than fp32 in the same ring, and it learns the same."""
    found = {}
    for codec in ("fp32", "qsgd(bits=8, bucket=32)"):
        changes = {"gradients": codec, "exchange": "allreduce"}
        found[codec], _ = run(tmp_path, plan("baseline", changes=changes, workers=4), workers=4)
        assert_one_model(found[codec])
    plain, coded = found.values()
    assert coded.lan_bytes < plain.lan_bytes
    torch.testing.assert_close(coded.server.global_model.vector, plain.server.global_model.vector, rtol=0, atol=0.1)


def test_a_site_of_one_worker_trains_as_if_nothing_were_encoded_inside(tmp_path: Path) -> None:
    plain = {"gradients": "fp32", "weights": "fp32"}
    found = [run(tmp_path, plan("weightgrad", changes=changes, workers=1), workers=1)[0] for changes in ({}, plain)]
    assert torch.equal(found[0].server.global_model.vector, found[1].server.global_model.vector)
    assert found[0].evaluator.quantized_model() is None
    assert found[0].lan_bytes == 0
