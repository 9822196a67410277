"""Models that are given to `prepare` one after the other, by name.

The global server is told one model, with all parameters of the site. So calls with names only collect, and the site
enters the run when the first of the models computes, before it has computed anything: the weights that it computes
with are those of the global model. `Site.enter` does it earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weightgrad.errors import StrategyError
from weightgrad.runtime.optimizer.user_optimizer import unwrap_optimizer


class NamedCalls:
    """What several calls of `prepare` have given.

    Args:
        enter: Enters the run with all of them.
    """

    def __init__(self, enter: Callable[[], None]) -> None:
        self._enter = enter
        self._models: dict[str, nn.Module] = {}
        self._optimizers: dict[str, Any] = {}
        self._options: dict[str, Any] = {}
        self._given: dict[str, str] = {}  # by option: the name of the model with which it was given
        self._handles: list[Any] = []

    def add(self, name: str, model: Any, optimizer: Any, options: dict[str, Any]) -> None:
        """Add a model.

        Args:
            name: Its name.
            model: The model, a module.
            optimizer: Its optimizer.
            options: The other arguments that are not the default.

        Raises:
            StrategyError: There is one of this name, or an argument contradicts that of another call.
        """
        if name in self._models:
            raise StrategyError(f"prepare() was given a model named {name!r} twice; give each model a name of its own")
        if not isinstance(model, nn.Module):
            raise StrategyError(f"prepare(name={name!r}) was given {type(model).__name__}; wanted one torch.nn.Module")
        stepping = unwrap_optimizer(optimizer)
        for key, value in options.items():
            if key in self._options and self._options[key] != value:
                raise StrategyError(
                    f"prepare(name={name!r}) has {key}={value!r}, and that of {self._given[key]!r} has "
                    f"{key}={self._options[key]!r}; a site has one of it for all of its models"
                )
            self._options[key] = value
            self._given.setdefault(key, name)
        self._models[name], self._optimizers[name] = model, optimizer
        compiled = [one for one in model.modules() if type(one).__name__ == "OptimizedModule"]
        for module in compiled or model.modules():
            self._handles.append(module.register_forward_pre_hook(_Entering(torch.compiler.disable(self._enter))))
        self._handles.append(stepping.register_step_pre_hook(self._before_step))

    def take(self) -> tuple[dict[str, nn.Module], dict[str, Any], dict[str, Any]]:
        """All models and optimizers by name, and the other arguments; nothing is waited for any more."""
        for handle in self._handles:
            handle.remove()
        return self._models, self._optimizers, self._options

    def _before_step(self, *_: Any) -> None:
        raise StrategyError(
            "optimizer.step() before the site has entered the run: with names, it enters when one of the models is "
            "called, and none was. Call site.enter() after the last prepare()"
        )


class _Entering:
    """The hook on one module. It is pickled and copied with it, and does nothing in a copy."""

    def __init__(self, enter: Callable[[], None] | None = None) -> None:
        self._enter = enter

    def __reduce__(self) -> tuple[type[_Entering], tuple[()]]:
        return _Entering, ()

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Called by torch before the module computes."""
        if self._enter is not None:
            self._enter()
