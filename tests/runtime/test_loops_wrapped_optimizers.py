"""Optimizers around other optimizers: the site listens to the one that moves the parameters, wherever it is kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from weightgrad.errors import StrategyError
from weightgrad.runtime.optimizer.user_optimizer import unwrap_optimizer
from weightgrad.runtime.session import Site

from .user_sites import NAMES, STEPS, Meet, backward, flat, network, run_sites

UPDATES = "diloco, every: 2"


class Sam(Optimizer):
    """Sharpness-aware minimization in two steps, as it is mostly written: the inner optimizer takes the second."""

    def __init__(self, params: Any, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.base_optimizer = SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base_optimizer.param_groups

    def _all(self) -> list[nn.Parameter]:
        return [one for group in self.param_groups for one in group["params"]]

    @torch.no_grad()
    def first_step(self) -> None:
        gradients = [one.grad for one in self._all() if one.grad is not None]
        norm = torch.cat([one.flatten() for one in gradients]).norm()
        for parameter, gradient in zip(self._all(), gradients, strict=True):
            self.state[parameter]["before"] = parameter.data.clone()
            parameter.add_(gradient * (0.05 / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter in self._all():
            parameter.data = self.state[parameter]["before"]
        self.base_optimizer.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()


class Lookahead(Optimizer):
    """Every third step is half taken back."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self._slow = [one.detach().clone() for group in inner.param_groups for one in group["params"]]
        self._count = itertools.count(1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)
        if next(self._count) % 3 == 0:
            fast = [one for group in self.param_groups for one in group["params"]]
            with torch.no_grad():
                for slow, parameter in zip(self._slow, fast, strict=True):
                    slow.lerp_(parameter, 0.5)
                    parameter.copy_(slow)


class Forgetful(Lookahead):
    """Keeps an optimizer, and moves the parameters without it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for slow in (one for group in self.param_groups for one in group["params"]):
                slow.sub_(slow.grad, alpha=0.1)


def loop(make: Callable[[nn.Module], Any], one_step: Callable[[Any, Callable[[], object]], object]) -> Any:
    """A script with that optimizer; it returns the weights it ends with."""

    def script(site: Site, meet: Meet) -> Tensor:
        model = network()
        optimizer = make(model)
        assert site.prepare(model, optimizer)[1] is optimizer, "the user's own comes back"
        meet()
        for step in range(STEPS):
            one_step(optimizer, lambda step=step: backward(model, site.name, step))  # type: ignore[misc]
        assert site.steps == STEPS, "a step of both is one step"
        site.leave()
        return flat(model)

    return script


def in_two_steps(optimizer: Sam, gradients: Callable[[], object]) -> None:
    gradients()
    optimizer.first_step()
    gradients()
    optimizer.second_step()


def with_closure(optimizer: Sam, gradients: Callable[[], object]) -> None:
    gradients()
    optimizer.step(gradients)


def ordinary(optimizer: Optimizer, gradients: Callable[[], object]) -> None:
    optimizer.zero_grad()
    gradients()
    optimizer.step()


@pytest.mark.parametrize("one_step", [in_two_steps, with_closure])
@pytest.mark.parametrize("strategy", ["baseline", UPDATES])
def test_sharpness_aware_minimization(strategy: str, one_step: Any) -> None:
    results, global_model = run_sites(strategy, loop(lambda model: Sam(model.parameters()), one_step))
    assert all(torch.equal(found, global_model) for found in results.values())
    if strategy == "baseline":
        assert torch.allclose(global_model, sam_by_hand(), atol=1e-6)


def sam_by_hand() -> Tensor:
    """Each site climbs by its own gradient; the mean of what they find there is one step of SGD."""
    model = network()
    parameters = list(model.parameters())
    for step in range(STEPS):
        before, means = [one.detach().clone() for one in parameters], [torch.zeros_like(one) for one in parameters]
        for name in NAMES:
            optimizer = Sam(parameters)
            backward(model, name, step)
            optimizer.first_step()
            backward(model, name, step)
            for mean, parameter, first in zip(means, parameters, before, strict=True):
                assert parameter.grad is not None
                mean += parameter.grad / len(NAMES)
                parameter.data, parameter.grad = first.clone(), None
        for mean, parameter in zip(means, parameters, strict=True):
            parameter.data -= 0.1 * mean
    return flat(model)


def test_lookahead_is_a_part_of_the_update_where_updates_are_shared() -> None:
    made = loop(lambda model: Lookahead(Adam(model.parameters(), lr=0.02)), ordinary)
    results, global_model = run_sites(UPDATES, made)
    assert all(torch.equal(found, global_model) for found in results.values())


def test_lookahead_is_refused_where_gradients_are_shared() -> None:
    with pytest.raises(StrategyError, match=r"is not what the last optimizer.step\(\) has left.*Lookahead"):
        run_sites("baseline", loop(lambda model: Lookahead(SGD(model.parameters(), lr=0.1)), ordinary), "east")


def test_one_that_does_not_step_what_it_keeps_is_refused() -> None:
    made = loop(lambda model: Forgetful(SGD(model.parameters(), lr=0.1)), ordinary)
    with pytest.raises(StrategyError, match="Forgetful keeps SGD and has stepped without it: site east listens"):
        run_sites(UPDATES, made, "east")


def test_where_an_optimizer_may_be_kept() -> None:
    model = network()
    plain, other = SGD(model.parameters(), lr=0.1), SGD(model[0].parameters(), lr=0.1)
    scheduled = SimpleNamespace(opt=plain, step=plain.step, param_groups=plain.param_groups, factor=2.0)
    assert unwrap_optimizer(scheduled) is plain, "whatever the attribute is called"
    assert unwrap_optimizer(SimpleNamespace(inner=scheduled)) is plain
    partly = Adam(model.parameters())
    partly.helper = other  # type: ignore[attr-defined]
    assert unwrap_optimizer(partly) is partly, "it has more parameters than what it keeps"
    with pytest.raises(StrategyError, match="SimpleNamespace has 2 optimizers; give prepare"):
        unwrap_optimizer(SimpleNamespace(a=plain, b=other))
    with pytest.raises(StrategyError, match=r"NoneType is no torch\.optim\.Optimizer.*by hand"):
        unwrap_optimizer(None)
