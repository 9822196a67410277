"""A forward and backward pass that lasts as long as the recipe says, layer by layer.

DDP sends a bucket of gradients while the layers below are still computed, so it matters when each of them is ready:
forward is the first third of the pass, and backward leaves the layers, last one first, at equal times over the
rest. Hooks wait for that; the sums are PyTorch's own. Rivals that send nothing during the pass see only its length.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

_FORWARD = 1 / 3


class TimedPass:
    """Hooks on a module that delay its layers. Call `begin` before each pass and `end` after it."""

    def __init__(self, module: nn.Module, seconds: float) -> None:
        self._seconds, self._began = seconds, 0.0
        self._layer, self._ready = 0.0, 0.0  # the layer that backward left last, and when its gradient was ready
        self.passes = self.late = 0
        module.register_forward_hook(self._forward)
        layers = [own for one in module.modules() if (own := list(one.parameters(recurse=False)))]
        for place, parameters in enumerate(layers):
            share = _FORWARD + (1 - _FORWARD) * (len(layers) - place) / len(layers)
            for parameter in parameters:
                parameter.register_hook(self._waiter(share))

    def begin(self) -> None:
        """Begin a pass."""
        self._began, self._layer = time.monotonic(), 0.0

    def end(self) -> None:
        """End a pass. It is late if its last gradient was ready late; communication after that does not count."""
        self._until(1.0)
        self.passes += 1
        self.late += self._ready > self._began + self._seconds

    def _forward(self, *_: Any) -> None:
        self._until(_FORWARD)

    def _waiter(self, share: float) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            if share > self._layer:  # not the bias after the weights
                self._layer, self._ready = share, time.monotonic()
            self._until(share)

        return hook

    def _until(self, share: float) -> None:
        left = self._began + share * self._seconds - time.monotonic()
        if left > 0:
            time.sleep(left)
