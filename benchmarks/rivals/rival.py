"""A rival: what it does to a model before the loop, after each pass, and at the end."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from weightgrad.train.recipe import Recipe
from weightgrad.train.task import Training

PORT = 29500  # of the first worker; the next ones are free for a rival's own servers


@dataclass
class Worker:
    """One of the two: its number, the addresses of both, and what it trains. The module may be wrapped."""

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
    """Made by its file's `make(worker)`; ready to step when it is made."""

    @abstractmethod
    def step(self) -> None:
        """After a pass: exchange what there is, move the model."""

    def finish(self) -> None:
        """After the last step: the model becomes the one that is delivered. Counted."""
        return

    def close(self) -> None:
        """Nothing more is measured."""
        return


def interface() -> str:
    """The host's one way out, which Gloo must be told."""
    return next(name for _, name in socket.if_nameindex() if name != "lo")
