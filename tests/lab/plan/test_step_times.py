"""How a step's time is shared among phases and layers, whatever it is known from."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from weightgrad.lab.plan import step_times
from weightgrad.lab.plan.devices import DEVICES
from weightgrad.lab.plan.model_cost import ModelCost, cost_of
from weightgrad.lab.plan.trained_module import phase_seconds

SGD = ("sgd", {"lr": 0.1, "momentum": 0.9})


@pytest.fixture(scope="module")
def cost() -> ModelCost:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    return cost_of(build, SGD, inputs=lambda: torch.zeros(4, 64))


def _summed(cost: ModelCost, times: step_times.StepTimes) -> dict[str, float]:
    own = [times.of_layer(cost, layer) for layer in cost.layers]
    return {phase: sum(each[phase] for each in own) for phase in times.phases}


def test_layers_add_up_to_the_step(cost: ModelCost) -> None:
    phases = {"forward": 1.0, "backward": 3.0, "optimizer": 0.5}
    for times in (
        step_times.of_device(cost, "H100", DEVICES["H100"], 1),
        step_times.of_recipe(cost, 0.01, "as the recipe says"),
        step_times.measured(cost, phases),
    ):
        assert _summed(cost, times) == pytest.approx(dict(times.phases))
        assert times.seconds == pytest.approx(sum(times.phases.values()))


def test_a_recipes_time_is_that_of_forward_and_backward(cost: ModelCost) -> None:
    times = step_times.of_recipe(cost, 0.01, "as the recipe says")
    assert list(times.phases) == ["forward", "backward"]
    assert times.seconds == pytest.approx(0.01)
    assert times.phases["backward"] > times.phases["forward"]


def test_a_shard_is_optimized_in_its_share_of_the_time(cost: ModelCost) -> None:
    whole, eighth = (step_times.of_device(cost, "H100", DEVICES["H100"], shards).phases for shards in (1, 8))
    assert eighth["optimizer"] == pytest.approx(whole["optimizer"] / 8)
    assert (eighth["forward"], eighth["backward"]) == (whole["forward"], whole["backward"])


def test_a_real_step_is_timed_by_phase_and_without_making_the_model() -> None:
    class Slow(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            time.sleep(0.3)

    found = phase_seconds(Slow, SGD, inputs=lambda: torch.zeros(2, 4))
    assert list(found) == ["forward", "backward", "optimizer"]
    assert min(found.values()) > 0
    assert sum(found.values()) < 0.3
