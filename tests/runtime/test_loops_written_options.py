"""Optimizers that write among their own options in `step()`: counters, estimates, lists that fill up."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from weightgrad.core.optimizers import spec as optimizer_spec
from weightgrad.core.optimizers.options import UserOptions, numbers_of, put_numbers
from weightgrad.runtime.session import Site

from .user_sites import NAMES, STEPS, Meet, backward, flat, network, reference, run_sites


class Counting(Optimizer):
    """A rate that falls with a count among the options, as schedule-free optimizers and Prodigy have it."""

    def __init__(self, params: Any, lr: float = 0.2) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "largest": -1.0, "last": [None, None]})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate = group["lr"] / (1 + group["k"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(rate * parameter.grad)
            group["k"] += 1
            group["largest"] = max(group["largest"], rate)
            group["last"][group["k"] % 2] = rate


class Estimating(Counting):
    """Its list has all its numbers from the beginning, as Prodigy's options have: their count never changes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group["last"] = [0.0, 0.0]


def _cooled(optimizer: Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.2 - 0.01 * step


def loop(make: Callable[[nn.Module], Any], schedule: Callable[[Optimizer, int], None] = lambda *_: None) -> Any:
    def script(site: Site, meet: Meet) -> tuple[Tensor, Any]:
        model = network()
        optimizers = make(model)
        site.prepare(model, optimizers)
        meet()
        several = optimizers if isinstance(optimizers, list) else [optimizers]
        for step in range(STEPS):
            for one in several:
                one.zero_grad()
            backward(model, site.name, step)
            for one in several:
                schedule(one, step)
                one.step()
        site.leave()
        return flat(model), several[0].param_groups[0]

    return script


@pytest.mark.parametrize("kind", [Counting, Estimating])
@pytest.mark.parametrize("schedule", [lambda *_: None, _cooled], ids=["constant", "scheduled"])
def test_what_a_step_writes_is_kept_where_gradients_are_shared(schedule: Any, kind: type[Counting]) -> None:
    """As one optimizer on the mean of the gradients: before, counts were put back after each step."""
    results, _ = run_sites("baseline", loop(lambda model: kind(model.parameters()), schedule))
    model = network()
    optimizer = kind(model.parameters())
    optimizer.register_step_pre_hook(lambda one, *_: schedule(one, one.param_groups[0]["k"]))
    wanted = reference(model, optimizer)
    for vector, group in results.values():
        torch.testing.assert_close(vector, wanted, rtol=1e-5, atol=1e-6)
        assert group["k"] == STEPS
        assert group["last"] == pytest.approx(optimizer.param_groups[0]["last"])
        assert group["lr"] == optimizer.param_groups[0]["lr"]
    assert torch.equal(*(results[name][0] for name in NAMES))


def test_a_server_that_steps_with_it_takes_what_it_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve --optimizer`: it refused the second push, whose count was none that an option of torch's may become."""
    monkeypatch.setattr(optimizer_spec, "_allowed", {"Estimating": Estimating})
    results, global_model = run_sites("baseline", loop(lambda model: Estimating(model.parameters()), _cooled))
    for vector, group in results.values():
        assert torch.equal(vector, global_model), "the server has taken the same steps"
        assert group["k"] == STEPS


def test_so_it_is_with_several_optimizers() -> None:
    def two(model: Any) -> list[Optimizer]:
        return [Counting(model[0].parameters()), SGD(model[2].parameters(), lr=0.2)]

    results, _ = run_sites("baseline", loop(two))
    (vector, group), other = results["east"], results["west"][0]
    assert torch.equal(vector, other)
    assert group["k"] == STEPS
    model: Any = network()
    first, second = two(model)
    first.register_step_post_hook(lambda *_: second.step())
    torch.testing.assert_close(vector, reference(model, first), rtol=1e-5, atol=1e-6)


def test_options_of_a_result_go_and_what_the_step_has_written_stays() -> None:
    optimizer = Counting([nn.Parameter(torch.zeros(2))], lr=0.1)
    (group,) = optimizer.param_groups
    other = Counting([nn.Parameter(torch.zeros(2))], lr=0.1)
    group["lr"], other.param_groups[0]["k"] = torch.tensor(0.1), 7
    last = group["last"]
    own = UserOptions(optimizer)
    put_numbers(optimizer, numbers_of(other))
    group["lr"].fill_(0.5)
    own.placed()
    assert (group["k"], float(group["lr"])) == (7, 0.5)
    before = copy.deepcopy({name: value for name, value in group.items() if name != "params"})
    own.restore()
    assert group["k"] == 0, "the step has not written it"
    assert float(group["lr"]) == pytest.approx(0.1)
    assert group["last"] is last
    put_numbers(optimizer, numbers_of(other))
    own = UserOptions(optimizer)
    put_numbers(optimizer, numbers_of(other))
    own.placed()
    optimizer.step()
    own.restore()
    assert (before["k"], group["k"]) == (7, 8)
    put_numbers(optimizer, numbers_of(other))  # has fewer numbers by now
    assert group["k"] == 8
