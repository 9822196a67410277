"""Memory that simulated sites share or give back: the same bits with and without, and really given back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weightgrad import event_log
from weightgrad.event_log import EventLog
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.simulation import simulate, simulation_plan
from weightgrad.lab.run.task import Training
from weightgrad.lab.sim import step_memory
from weightgrad.lab.sim.simulator import Simulator

ROOT = Path(__file__).parents[3]
LAPTOP = Recipe.load(ROOT / "recipes" / "laptop.yaml").with_settings(["training.steps=16", "training.evaluate_every=8"])
STRATEGIES = ("baseline", "auto", "gaia", "streaming")
FAULTS = (
    "faults=[{at: 0.2 s, kill: ohio, for: 0.3 s}, {at: 0.3 s, cut: [ohio, virginia], for: 0.4 s}]",
    "faults=[{at: 0.2 s, kill: virginia, for: 0.5 s}]",
)


def small(*settings: str) -> Recipe:
    return LAPTOP.with_settings(settings)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sharing_memory_changes_no_bit(strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small(f"strategy={strategy}")
    simulate(recipe, tmp_path / "kept")
    monkeypatch.setattr(step_memory, "LARGE_BYTES", 0)
    simulate(recipe, tmp_path / "shared")
    for name in ("model.safetensors", "events.jsonl", "summary.json"):
        assert (tmp_path / "kept" / name).read_bytes() == (tmp_path / "shared" / name).read_bytes(), name


@pytest.mark.parametrize("faults", FAULTS)
def test_sharing_memory_changes_no_bit_under_faults(
    faults: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small("strategy=weightgrad", faults)
    simulate(recipe, tmp_path / "kept")
    monkeypatch.setattr(step_memory, "LARGE_BYTES", 0)
    simulate(recipe, tmp_path / "shared")
    logs = [event_log.read(tmp_path / name / "events.jsonl") for name in ("kept", "shared")]
    assert logs[0] == logs[1]
    assert any(line["kind"] == "fault" for line in logs[0])


def test_sites_read_the_servers_model_and_have_no_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_memory, "LARGE_BYTES", 0)
    recipe = small("strategy=diloco", "strategy.every=5")
    task = Training(recipe)
    with EventLog(tmp_path / "events.jsonl") as events:
        simulator = Simulator(simulation_plan(recipe, task), task, events)
        simulator.run()
    model = simulator.server.global_model.vector
    for site in simulator.sites:
        assert site.state.global_model().data_ptr() == model.data_ptr()
        assert site.local is not None
        assert site.local.gradient.untyped_storage().nbytes() == 0
    before = [site.state.global_model().clone() for site in simulator.sites]
    assert simulator.server.global_model.before_move is not None
    simulator.server.global_model.before_move()  # the server is about to move
    model.zero_()
    for site, kept in zip(simulator.sites, before, strict=True):
        assert torch.equal(site.state.global_model(), kept)


def test_a_run_forgets_its_sites_before_it_writes_the_model(tmp_path: Path) -> None:
    recipe = small("strategy=weightgrad")
    task = Training(recipe)
    with EventLog(tmp_path / "events.jsonl") as events:
        simulator = Simulator(simulation_plan(recipe, task), task, events)
        simulator.run()
        accuracy = simulator.evaluate().accuracy
        simulator.forget_sites()
        assert not simulator.sites
        assert simulator.evaluate().accuracy == accuracy


def test_initial_weights_are_the_same_whatever_the_module_did() -> None:
    task = Training(small())
    first = task.initial()
    next(task.gradients(0, first.clone(), 0))
    with torch.no_grad():
        for parameter in task.module.parameters():
            parameter.add_(1)
    assert torch.equal(task.initial(), first)
