"""Initial weights: He et al. (2015) before ReLU, small at the end.

Variance 2 / fan-in keeps the size of activations from layer to layer, so plain networks start to learn
with learning rate 0.05 and momentum 0.9 at once. The last layer starts small: the first loss is then
the logarithm of the number of classes, whatever the width before it.
"""

from __future__ import annotations

from torch import nn

from weightgrad.errors import WeightGradError

LAST_STD = 0.01


def he(module: nn.Module, last: nn.Module | None = None) -> None:
    """He-normal weights and zero biases for every convolution and linear layer; N(0, 0.01²) for the last."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            if layer is last:
                nn.init.normal_(layer.weight, std=LAST_STD)
            else:
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def at_least(model: str, size: int, smallest: int) -> None:
    """Refuse images that a network's strides would shrink to nothing."""
    if size < smallest:
        raise WeightGradError(f"{model} reads images of {smallest}x{smallest} or larger, not {size}x{size}; try mlp")
