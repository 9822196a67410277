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

from weightgrad.codecs.registry import decode_into
from weightgrad.core.parts import check
from weightgrad.errors import StrategyError, WeightGradError
from weightgrad.kernels import fixed
from weightgrad.kernels.moments import moments
from weightgrad.wire.messages import Push

FINAL = 10.0  # the last push may be so much larger: it holds what many rounds kept in the residual
LARGEST = 1e12  # far below where sums, squares and momentum in float32 overflow


class Guard:
    """Checks the pushes of all sites.

    Memory: one vector of the largest segment's size, and the norms of each site's last pushes.

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
        self._decoded = torch.empty(0)

    def check(self, push: Push, numel: int) -> str | None:
        """Check one push, and remember its norm if it is good.

        Args:
            push: the push.
            numel: the elements of the global model.

        Returns:
            Why the push is refused, or None.
        """
        who = f"update of {push.site} at round {push.round}"
        misplaced = _misplaced_segment(push, numel)
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
        if norm > 0:  # a history of zeros would refuse everything
            self._norms.setdefault(push.site, deque(maxlen=self._window)).append(norm)
        return None

    def _norm(self, push: Push) -> float:
        """The Euclidean norm over all segments; not finite if an element is not."""
        squares = 0.0
        for segment in push.segments:
            numel = segment.payload.numel
            if self._decoded.numel() < numel:
                self._decoded = torch.empty(numel)
            decode_into(segment.payload, self._decoded[:numel], fixed.STORE)
            squares += moments(self._decoded[:numel]).squares
        return math.sqrt(squares)

    def state(self) -> dict[str, Tensor]:
        """The norms of each site's last pushes, oldest first, for a checkpoint."""
        return {site: torch.tensor(list(norms), dtype=torch.float64) for site, norms in self._norms.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self._norms = {site: deque(norms.tolist(), maxlen=self._window) for site, norms in state.items()}


def _misplaced_segment(push: Push, numel: int) -> str | None:
    """What is wrong with the places of the segments: they must ascend, not overlap, and lie within the model."""
    end = 0
    for segment in push.segments:
        stop = segment.start + segment.payload.numel
        if segment.start < 0 or stop > numel:
            return f"has a segment at {segment.start} to {stop}, the global model only {numel} elements"
        if segment.start < end:
            return f"has a segment at {segment.start}, where the one before it goes to {end}"
        end = stop
    return None
