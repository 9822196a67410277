"""What training habits of GPUs do to the hooks, as far as a CPU can show it: `docs/gpus.md` lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from tests.runtime import user_sites
from tests.runtime.user_sites import STEPS, Meet
from weightgrad.errors import StrategyError
from weightgrad.runtime.model.named_parameter import trainable
from weightgrad.runtime.session import Site

Maker = Callable[[Iterator[nn.Parameter]], Optimizer]


def _trained(
    strategy: str, make: Maker, compiled: Callable[[Any], Any] = lambda step: step
) -> tuple[Tensor, list[bool]]:
    """Train one site; the global model, and whether each parameter was where it had been, at every step."""

    def script(site: Site, meet: Meet) -> list[bool]:
        model = user_sites.network()
        model, optimizer = site.prepare(model, make(model.parameters()))
        places = [parameter.data_ptr() for parameter in model.parameters()]
        step, same = compiled(optimizer.step), []
        meet()
        for number in range(STEPS):
            user_sites.backward(model, "east", number)
            step()
            optimizer.zero_grad()
            same.append(places == [parameter.data_ptr() for parameter in model.parameters()])
        site.leave()
        assert site.steps == STEPS
        return same

    results, model = user_sites.run_sites(strategy, script, "east")
    return model, results["east"]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch imports it where it compiles an optimizer
@pytest.mark.parametrize("strategy", ["diloco, every: 4", "qsgd"])
def test_a_compiled_optimizer_step_calls_the_hooks_and_weights_stay_where_they_are(strategy: str) -> None:
    def make(parameters: Iterator[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=0.1, momentum=0.9)  # compiled, Adam by itself rounds otherwise

    plain, _ = _trained(strategy, make)
    compiled, same = _trained(strategy, make, lambda step: torch.compile(step, backend="eager"))
    assert torch.equal(plain, compiled)
    assert same == [True] * STEPS  # a captured graph finds them at the same addresses


@pytest.mark.parametrize("strategy", ["diloco, every: 4", "qsgd"])
def test_a_fused_optimizer_is_a_site_like_any_other(strategy: str) -> None:
    def make(parameters: Iterator[nn.Parameter]) -> Optimizer:
        return AdamW(parameters, lr=0.02, fused=True)

    again, _ = _trained(strategy, make)
    fused, same = _trained(strategy, make)
    assert torch.equal(fused, again)
    assert same == [True] * STEPS


def test_float8_parameters_are_refused_with_the_remedy() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(4).to(torch.float8_e4m3fn))
    with pytest.raises(StrategyError, match="bfloat16 or float32"):
        trainable(module)
