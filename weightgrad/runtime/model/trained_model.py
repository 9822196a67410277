"""What a rank trains."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weightgrad.core import pieces
from weightgrad.core.global_model import digest_of
from weightgrad.core.layout import Layout
from weightgrad.core.site.state_memory import HostMemory, StateMemory
from weightgrad.runtime.model.module_weights import ModuleWeights
from weightgrad.runtime.model.replicas import Sharding
from weightgrad.runtime.optimizer.announced import AnnouncedOptimizer


@dataclass(frozen=True)
class TrainedModel:
    """What a rank trains: its parameters, its optimizer, and the buffers that are averaged over the ranks or kept.

    `memory` is where the site's state is kept beside them.
    """

    module: nn.Module
    weights: ModuleWeights
    layout: Layout
    sharding: Sharding
    optimizer: Optimizer
    announced: AnnouncedOptimizer
    buffers: list[Tensor]
    averages_buffers: bool
    averages_gradients: bool
    shares_buffers: bool = False
    at_sites: bool = False
    """Whether only sites step with shared gradients, so that the server has no weights."""
    memory: StateMemory = field(default_factory=HostMemory)

    @property
    def stages(self) -> bool:
        """Whether this rank has a part of the model's layers."""
        return len(self.weights.parameters) < len(self.layout.slots)

    def digest(self) -> int:
        """The digest of the weights that this rank holds."""
        total = 0
        self.weights.begin()
        for piece in pieces.cut(self.weights.held, self.layout, per_tensor=False):
            values = self.weights.read(piece.intervals, torch.empty(piece.numel, dtype=torch.float32))
            total += digest_of(values.contiguous(), piece.intervals)
        self.weights.end(changed=False)
        return total % 2**64
