"""Steps of optimizers that a site does not know, with several sites in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from weightgrad.core.strategies import find
from weightgrad.errors import StrategyError
from weightgrad.runtime.optimizer.stranger_steps import StrangerSteps


def listener(site: str, model: nn.Module) -> StrangerSteps:
    return StrangerSteps(site, (), model.parameters(), find("diloco"))


def stepping(model: nn.Module) -> torch.optim.Optimizer:
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_only_sites_that_listen_refuse_the_step() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    east, west = listener("east", first), listener("west", second)
    try:
        with pytest.raises(StrategyError, match="site east"):
            stepping(first).step()
        east.remove()
        stepping(first).step()
        with pytest.raises(StrategyError, match="site west"):
            stepping(second).step()
    finally:
        east.remove()
        west.remove()
    stepping(second).step()


def test_a_site_may_enter_and_leave_while_another_thread_is_in_a_step() -> None:
    """torch goes through its table of hooks during a step, and a table that changes meanwhile is an error."""
    model = nn.Linear(2, 2)
    listener("east", model).remove()  # the first site of a process adds the hook
    step = iter(_global_optimizer_pre_hooks.values())
    next(step)
    listener("west", model).remove()
    list(step)
