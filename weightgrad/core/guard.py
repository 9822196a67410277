"""Checks every push before it can move the global model, so that one broken site cannot spoil everybody's model.

A push is refused when it cannot be decoded, when its segments lie outside the global model or overlap, when it holds
NaN or Inf or values that would soon overflow, or when its norm is more than `factor` times the largest among the
site's last `window` accepted pushes. A site is compared only with itself, and not before `warm` of its pushes have
been accepted, because the first pushes of a training differ too much. Refused pushes are not remembered.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

from weightgrad.core.parts import check
from weightgrad.core.server_shard import PushFacts
from weightgrad.errors import StrategyError
from weightgrad.wire.messages import Push

FINAL = 10.0  # the last push may be so much larger: it holds what many rounds kept in the residual
LARGEST = 1e12  # far below where sums, squares and momentum in float32 overflow


class Guard:
    """Checks the pushes of all sites.

    Memory: the norms of each site's last pushes. The server processes have decoded the pushes and measured them
    (`ServerShard.receive`).

    Args:
        factor: how many times larger than before a push may be.
        window: how many accepted pushes of a site are remembered.
        warm: how many pushes of a site are accepted before norms are compared.
    """

    def __init__(self, factor: float = 20.0, window: int = 20, warm: int = 5) -> None:
        check("guard", "factor", factor, 1, 1e9)
        check("guard", "window", window, 1, 10**6, whole=True)
        check("guard", "warm", warm, 1, 10**6, whole=True)
        if warm > window:
            raise StrategyError(
                f"guard: warm = {warm} of a window of {window} is never reached; it must be at most the window"
            )
        self._factor = factor
        self._window = window
        self._warm = warm
        self._norms: dict[str, deque[float]] = {}

    def check(self, push: Push, facts: PushFacts) -> str | None:
        """Check one push, and remember its norm if it is good.

        Args:
            push: the push; its values are not looked at.
            facts: what the server processes found out about its values.

        Returns:
            Why the push is refused, or None.
        """
        who = f"update of {push.site} at round {push.round}"
        if facts.problem is not None:
            return f"{who} {facts.problem}"
        if not math.isfinite(facts.squares):
            return f"{who} is not finite"
        norm = math.sqrt(facts.squares)
        if norm > LARGEST:
            return f"{who} has norm {norm:.3g}, more than any training makes ({LARGEST:g})"
        history = self._norms.get(push.site, ())
        largest = max(history, default=0.0)
        if len(history) >= self._warm and norm > self._factor * (FINAL if push.final else 1.0) * largest:
            times = f"{norm / largest:.3g} times the largest of its last {len(history)} ({largest:.3g})"
            return f"{who} has norm {norm:.3g}, {times}"
        if norm > 0:  # a history of zeros would refuse everything
            self._norms.setdefault(push.site, deque(maxlen=self._window)).append(norm)
        return None

    def state(self) -> dict[str, Tensor]:
        """The norms of each site's last pushes, oldest first, for a checkpoint."""
        return {site: torch.tensor(list(norms), dtype=torch.float64) for site, norms in self._norms.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self._norms = {site: deque(norms.tolist(), maxlen=self._window) for site, norms in state.items()}
