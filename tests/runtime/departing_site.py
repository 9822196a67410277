"""A site that trains until something ends it; run as a script, for `test_departures.py`.

It has no `with` and no `leave`, as many scripts.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

import torch
from torch import nn

import weightgrad as wg


class Loop:
    """The same little model at every site, and steps on it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def steps(self, count: int) -> None:
        """Train for so many steps."""
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 8)).square().mean().backward()
            self.optimizer.step()


def train(address: str, name: str) -> None:
    """Train for ever, or until SIGUSR1 makes an error."""
    loop = Loop()
    site = wg.join(address, site=name, insecure=True, timeout=300.0)
    site.prepare(loop.model, loop.optimizer)
    signal.signal(signal.SIGUSR1, _fail)
    loop.steps(10**9)


def _fail(number: int, frame: FrameType | None) -> None:
    raise RuntimeError("the data is gone")


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(*sys.argv[1:])
