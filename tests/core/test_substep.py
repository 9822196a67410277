"""n serial steps that are one mean step, against the algebra and against the optimizers themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from weightgrad.core.optimizers.substep import MATCHED, Substep
from weightgrad.errors import StrategyError

DOUBLE = torch.float64


def sgd(**options: Any) -> tuple[Tensor, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.zeros((), dtype=DOUBLE))
    return weight, torch.optim.SGD([weight], **options)


def walk(steps: int, gradients: list[float], n: int, **options: Any) -> list[float]:
    """Where the weight is after each step of n matched substeps; the gradients of the steps that follow are 0."""
    weight, optimizer = sgd(**options)
    seen = []
    for step in range(steps):
        for _ in range(n):
            weight.grad = torch.tensor(gradients[step] if step < len(gradients) else 0.0, dtype=DOUBLE)
            with Substep.of(MATCHED, n).within(optimizer):
                optimizer.step()
        seen.append(weight.item())
    return seen


def test_the_figures_for_four_workers() -> None:
    options = Substep.of(MATCHED, 4).options({"lr": 1.0, "momentum": 0.9})
    assert options["momentum"] == pytest.approx(0.974, abs=5e-4)
    assert options["lr"] == pytest.approx(0.065, abs=5e-4)


@settings(max_examples=50)
@given(n=st.integers(1, 16), momentum=st.floats(0, 0.99), lr=st.floats(1e-4, 10))
def test_memory_decays_as_fast_and_a_constant_gradient_moves_as_far(n: int, momentum: float, lr: float) -> None:
    changed = {"lr": lr, "momentum": momentum} | Substep.of(MATCHED, n).options({"lr": lr, "momentum": momentum})
    assert changed["momentum"] ** n == pytest.approx(momentum)
    in_the_end = n * changed["lr"] / (1 - changed["momentum"])
    assert in_the_end == pytest.approx(lr / (1 - momentum))


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}], ids=str)
@pytest.mark.parametrize("n", [2, 4, 7])
def test_sgd_at_a_constant_gradient_moves_as_far_a_step(n: int, options: dict[str, Any]) -> None:
    for places in (walk(300, [1.0] * 300, n, lr=0.1, **options), walk(300, [1.0] * 300, 1, lr=0.1, **options)):
        assert places[-1] - places[-2] == pytest.approx(-0.1 / (1 - options.get("momentum", 0.0)), rel=1e-6)


@pytest.mark.parametrize("n", [2, 4, 7])
def test_one_gradient_moves_as_far_in_the_end_and_is_forgotten_as_fast(n: int) -> None:
    serial, mean = (walk(400, [1.0], count, lr=0.1, momentum=0.9) for count in (n, 1))
    assert serial[-1] == pytest.approx(mean[-1], rel=1e-6)
    for places in (serial, mean):
        assert (places[7] - places[6]) / (places[6] - places[5]) == pytest.approx(0.9, rel=1e-6)


@pytest.mark.parametrize("n", [2, 4])
def test_adam_at_a_constant_gradient_is_where_one_step_would_be(n: int) -> None:
    """Its bias correction sees beta^(1/n) after n times as many steps, which is the same."""
    ends = []
    for count in (n, 1):
        weight = nn.Parameter(torch.zeros(3, dtype=DOUBLE))
        adam = torch.optim.Adam([weight], lr=0.1, betas=(0.9, 0.99))
        for _ in range(5 * count):
            weight.grad = torch.tensor([1.0, -2.0, 0.5], dtype=DOUBLE)
            with Substep.of(MATCHED, count).within(adam):
                adam.step()
        ends.append(weight.detach().clone())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-6)


def test_an_optimizer_gets_its_own_options_back() -> None:
    _, optimizer = sgd(lr=0.1, momentum=0.9)
    with Substep(scale=0.5, matched=4).within(optimizer):
        assert optimizer.param_groups[0]["momentum"] > 0.9
        assert optimizer.param_groups[0]["lr"] < 0.05
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.1, 0.9)


def test_a_number_scales_the_rate_alone_and_none_is_a_share() -> None:
    group = {"lr": 2.0, "momentum": 0.9}
    assert Substep.of(0.25, 4).options(group) == {"lr": 0.5}
    assert Substep.of(None, 4).options(group) == {"lr": 0.5}
    assert Substep.of(MATCHED, 1).options(group) == {}
    with pytest.raises(StrategyError, match="matched"):
        Substep(matched=0)
