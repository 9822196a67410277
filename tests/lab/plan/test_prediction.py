"""Predictions against the simulator: time within 10 %, bytes within 2 %."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from weightgrad.core import strategies
from weightgrad.core.layout import Layout
from weightgrad.lab.plan.data_range import range_of
from weightgrad.lab.plan.decision import auto_decision
from weightgrad.lab.plan.prediction import crossover_bit_s, predict, steps_to_play
from weightgrad.lab.plan.scenario import Scenario, of_recipe
from weightgrad.lab.plan.stand_in import Gradients, StandIn, shrunk
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.simulation import fitted_strategy, simulate
from weightgrad.lab.run.task import Training
from weightgrad.lab.sim.compute import Compute
from weightgrad.lab.sim.local_network import LocalNetwork

LAPTOP = Path(__file__).parents[3] / "recipes" / "laptop.yaml"
SMALL = 1 << 15  # elements of a stand-in: the model has 105,226


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return Recipe.load(LAPTOP).with_settings(["training.steps=40", "training.evaluate_every=1000"])


@pytest.fixture(scope="module")
def scenario(recipe: Recipe) -> Scenario:
    return of_recipe(recipe, Training(recipe).layout, {})


@pytest.mark.parametrize("name", ["baseline", "qsgd", "ahead", "diloco", "streaming"])
def test_time_and_bytes_are_the_simulators(name: str, recipe: Recipe, scenario: Scenario, tmp_path: Path) -> None:
    run = simulate(recipe.with_settings([f"strategy={name}"]), tmp_path)
    found = predict(scenario, strategies.find(name))
    assert found.seconds == pytest.approx(run["virtual_seconds"], rel=0.10)
    assert found.wan_bytes == pytest.approx(run["wan_bytes"], rel=0.02)


@pytest.mark.parametrize("name", ["adaptive", "auto", "gaia", "weightgrad", "weightgrad-paper", "sparseloco"])
def test_what_depends_on_the_data_lies_in_the_range(
    name: str, recipe: Recipe, scenario: Scenario, tmp_path: Path
) -> None:
    run = simulate(recipe.with_settings([f"strategy={name}"]), tmp_path)
    strategy = strategies.find(name)
    found = range_of(scenario, strategy, predict(scenario, strategy))
    assert found is not None
    assert found.wan_bytes[0] <= run["wan_bytes"] <= found.wan_bytes[1]
    assert found.seconds[0] <= run["virtual_seconds"] <= found.seconds[1]


def test_bytes_that_do_not_depend_on_the_data_have_no_range(scenario: Scenario) -> None:
    strategy = strategies.find("qsgd")
    assert range_of(scenario, strategy, predict(scenario, strategy)) is None


def test_auto_has_its_parts_for_the_optimizer(recipe: Recipe) -> None:
    own = recipe.with_settings(["training.optimizer.name=adamw", "training.optimizer.momentum=0"])
    found = of_recipe(own, Training(own).layout, {}).fitted(strategies.find("auto"))
    assert found == fitted_strategy(own.with_settings(["strategy=auto"]), Training(own).layout.numel)
    assert "codebook" in found.up


@pytest.mark.parametrize("name", ["baseline", "terngrad", "powersgd", "diloco", "streaming", "weightgrad", "auto"])
def test_a_small_stand_in_says_what_the_whole_model_says(name: str, scenario: Scenario) -> None:
    whole = predict(scenario, strategies.find(name))
    small = predict(scenario, strategies.find(name), elements=SMALL)
    assert small.seconds == pytest.approx(whole.seconds, rel=0.10)
    assert small.wan_bytes == pytest.approx(whole.wan_bytes, rel=0.03)


def test_more_steps_take_longer_and_send_more(recipe: Recipe) -> None:
    layout = Training(recipe).layout
    short, long = (of_recipe(recipe.with_settings([f"training.steps={steps}"]), layout, {}) for steps in (3000, 6000))
    one, other = (predict(own, strategies.find("diloco")) for own in (short, long))
    assert other.seconds == pytest.approx(2 * one.seconds, rel=0.02)
    assert other.wan_bytes == pytest.approx(2 * one.wan_bytes, rel=0.02)


def test_a_wait_is_what_is_not_hidden(scenario: Scenario) -> None:
    baseline, auto = (predict(scenario, strategies.find(name)) for name in ("baseline", "auto"))
    assert all(link.hidden == pytest.approx(0, abs=0.05) for link in baseline.links)
    assert all(link.hidden > 0.9 for link in auto.links)
    for link in baseline.links:
        assert baseline.step_seconds == pytest.approx(baseline.compute_seconds + link.waiting_seconds, rel=0.05)


def test_warm_starts_are_played_through() -> None:
    assert steps_to_play(strategies.find("dgc")) >= 400
    assert steps_to_play(strategies.find("diloco", {"every": 500})) >= 2000
    assert steps_to_play(strategies.find("baseline")) < 100


def test_a_site_that_a_run_would_lose_is_named_and_waited_for(scenario: Scenario) -> None:
    slow = replace(scenario, links=(replace(scenario.links[0], bandwidth_bit_s=1e3), *scenario.links[1:]))
    found = predict(slow, strategies.find("baseline"))
    assert found.lost == ("virginia",)
    push = 8 * 4 * slow.layout.numel / 1e3
    assert found.step_seconds == pytest.approx(2 * push, rel=0.02)
    assert predict(scenario, strategies.find("baseline")).lost == ()


def test_nothing_encoded_has_no_crossover(scenario: Scenario) -> None:
    baseline, qsgd = strategies.find("baseline"), strategies.find("qsgd")
    assert crossover_bit_s(scenario, baseline, predict(scenario, baseline)) is None
    above = crossover_bit_s(scenario, qsgd, predict(scenario, qsgd))
    assert above is not None
    assert 1e9 < above < 1e12


def test_the_decision_of_auto_is_that_of_a_run(scenario: Scenario) -> None:
    found = predict(scenario, strategies.find("auto"))
    assert found.schedule is not None
    decision = auto_decision(scenario, found.compute_seconds)
    assert decision.schedule.every == found.schedule["every"]
    assert decision.schedule.up == found.schedule["up"]
    assert "s on the slowest link" in decision.why


@pytest.mark.parametrize("name", ["qsgd", "weightgrad", "auto"])
def test_many_ranks_that_share_a_model_are_those_that_are_played(name: str, scenario: Scenario) -> None:
    """Sixty-four ranks of a small stand-in would hold a handful of elements each, and of every piece one is sent."""
    fast = LocalNetwork(100e9, 2e-5)
    sites = tuple(replace(site, workers=64, sharded=True, lan=fast, compute=Compute(0.5)) for site in scenario.sites)
    layout = Layout.of_shapes((f"layer{number}", (512, 1024)) for number in range(16))
    own = replace(scenario, sites=sites, layout=layout, batch=192)
    one, other = (predict(own, strategies.find(name), elements=elements) for elements in (1 << 15, 1 << 18))
    assert one.wan_bytes == pytest.approx(other.wan_bytes, rel=0.03)
    assert one.seconds == pytest.approx(other.seconds, rel=0.10)


def test_the_lan_of_the_ranks_that_are_played_is_that_of_all(scenario: Scenario) -> None:
    site = replace(scenario.sites[0], workers=64, sharded=True, lan=LocalNetwork(100e9, 2e-5), compute=Compute(0.5))
    layout = Layout.of_shapes([("weight", (4096, 4096))])
    small = shrunk(layout, per_tensor=False)
    stand_in = StandIn(layout, small, strategies.find("baseline"))
    (played,) = stand_in.plan(replace(scenario, sites=(site,)).plan(strategies.find("baseline"), 1)).sites
    assert played.workers == 4
    whole = site.lan.allreduce(64, 4 * layout.numel)
    assert played.lan.allreduce(played.workers, 4 * small.numel) == pytest.approx(whole)


def test_what_a_site_quantizes_is_exempt_in_the_stand_in_as_in_the_model(scenario: Scenario) -> None:
    """The first and the last matrix and all vectors are not: a stand-in without shapes would be all vectors."""
    shapes = [
        ("first", (64, 75)),
        *((f"{n}.{kind}", shape) for n in range(20) for kind, shape in (("w", (256, 256)), ("b", (256,)))),
    ]
    layout = Layout.of_shapes([*shapes, ("last", (10, 256))])
    small = shrunk(layout, per_tensor=False, elements=1 << 15)
    ratio = layout.numel / small.numel
    vectors = sum(slot.numel for slot in small.slots if len(slot.shape) < 2)
    assert vectors * ratio == pytest.approx(20 * 256, rel=0.1)
    matrices = [slot for slot in small.slots if len(slot.shape) == 2]
    assert [matrices[0].numel * ratio, matrices[-1].numel * ratio] == pytest.approx([64 * 75, 10 * 256], rel=0.15)
    own = replace(scenario, layout=layout)
    strategy = strategies.find("weightgrad")
    one, other = (predict(own, strategy, elements=elements) for elements in (1 << 16, 1 << 21))
    assert one.lan_bytes == pytest.approx(other.lan_bytes, rel=0.05)
    assert one.compute_seconds == pytest.approx(other.compute_seconds, rel=0.05)


def test_auto_has_a_range_because_it_looks_at_signs(scenario: Scenario) -> None:
    found = predict(scenario, strategies.find("auto"))
    within = range_of(scenario, strategies.find("auto"), found)
    assert within is not None
    assert within.wan_bytes[0] <= found.wan_bytes <= within.wan_bytes[1]


def test_small_weights_make_more_of_adams_steps_significant(scenario: Scenario) -> None:
    """Adam's steps are as large whatever the gradients are: what gaia sends depends on the weights."""
    own = replace(scenario, optimizer=("adamw", {"lr": 1e-3}), rate=lambda step: 1e-4)
    gaia = strategies.find("gaia")
    small, usual, large = (
        predict(own, gaia, elements=1 << 13, gradients=Gradients(weights=weights)).wan_bytes for weights in (0.1, 1, 10)
    )
    assert small > 1.02 * usual
    assert usual > 1.02 * large
