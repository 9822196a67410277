"""What listens to the steps of the user's optimizer, however the user's loop takes them.

torch calls a hook before and one after each `optimizer.step()`. Three things that loops do need more than that:

- `optimizer.step(closure)` (Lightning): the hook runs before the closure, so the closure is wrapped. When the optimizer
  has called it, and before parameters move, gradients are exchanged.
- `GradScaler.step(optimizer)`: torch calls `optimizer.step()` only on ranks whose own gradients are finite, so that the
  others would wait for ever. The optimizer says that it scales by itself (`_step_supports_amp_scaling`); then every
  rank comes here, with `found_inf`, and they agree. Fused optimizers do so anyway, with gradients still scaled.
- a step that must not move anything: a hook cannot prevent a step, but it may replace its arguments, and the optimizer
  is the first of them. It is replaced by a likeness without parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from weightgrad.errors import StrategyError
from weightgrad.runtime.model.host_tensors import on_host
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.runtime.site.named_models import OptimizerSteps
from weightgrad.runtime.site.training import SiteTraining

_MARK = "_weightgrad_step_hooks"  # where an optimizer keeps what listens to it; torch does not pickle it
_SCALES = "_step_supports_amp_scaling"

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class StepHooks:
    """The hooks of one site on one optimizer.

    Args:
        optimizer: The user's optimizer, unwrapped.
        site: The name of the site, for errors.
        training: What is told of each step.
        group: The ranks of the site.
        watches: Called before each step; each raises if the model is not what it was.
        stepped: Called after each step.
        wrapper: What the user has handed over, if that is not the optimizer itself.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        site: str,
        training: SiteTraining | OptimizerSteps,
        group: SiteGroup,
        watches: tuple[Callable[[], None], ...] = (),
        stepped: Callable[[], None] = lambda: None,
        wrapper: Any = None,
    ) -> None:
        self._optimizer, self._site, self._training, self._group = optimizer, site, training, group
        self._watches, self._stepped, self._wrapper = watches, stepped, wrapper
        self.active = True
        """Whether the site has not left."""
        self._broken = False  # something was raised in the middle of a round
        self._moving = False  # the optimizer moves parameters by a gradient that the others have, too
        self._skipped = False  # the scaler has found gradients that are not finite
        self._closure_waits = False  # the optimizer has a closure that it has not called yet
        self._scales_itself = bool(getattr(optimizer, _SCALES, False))
        optimizer.__dict__[_SCALES] = True
        optimizer.__dict__[_MARK] = self
        self._handles = [
            # A compiled step calls them between its graphs, as they are.
            optimizer.register_step_pre_hook(torch.compiler.disable(self._before_step)),
            optimizer.register_step_post_hook(torch.compiler.disable(self._after_step)),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
        ]

    @staticmethod
    def release(optimizer: Optimizer) -> None:
        """Take away the hooks of a site that has left, so that another may listen.

        Raises:
            StrategyError: The site has not left.
        """
        found = optimizer.__dict__.get(_MARK)
        if not isinstance(found, StepHooks):
            return
        if found.active:
            raise StrategyError(
                f"the optimizer is that of site {found._site}, which has not left: prepare() is called once for an "
                "optimizer; call leave() first, also where a notebook's cell is run again"
            )
        for handle in found._handles:
            handle.remove()
        del optimizer.__dict__[_MARK]

    def leave(self) -> None:
        """Listen no more: from now on a step is an error, until another site prepares the optimizer."""
        self.active = False
        if not self._scales_itself:
            self._optimizer.__dict__.pop(_SCALES, None)

    @property
    def interrupted(self) -> bool:
        """Whether a step has ended in the middle, by Ctrl-C perhaps, so that nobody knows what the others have."""
        return self._broken or self._moving

    @on_host()
    def _exchange(self) -> bool:
        """Exchange; whether there is a gradient to step with."""
        with self._unless_it_breaks():
            goes_on = self._training.before_step()
        self._moving = goes_on and self._training.strategy.shares == "gradients"
        return goes_on

    @contextmanager
    def _unless_it_breaks(self) -> Iterator[None]:
        try:
            yield
        except StrategyError:  # a refusal, before anything was done
            raise
        except BaseException:
            self._broken = True
            raise

    # -- before a step ------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Called by torch before each `optimizer.step()`."""
        if self._training.busy:
            return None
        if not self.active:
            raise StrategyError(
                "the site has left; an optimizer.step() after leave() would train alone. To go on in the run, join and "
                "prepare again; to train alone, make another optimizer"
            )
        if self.interrupted:
            raise StrategyError(
                f"a step of site {self._site} has ended in the middle, and what the other sites have of it is not "
                "known: leave(), join again and prepare()"
            )
        for watch in self._watches:
            watch()
        self._skipped = self._scaler_skips(optimizer)
        if self._skipped:
            if hasattr(self._wrapper, "_accelerate_step_called"):
                self._wrapper._accelerate_step_called = False  # so that Accelerate's scheduler skips the step, too
            return (_without_parameters(optimizer), *args[1:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._exchanging(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._exchanging(args[1]), *args[2:]), kwargs
        if self._exchange():
            return None
        return (_without_parameters(optimizer), *args[1:]), kwargs

    def _exchanging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, after which gradients are exchanged."""
        self._closure_waits = True

        def exchanging() -> Any:
            if not self._closure_waits:
                raise StrategyError(
                    f"{type(self._optimizer).__name__} calls its closure more than once in a step, and gradients are "
                    "exchanged once; take an optimizer that needs one gradient for a step, such as AdamW"
                )
            loss = closure()
            self._closure_waits = False
            if not self._exchange():
                for group in self._optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None
            return loss

        return exchanging

    def _scaler_skips(self, optimizer: Optimizer) -> bool:
        """Unscale gradients for a `GradScaler`, if one steps; whether any rank has found that they are not finite."""
        found = getattr(optimizer, "found_inf", None)
        if found is None:
            return False
        scale = optimizer.__dict__.get("grad_scale")
        # Nobody below may unscale again: torch hands the two on to fused kernels, and others refuse them.
        optimizer.__dict__["found_inf"] = optimizer.__dict__["grad_scale"] = None
        with on_host():
            skips = self._group.maximum(int(float(found) > 0))
        if skips:
            return True
        if scale is not None:
            self._unscale(optimizer, torch.as_tensor(scale))
        return False

    def _unscale(self, optimizer: Optimizer, scale: Tensor) -> None:
        inverse = scale.double().reciprocal().float()  # as GradScaler does
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            if parameter.grad is None:
                continue
            if parameter.grad.dtype == torch.float16 and not self._scales_itself:
                raise ValueError("Attempting to unscale FP16 gradients.")  # as GradScaler does
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad * inverse.to(parameter.grad.device)
            else:
                parameter.grad.mul_(inverse.to(parameter.grad.device))

    def _before_load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Called by torch before `optimizer.load_state_dict`."""
        nothing = not state.get("state") and not any(optimizer.state.values())  # as Accelerate loads it
        if self.active and not nothing and self._training.strategy.shares == "gradients":
            raise StrategyError(
                f"optimizer.load_state_dict() after prepare(): {self._training.strategy.name} shares gradients, and "
                "the other replicas have the state that their own steps have made. Give join() a state directory, from "
                "which a site goes on with its optimizer"
            )

    # -- after a step -------------------------------------------------------------------------

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called by torch after each `optimizer.step()`."""
        del args, kwargs
        if self._training.busy or self._skipped or not self.active:
            return
        if self._closure_waits:
            self._closure_waits = False
            raise StrategyError(
                f"{type(optimizer).__name__} has not called the closure that it was given, and has stepped alone"
            )
        self._moving = False
        with on_host(), self._unless_it_breaks():
            self._training.after_step()
            self._stepped()


def _without_parameters(optimizer: Optimizer) -> Optimizer:
    """A likeness of an optimizer that has nothing to step."""
    made: Optimizer = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    made.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    return made
