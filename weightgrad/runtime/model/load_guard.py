"""Notices `model.load_state_dict` while a site trains.

Other weights would reach nobody: where gradients are shared, this replica would differ from all others for good; where
updates are, the difference would be taken for an update of this site, and be sent. Weights that are loaded to be looked
at and put back before the next step, as those of an EMA, do no harm.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weightgrad.errors import StrategyError
from weightgrad.runtime.model.frozen_parameters import value_digest
from weightgrad.runtime.model.named_parameter import NamedParameter


class LoadGuard:
    """Watches what is loaded into the shared parameters of a model.

    Args:
        model: The user's model.
        shared: Its parameters that take part.
    """

    def __init__(self, model: nn.Module, shared: Sequence[NamedParameter]) -> None:
        self._shared = shared
        self._ours = {id(one.parameter) for one in shared}
        self._before: list[int] | None = None  # what the parameters were before others were loaded
        self._handles = [
            module.register_load_state_dict_pre_hook(_ModuleHook(module, self))
            for module in model.modules()
            if next(module.parameters(recurse=False), None) is not None
            and not isinstance(module, torch.jit.ScriptModule)  # these take no such hook
        ]

    def loads(self, module: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
        """A module is about to load its own parameters."""
        for name, parameter in module.named_parameters(recurse=False):
            new = state.get(prefix + name)
            watched = id(parameter) in self._ours and self._before is None
            if watched and isinstance(new, Tensor) and not _same(parameter.detach(), new.detach()):
                self._before = self._digests()

    def check(self) -> None:
        """Before a step, and before leaving: see whether the weights are still those that training has made.

        Raises:
            StrategyError: Others were loaded.
        """
        before, self._before = self._before, None
        if before is not None and before != self._digests():
            raise StrategyError(
                "load_state_dict() after prepare() has given the model other weights than training has, and the other "
                "sites would never see them. Load weights before prepare(), at the site that starts first: they become "
                "the global model. To end with weights of an earlier moment, call leave() first, and then load them. "
                "To look at other weights, put the own ones back before the next step or leave(), or use a copy"
            )

    def remove(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()

    def _digests(self) -> list[int]:
        return [value_digest(one.parameter) for one in self._shared]


class _ModuleHook:
    """The hook on one module. It is pickled and copied with it, and watches no copy."""

    def __init__(self, module: nn.Module | None = None, guard: LoadGuard | None = None) -> None:
        self._module, self._guard = None if module is None else weakref.ref(module), guard

    def __reduce__(self) -> tuple[type[_ModuleHook], tuple[()]]:
        return _ModuleHook, ()

    def __call__(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """Called by torch before the module loads its parameters."""
        if self._guard is not None and self._module is not None and self._module() is module:
            self._guard.loads(module, state, prefix)


def _same(present: Tensor, new: Tensor) -> bool:
    try:
        return bool(torch.equal(present, new.to(present.device, present.dtype)))
    except RuntimeError:  # one of them is sharded
        return False
