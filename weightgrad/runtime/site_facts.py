"""What a site tells the server about its model and optimizer."""

from __future__ import annotations

from typing import Any

import xxhash
from torch import Tensor
from torch.optim import Optimizer

from weightgrad.errors import StrategyError
from weightgrad.runtime.bridge import Bridge
from weightgrad.site.described import Described
from weightgrad.wan.strategies import Strategy


def described(optimizer: Optimizer, bridge: Bridge, row: Strategy | None) -> dict[str, Any] | None:
    """The optimizer in words that the other replicas understand, where they step with shared gradients."""
    if row is not None and row.shares != "gradients":
        return None
    try:
        return Described.of(optimizer, bridge.parameters).dump()
    except StrategyError:
        if row is None:
            return None
        raise


def told_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each group; its rate as a share of the first one's, as `Described` has it."""
    first = float(optimizer.param_groups[0]["lr"])
    options = [{k: v for k, v in g.items() if k in optimizer.defaults} for g in optimizer.param_groups]
    return [{**group, "lr": float(group["lr"]) / first if first else 1.0} for group in options]


def digest(weights: Tensor) -> str:
    """Of the first weights, to see whether all sites have the same."""
    return xxhash.xxh3_64_hexdigest(weights.numpy().tobytes())
