"""Notices the steps of an optimizer that the site does not know, on parameters that it trains.

An optimizer that is made anew in the middle of training, and not prepared, moves the parameters of this site alone:
no round starts, and nobody else sees its steps. One that keeps an optimizer of the site and steps it (SAM, Lookahead)
is no stranger, as long as it does.

torch has one table of hooks for all optimizers of a process, and goes through it at every step of any of them. A second
site may enter or leave in another thread meanwhile, so two hooks are registered for good, and the sites that listen are
a tuple that is replaced as a whole.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from weightgrad.core.strategies import Strategy
from weightgrad.errors import StrategyError
from weightgrad.runtime.optimizer.user_optimizer import unwrap_optimizer

_lock = threading.Lock()
_listening: tuple[StrangerSteps, ...] = ()
_registered = False


def _listen(one: StrangerSteps) -> None:
    global _listening, _registered
    with _lock:
        _listening = (*_listening, one)
        if not _registered:
            register_optimizer_step_pre_hook(torch.compiler.disable(_before_any_step))
            register_optimizer_step_post_hook(torch.compiler.disable(_after_any_step))
            _registered = True


def _listen_no_more(one: StrangerSteps) -> None:
    global _listening
    with _lock:
        _listening = tuple(other for other in _listening if other is not one)


def _before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Called by torch before a step of any optimizer of the process."""
    for one in _listening:
        one.before_step(optimizer)


def _after_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Called by torch after a step of any optimizer of the process."""
    for one in _listening:
        one.after_step(optimizer)


class StrangerSteps:
    """Listens to all optimizers of the process.

    Args:
        site: The name of the site, for errors.
        known: The optimizers that the site listens to.
        parameters: What no other optimizer may step.
        strategy: The strategy of the run.
    """

    def __init__(
        self, site: str, known: Sequence[Optimizer], parameters: Iterable[nn.Parameter], strategy: Strategy
    ) -> None:
        self._site = site
        self._first = (
            f"take a strategy that shares updates, such as diloco: {strategy.name} shares gradients, and all sites "
            "keep the optimizer with which the run began. Then "
            if strategy.shares == "gradients"
            else ""
        )
        self._known = {id(one) for one in known}
        self._parameters = {id(one) for one in parameters}
        self._steps = 0  # of the optimizers that the site listens to
        self._around: list[tuple[Optimizer, int]] = []  # those that step now and keep one of them; its steps before
        _listen(self)

    def before_step(self, optimizer: Optimizer) -> None:
        """Refuse a step of an optimizer that the site does not know.

        Raises:
            StrategyError: The optimizer steps parameters that the site trains.
        """
        if id(optimizer) in self._known:
            self._steps += 1
            return
        if any(id(one) in self._parameters for group in optimizer.param_groups for one in group["params"]):
            if id(unwrap_optimizer(optimizer)) in self._known:
                self._around = [one for one in self._around if one[0] is not optimizer]  # it may have raised
                self._around.append((optimizer, self._steps))
                return
            raise StrategyError(
                f"{type(optimizer).__name__} steps parameters, and is an optimizer that prepare() was not given: site "
                f"{self._site} trains them, and the other sites would never see its steps. To change the learning rate "
                "or other options, change those of the prepared optimizer; to go on with another optimizer, "
                f"{self._first}leave(), join again, and prepare() the model with it"
            )

    def after_step(self, optimizer: Optimizer) -> None:
        """Refuse a step of an optimizer that keeps one of the site and has not stepped it.

        Raises:
            StrategyError: So it has stepped parameters that the site trains by itself.
        """
        if self._around and self._around[-1][0] is optimizer and self._around.pop()[1] == self._steps:
            inner = type(unwrap_optimizer(optimizer)).__name__
            raise StrategyError(
                f"{type(optimizer).__name__} keeps {inner} and has stepped without it: site {self._site} listens to "
                f"the steps of {inner}, and the other sites would never see this one. Keep no optimizer with the same "
                f"parameters inside {type(optimizer).__name__}"
            )

    def remove(self) -> None:
        """Listen no more."""
        _listen_no_more(self)
