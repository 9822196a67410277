"""Which optimizer the replicas of the global model step with, and whether a site's own is that one.

Where updates are shared, only the name of an optimizer is kept. Where gradients are, all sites must step alike, and the
server steps with them unless it cannot make the optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weightgrad.core.layout import Layout
from weightgrad.core.optimizers import is_linear
from weightgrad.core.optimizers.spec import AT_SITES, OptimizerSpec
from weightgrad.core.strategies import Strategy
from weightgrad.errors import RefusedError, StrategyError
from weightgrad.runtime.admission_messages import APART, AdmissionRequest

log = logging.getLogger("weightgrad.serve")


class OptimizerAdmission:
    """Looks at the optimizers with which sites come.

    Args:
        on_refused: called with a fixed phrase for every refusal.
    """

    def __init__(self, on_refused: Callable[[str], None]) -> None:
        self._on_refused = on_refused

    def check(
        self,
        request: AdmissionRequest,
        layout: Layout,
        known: Layout,
        strategy: Strategy,
        agreed: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """The optimizer that replicas step with, as the strategy changes it; only its name where updates are shared.

        Args:
            request: what the site says about itself.
            layout: its parameters, in its own order.
            known: the parameters in the order of the index space.
            strategy: the strategy of the run.
            agreed: the optimizer of the run; None if this site's becomes it.

        Raises:
            RefusedError: the site cannot step with shared gradients, or not as the others do.
        """
        if strategy.shares != "gradients":
            return {"kind": str((request.optimizer or {}).get("kind", ""))}
        spec = self._described(request, layout, known, strategy)
        if agreed is None:
            return spec.dump() | ({AT_SITES: True} if self._only_at_sites(request, known, spec, strategy) else {})
        if found := spec.difference(OptimizerSpec.parse(agreed, build=False)):
            self._on_refused("another optimizer")
            raise RefusedError(
                f"{request.site} has another optimizer: {found}; {strategy.name} shares gradients, so all sites must "
                "step alike, from the first step of the run to the last. To change the optimizer, take a strategy that "
                "shares updates, such as diloco, or begin a run of its own (a server with a new state) from the weights"
            )
        return agreed

    def _described(self, request: AdmissionRequest, layout: Layout, known: Layout, strategy: Strategy) -> OptimizerSpec:
        """The optimizer of a site, with the parameters in the order of the index space."""
        told = request.optimizer or {}
        try:
            if not told.get("groups"):
                raise StrategyError(str(told.get(APART) or "it has described no optimizer"))
            order = {slot.name: index for index, slot in enumerate(known.slots)}
            spec = OptimizerSpec.parse(told, build=False).reordered([order[slot.name] for slot in layout.slots])
            return spec.changed(strategy.optimizer_with)
        except StrategyError as error:
            self._on_refused("another optimizer")
            raise RefusedError(
                f"{strategy.name} shares gradients, with which {request.site} cannot step: {error}. "
                "Take a strategy that shares updates, such as weightgrad or diloco"
            ) from error

    def _only_at_sites(self, request: AdmissionRequest, known: Layout, spec: OptimizerSpec, strategy: Strategy) -> bool:
        """Whether the server cannot make the optimizer, so that the sites step with it and the server does not."""
        try:
            if (request.optimizer or {}).get(AT_SITES):
                raise StrategyError(f"{spec.kind} cannot be described")
            OptimizerSpec.parse(spec.dump()).build(_without_memory(known, spec))
        except StrategyError as error:
            if strategy.needs_weights_at_server:
                self._on_refused("another optimizer")
                raise RefusedError(
                    f"the optimizer of {request.site} cannot be made on the server: {error}; and {strategy.name} needs "
                    "the weights there. Or take a strategy that shares updates, such as weightgrad"
                ) from error
            log.warning(
                "%s: the sites step with the shared gradients, and this server does not. A site that joins late takes "
                "all steps again, as long as the server remembers them; the final model comes from a site",
                error,
            )
            return True
        return False


def is_for_another_optimizer(request: AdmissionRequest, strategy: Strategy) -> bool:
    """Whether the strategy has other parts for the optimizer of this site, and the server's does not have them."""
    kind = str((request.optimizer or {}).get("kind", "sgd"))
    asked = request.strategy or {}
    return bool(asked.get("nonlinear")) and not is_linear(kind) and strategy.controller == asked.get("controller")


def _without_memory(layout: Layout, spec: OptimizerSpec) -> dict[int, nn.Parameter]:
    """Parameters to try an optimizer on: of the right shapes where it looks at shapes, and without memory."""
    shapes = [slot.shape if spec.needs_whole_tensors else (0,) for slot in layout.slots]
    return {
        index: nn.Parameter(torch.empty(1, dtype=torch.float32).expand(shape or (1,)))
        for index, shape in enumerate(shapes)
    }
