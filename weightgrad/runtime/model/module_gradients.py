"""The gradients of a user's module as elements of the index space."""

from __future__ import annotations

import torch
from torch import Tensor

from weightgrad.core.layout import Layout
from weightgrad.runtime.model.module_weights import ModuleWeights
from weightgrad.wire.intervals import Intervals


def gradients_of(weights: ModuleWeights, layout: Layout) -> ModuleWeights:
    """The gradients of the same parameters; a parameter without a gradient counts as zero."""
    return ModuleWeights(
        weights.parameters, layout, weights.held, source=lambda parameter: parameter.grad, copies=weights.copies
    )


def read_gradient(gradients: ModuleWeights, intervals: Intervals, out: Tensor) -> Tensor:
    """Copy gradients into memory of the caller; -0 becomes +0, as if gradients had been added to zeros."""
    found = gradients.read(intervals, out)
    return torch.add(found, 0.0, out=out[: intervals.numel])


@torch.no_grad()
def write_gradient(gradients: ModuleWeights, intervals: Intervals, values: Tensor) -> None:
    """Replace gradients; a parameter without one gets one."""
    for one in gradients.parameters:
        if one.parameter.grad is None:
            one.parameter.grad = torch.zeros_like(one.parameter)
    gradients.write(intervals, values)
