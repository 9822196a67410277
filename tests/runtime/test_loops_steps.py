"""The ways in which people's loops take a step: closures, scalers, clipping, schedulers, compiled and copied models."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from weightgrad.errors import StrategyError
from weightgrad.runtime.session import Site

from .user_sites import NAMES, STEPS, Meet, backward, batch, flat, network, reference, run_sites

UPDATES = "diloco, every: 2"


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.02)


# -- closures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_keyword", [True, False], ids=["keyword", "positional"])
def test_a_closure_is_run_and_then_gradients_are_exchanged(as_keyword: bool) -> None:
    def script(site: Site, meet: Meet) -> tuple[Tensor, list[float]]:
        model, optimizer = _prepared(site)
        meet()
        losses = []
        for step in range(STEPS):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                return backward(model, site.name, step)

            losses.append(float(optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)))
        site.leave()
        return flat(model), losses

    results, global_model = run_sites("baseline", script)
    model = network()
    expected = reference(model, adamw(model))
    for vector, losses in results.values():
        assert torch.equal(vector, global_model)
        assert len(losses) == STEPS, "step() returns what the closure does"
        torch.testing.assert_close(vector, expected, rtol=1e-5, atol=1e-6)


def _prepared(site: Site, make: Callable[[nn.Module], Optimizer] = adamw, **options: Any) -> tuple[Any, Any]:
    model = network()
    return site.prepare(model, make(model), **options)


@pytest.mark.parametrize("strategy", [UPDATES, "auto", "qsgd"])
def test_closures_with_other_strategies(strategy: str) -> None:
    def script(site: Site, meet: Meet) -> nn.Module:
        model, optimizer = _prepared(site)
        meet()
        for step in range(STEPS):
            optimizer.zero_grad()
            optimizer.step(lambda step=step: backward(model, site.name, step))
        assert site.steps == STEPS
        assert isinstance(model, nn.Module)
        return model

    results, global_model = run_sites(strategy, script)
    assert all(torch.equal(flat(model), global_model) for model in results.values())


class Twice(SGD):
    """Calls its closure a second time, as a line search does."""

    def step(self, closure: Any = None) -> Any:
        closure()
        closure()
        return super().step()


class Never(SGD):
    """Takes a closure and forgets it."""

    def step(self, closure: Any = None) -> Any:
        return super().step()


@pytest.mark.parametrize(
    ("kind", "why"), [(Twice, "Twice calls its closure more than once"), (Never, "has not called the closure")]
)
def test_optimizers_that_do_other_things_with_closures(kind: type[SGD], why: str) -> None:
    def script(site: Site, meet: Meet) -> None:
        model, optimizer = _prepared(site, lambda model: kind(model.parameters(), lr=0.1))
        optimizer.step(lambda: backward(model, site.name, 0))

    with pytest.raises(StrategyError, match=why):
        run_sites(UPDATES, script, "east")


def test_lbfgs_is_refused_before_anybody_is_asked() -> None:
    def script(site: Site, meet: Meet) -> None:
        _prepared(site, lambda model: torch.optim.LBFGS(model.parameters()))

    with pytest.raises(StrategyError, match="LBFGS calls its closure many times in a step"):
        run_sites("baseline", script, "east")


# -- GradScaler ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("strategy", ["baseline", UPDATES])
def test_a_scaler_scales_nothing_that_travels_and_skips_its_steps(strategy: str, fused: bool) -> None:
    """The gradients of one step at one site are not finite: that site skips it, and nobody is told of it."""

    def make(model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused)

    def script(site: Site, meet: Meet) -> tuple[Tensor, float, int]:
        model, optimizer = _prepared(site, make)
        meet()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=1000)
        taken = 0
        while taken < STEPS:
            optimizer.zero_grad()
            x, y = batch(site.name, taken)
            scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
            if site.name == "east" and taken == 3 and scaler.get_scale() == 2.0**14:
                next(model.parameters()).grad[0, 0] = float("inf")
            before = site.steps
            scaler.step(optimizer)
            scaler.update()
            taken += site.steps > before
        site.leave()
        return flat(model), scaler.get_scale(), site.steps

    results, global_model = run_sites(strategy, script)
    assert results["east"][1] == 2.0**13, "the scaler has seen the infinity"
    assert results["west"][1] == 2.0**14
    for vector, _, steps in results.values():
        assert steps == STEPS
        assert torch.equal(vector, global_model)
    if strategy == "baseline":
        model = network()
        torch.testing.assert_close(global_model, reference(model, make(model)), rtol=1e-4, atol=1e-5)


def test_a_scaler_after_unscale_and_clipping() -> None:
    def make(model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1, fused=True)

    def script(site: Site, meet: Meet) -> Tensor:
        model, optimizer = _prepared(site, make)
        meet()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model, site.name, step)
            for parameter in model.parameters():
                parameter.grad.mul_(scaler.scale(torch.ones(())))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
        site.leave()
        return flat(model)

    results, global_model = run_sites("baseline", script)
    moved = torch.linalg.vector_norm(global_model - flat(network()))
    assert 0 < moved <= STEPS * 0.1 * 0.05 * 1.001, "each site's gradient had a norm of at most 0.05"
    assert all(torch.equal(vector, global_model) for vector in results.values())


# -- schedules ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["baseline", UPDATES])
def test_one_cycle(strategy: str) -> None:
    """A schedule of the momentum: where gradients are shared, it travels with them."""

    def script(site: Site, meet: Meet) -> Tensor:
        model, optimizer = _prepared(site)
        meet()
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS)
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model, site.name, step)
            optimizer.step()
            schedule.step()
        site.leave()
        return flat(model)

    results, global_model = run_sites(strategy, script)
    assert all(torch.equal(vector, global_model) for vector in results.values())


def test_a_warm_up_from_nothing_with_two_rates() -> None:
    """At first both rates are 0, and nobody could tell the ratio of the groups from them."""

    def make(model: nn.Module) -> tuple[Optimizer, Any]:
        first, _, last = model.children()
        groups: list[dict[str, Any]] = [{"params": first.parameters()}, {"params": last.parameters(), "lr": 0.01}]
        optimizer = SGD(groups, lr=0.1)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))

    def script(site: Site, meet: Meet) -> Tensor:
        model = network()
        optimizer, schedule = make(model)
        site.prepare(model, optimizer)
        meet()
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model, site.name, step)
            optimizer.step()
            schedule.step()
        site.leave()
        return flat(model)

    results, global_model = run_sites("baseline", script)
    assert all(torch.equal(vector, global_model) for vector in results.values())
    moved = (global_model - flat(network())).abs()
    assert moved[:96].mean() > 3 * moved[112:].mean() > 0


# -- models that are compiled, copied, saved ------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_torch_compile_before_and_after_prepare(when: str) -> None:
    def script(site: Site, meet: Meet) -> Tensor:
        model = network()
        optimizer = adamw(model)
        trained: Any = torch.compile(model, backend="eager") if when == "before" else model
        site.prepare(trained, optimizer)
        meet()
        trained = torch.compile(model, backend="eager") if when == "after" else trained
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(trained, site.name, step)
            optimizer.step()
        site.leave()
        return flat(model)

    results, global_model = run_sites("baseline", script)
    assert all(torch.equal(vector, global_model) for vector in results.values())


def test_an_ema_a_pickled_model_and_gradients_after_the_step() -> None:
    """What people do beside a step: an averaged copy, `torch.save` of the model, and the norm of the gradient."""

    def script(site: Site, meet: Meet) -> tuple[Tensor, Tensor, float, int]:
        model, optimizer = _prepared(site)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        meet()
        norms = 0.0
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model, site.name, step)
            optimizer.step()
            norms += float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
            averaged.update_parameters(model)
        own = copy.deepcopy(model.state_dict())
        model.load_state_dict(averaged.module.state_dict())  # to evaluate the average
        model.load_state_dict(own)
        backward(model, site.name, 0)
        optimizer.step()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        loaded.load_state_dict(averaged.module.state_dict())  # a copy may be loaded with anything
        copied = flat(copy.deepcopy(model))
        layer = io.BytesIO()
        torch.save(model[2].state_dict(), layer)
        assert torch.equal(copied, flat(model))
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
        site.leave()
        return flat(model), flat(averaged.module), norms, len(layer.getvalue())

    results, global_model = run_sites("baseline", script)
    (east, average, norms, size), west = results["east"], results["west"]
    assert torch.equal(east, global_model)
    assert torch.equal(average, west[1])
    assert not torch.equal(average, east)
    assert norms > 0
    assert norms == west[2], "what is left in .grad is the shared gradient"
    assert size < 4000
    assert set(results) == set(NAMES)


SCHEDULED: dict[str, Any] = {
    "momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "betas": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "one group alone": lambda model: torch.optim.Adam(
        [{"params": model[0].parameters(), "lr": 0.03}, {"params": model[2].parameters()}], lr=0.01
    ),
}


def _change(optimizer: Optimizer, step: int) -> None:
    """A schedule of one's own: momentum or betas, weight decay, and the rate of the last group."""
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.01 * step
        if "momentum" in group:
            group["momentum"] = 0.9 - 0.05 * step
        else:
            group["betas"] = (0.9 - 0.05 * step, 0.99)
    if len(optimizer.param_groups) > 1:
        optimizer.param_groups[-1]["lr"] = 0.01 / (1 + step)


@pytest.mark.parametrize("kind", SCHEDULED)
def test_options_that_change_travel_with_shared_gradients(kind: str) -> None:
    """As plain PyTorch with the same schedule, and the same bits at both sites and at the server."""

    def script(site: Site, meet: Meet) -> Tensor:
        model = network()
        site.prepare(model, optimizer := SCHEDULED[kind](model))
        meet()
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model, site.name, step)
            _change(optimizer, step)
            kept = [dict(group) for group in optimizer.param_groups]
            optimizer.step()
            for group, before in zip(optimizer.param_groups, kept, strict=True):
                assert {k: v for k, v in group.items() if k != "params"} == {
                    k: v for k, v in before.items() if k != "params"
                }
        site.leave()
        return flat(model)

    results, global_model = run_sites("baseline", script)
    assert all(torch.equal(vector, global_model) for vector in results.values())
    model = network()
    optimizer = SCHEDULED[kind](model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for name in ("east", "west"):
            backward(model, name, step)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2
        _change(optimizer, step)
        optimizer.step()
    torch.testing.assert_close(global_model, flat(model), rtol=1e-4, atol=1e-5)
