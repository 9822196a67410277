"""The moving average of the parameters, which is often the better model.

After update t = 0, 1, ... with weights w:

    d = min(decay, (1 + t) / (10 + t))
    average = d * average + (1 - d) * w

so that the first steps, far from where training ends, are soon forgotten. The paper of WeightGrad
uses decay = 0.9999.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from weightgrad.core.vector_checks import restored
from weightgrad.errors import StrategyError


class ParameterAverage:
    """An exponential moving average that starts at the weights it is given."""

    def __init__(self, flat: Tensor, decay: float = 0.9999) -> None:
        if not 0 <= decay < 1:
            raise StrategyError(f"ema={decay!r} must be at least 0 and below 1, e.g. 0.9999")
        self._decay = decay
        self._value = flat.detach().clone()
        self._updates = 0

    def update(self, flat: Tensor) -> None:
        """Add the weights after one more step."""
        decay = min(self._decay, (1 + self._updates) / (10 + self._updates))
        self._value.lerp_(flat.detach(), 1 - decay)
        self._updates += 1

    def value(self) -> Tensor:
        """The average. It is this object's own tensor and changes with the next update."""
        return self._value

    def state(self) -> dict[str, Tensor]:
        """Copies of all that it remembers."""
        return {"value": self._value.clone(), "updates": torch.tensor(self._updates, dtype=torch.int64)}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""
        good = restored("ParameterAverage", self.state(), saved)
        self._value, self._updates = good["value"], int(good["updates"])
