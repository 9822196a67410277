"""The interface of a rival: what it does to a model before the loop, after each pass, and at the end."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.task import Training

PORT = 29500  # of the first worker; the next ones are free for a rival's own servers


@dataclass
class Worker:
    """One of the two workers: its rank, the addresses of both, and what it trains. A rival may wrap the module."""

    rank: int
    addresses: list[str]
    recipe: Recipe
    task: Training
    module: nn.Module
    optimizer: Optimizer
    options: dict[str, str]

    def number(self, name: str, default: float) -> float:
        """A setting of the rival, e.g. `post-local:period=8`."""
        return float(self.options.get(name, default))


class Rival(ABC):
    """A rival that is ready to train. The function `make(worker, name)` of its file returns it."""

    @abstractmethod
    def step(self) -> None:
        """Exchange gradients or weights after a pass, and update the model."""

    def finish(self) -> None:
        """Make the final model after the last step. This time counts."""
        return

    def close(self) -> None:
        """Release resources after the measurement."""
        return


def interface() -> str:
    """The network interface of the host, for Gloo."""
    return next(name for _, name in socket.if_nameindex() if name != "lo")
