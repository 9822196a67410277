"""Looks at every push before it can move the base: one broken site must not spoil the model of all.

A push is refused when it cannot be decoded, when its parts lie outside the base or over each other,
when it holds NaN or Inf or what would soon become that, or when its norm is more than `factor` times
the largest among the site's last `window` accepted ones. A site is compared with itself only, and not
before `warm` of its pushes were accepted: the first ones of a training differ too much. What is
refused is not remembered.
"""

from __future__ import annotations

import math
from collections import deque

import torch
from torch import Tensor

from weightgrad.codecs.registry import decode_into
from weightgrad.errors import StrategyError, WeightGradError
from weightgrad.kernels import fixed
from weightgrad.kernels.moments import moments
from weightgrad.wan.messages import Push
from weightgrad.wan.parts import check

FINAL = 10.0  # a flush holds what many rounds kept back
LARGEST = 1e12  # far below where sums, squares and momentum in float32 overflow


class Guard:
    """One for all sites: the norms of each one's last pushes."""

    def __init__(self, factor: float = 20.0, window: int = 20, warm: int = 5) -> None:
        check("guard", "factor", factor, 1, 1e9)
        check("guard", "window", window, 1, 10**6, whole=True)
        check("guard", "warm", warm, 1, 10**6, whole=True)
        if warm > window:
            raise StrategyError(f"guard: warm = {warm} of a window of {window} never comes; it must be at most that")
        self._factor = factor
        self._window = window
        self._warm = warm
        self._norms: dict[str, deque[float]] = {}
        self._room = torch.empty(0)

    def judge(self, push: Push, numel: int) -> str | None:
        """Why the push must not be taken into a base of `numel` elements; None, and its norm is remembered."""
        who = f"update of {push.site} at round {push.round}"
        misplaced = _misplaced(push, numel)
        if misplaced is not None:
            return f"{who} {misplaced}"
        try:
            norm = self._norm(push)
        except WeightGradError as error:
            return f"{who} cannot be decoded: {error}"
        if not math.isfinite(norm):
            return f"{who} is not finite"
        if norm > LARGEST:
            return f"{who} has norm {norm:.3g}, more than any training makes ({LARGEST:g})"
        history = self._norms.get(push.site, ())
        largest = max(history, default=0.0)
        if len(history) >= self._warm and norm > self._factor * (FINAL if push.final else 1.0) * largest:
            times = f"{norm / largest:.3g} times the largest of its last {len(history)} ({largest:.3g})"
            return f"{who} has norm {norm:.3g}, {times}"
        if norm > 0:  # zeros say nothing of what is usual; a history of them would refuse everything
            self._norms.setdefault(push.site, deque(maxlen=self._window)).append(norm)
        return None

    def _norm(self, push: Push) -> float:
        """Euclidean, over all parts; not finite if an element is not."""
        squares = 0.0
        for part in push.parts:
            n = part.payload.numel
            if self._room.numel() < n:
                self._room = torch.empty(n)
            decode_into(part.payload, self._room[:n], fixed.STORE)
            squares += moments(self._room[:n]).squares
        return math.sqrt(squares)

    def state(self) -> dict[str, Tensor]:
        """The norms of each site, the oldest first."""
        return {site: torch.tensor(list(norms), dtype=torch.float64) for site, norms in self._norms.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Remember what `state()` gave."""
        self._norms = {site: deque(norms.tolist(), maxlen=self._window) for site, norms in state.items()}


def _misplaced(push: Push, numel: int) -> str | None:
    """What is wrong with where the parts lie: an honest site's ascend, apart from each other, within the base."""
    at = 0
    for part in push.parts:
        stop = part.start + part.payload.numel
        if part.start < 0 or stop > numel:
            return f"has a part at {part.start} to {stop}, the base only {numel} elements"
        if part.start < at:
            return f"has a part at {part.start}, where the one before it goes to {at}"
        at = stop
    return None
