"""What is fixed for a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weightgrad.core.optimizers.spec import OptimizerSpec
from weightgrad.core.strategies import Strategy
from weightgrad.errors import StrategyError
from weightgrad.runtime.admission_messages import APART


@dataclass(frozen=True)
class RunConfig:
    """What is fixed for a run: every site is told it and must agree with it.

    Attributes:
        sites: the names of the sites that may join.
        fit: returns the strategy for a model of so many parameters.
        seed: the seed of the run.
        clip_norm: the norm to which gradients are clipped, if they are.
        bit_s: what the recipe says of the bandwidth of each site's link, in bit/s.
        most_rate: the largest learning rate that a site may state, where gradients are shared; None: a million.
        near: whether all sites are on this machine, so that nothing has to be saved on their lines.
    """

    sites: tuple[str, ...]
    fit: Callable[[int], Strategy]
    seed: int
    clip_norm: float | None = None
    bit_s: Mapping[str, float] = field(default_factory=dict)
    most_rate: float | None = None
    near: bool = False

    def strategy_for(self, numel: int, optimizer: Mapping[str, Any] | None) -> Strategy:
        """The strategy of a model of so many parameters, after its choice between rows if there is one to make.

        Args:
            numel: the parameters of the model.
            optimizer: what the first site has told about its optimizer; a recipe's own goes before it.
        """
        strategy = self.fit(numel)
        if not strategy.nonlinear and not strategy.near:
            return strategy
        told = dict(optimizer or {})
        return strategy.with_optimizer(str(told.get("kind") or "SGD"), near=self.near and _can_share_gradients(told))


def _can_share_gradients(optimizer: Mapping[str, Any]) -> bool:
    """Whether replicas of this optimizer can step with shared gradients, at the site and here."""
    try:
        return not optimizer.get(APART) and bool(OptimizerSpec.parse(optimizer).groups)
    except StrategyError:
        return False
