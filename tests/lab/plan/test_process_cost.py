"""What the processes of a run cost on this machine, and what a plan makes of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weightgrad.cli import app
from weightgrad.core import strategies
from weightgrad.errors import PlanError
from weightgrad.lab.plan import process_cost, sources
from weightgrad.lab.plan.plan import make_plan
from weightgrad.lab.plan.prices import Prices
from weightgrad.lab.recipes.recipe import Recipe

LAPTOP = Path(__file__).parents[3] / "recipes" / "laptop.yaml"


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return Recipe.load(LAPTOP).with_settings(["training.steps=12", "training.evaluate_every=12"])


def test_a_step_takes_as_much_longer_as_the_processes_of_its_strategy_cost(recipe: Recipe) -> None:
    source = sources.of_recipe(recipe, measure=False)

    def seconds(overheads: dict[str, float] | None, overhead: float = 0.0) -> dict[str, float]:
        chosen = [(name, strategies.find(name)) for name in ("baseline", "diloco")]
        scenario = replace(source.scenario, step_overhead=overhead)
        more = {"times": source.times, "devices": {}, "prices": Prices(), "overheads": overheads}
        plan = make_plan(scenario, source.cost, chosen, **more)  # type: ignore[arg-type]
        return {name: own.prediction.step_seconds for name, own in plan.strategies.items()}

    found = seconds({"baseline": 1.25}, 0.25)
    assert found["baseline"] == seconds(None, 1.25)["baseline"]
    assert found["diloco"] == seconds(None, 0.25)["diloco"]  # the scenario's own
    assert found["baseline"] > seconds(None, 0.25)["baseline"] + 0.9


def test_processes_are_started_and_timed(recipe: Recipe) -> None:
    settings = ["sites.0.workers=1", "sites.1.workers=1", "sites.2.workers=1", "compute.seconds_per_step=0.1"]
    own = recipe.with_settings([*settings, "training.batch=12", "strategy=diloco"])
    said: list[str] = []
    found = process_cost.overheads([("diloco", own)], said.append, kind="modelled")
    assert list(found) == ["diloco"]
    assert math.isfinite(found["diloco"])
    assert found["diloco"] >= 0
    assert said[-1].startswith("diloco: overhead of")


def test_processes_need_a_time_that_they_can_keep(recipe: Recipe) -> None:
    own = recipe.with_settings(["compute.seconds_per_step=calibrate"])
    with pytest.raises(PlanError, match="wanted a time of a step that processes keep"):
        process_cost.overheads([("baseline", own)], lambda line: None)


def test_a_model_without_a_recipe_has_no_processes() -> None:
    given = ["--model", "my_script:build", "--sites", "a=H100", "--link", "ohio-a=1Gbit/s,1ms", "--processes"]
    done = CliRunner().invoke(app, ["plan", *given])
    assert isinstance(done.exception, PlanError)
    assert "--processes starts the processes of a recipe" in str(done.exception)
