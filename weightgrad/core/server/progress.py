"""How far the global server has come: the global model and the rounds as plain counters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(kw_only=True)
class ServerProgress:
    """The counters of the global server.

    Attributes:
        version: the version of the global model.
        step: its step.
        round: the last closed round.
        has_residual: whether results may have lost something, which waits in the server's residual.
    """

    version: int = 0
    step: int = 0
    round: int = 0
    has_residual: bool = False

    def to_tensor(self) -> Tensor:
        """The counters for a checkpoint."""
        return torch.tensor([self.version, self.step, self.round, int(self.has_residual)])

    def load_tensor(self, tensor: Tensor) -> None:
        """Restore what `to_tensor` wrote."""
        self.version, self.step, self.round, residual = (int(number) for number in tensor)
        self.has_residual = bool(residual)
