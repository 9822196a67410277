"""The fast response norm equals torch's, forward and backward, and CifarNet equals its plain description."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from weightgrad.lab import models
from weightgrad.lab.models.cifarnet import ResponseNorm


@pytest.mark.parametrize("channels", [1, 5, 64])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_equals_local_response_norm(channels: int, channels_last: bool, size: float) -> None:
    images = size * torch.randn(3, channels, 6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradient = torch.randn(images.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    theirs = nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0)
    ours = ResponseNorm(channels).double()
    ours.band.copy_(ours.band.bool() * (0.001 / 9))  # exact in double
    images.requires_grad_()
    wanted, made = theirs(images), ours(images)
    torch.testing.assert_close(made, wanted)
    (wanted_gradient,) = torch.autograd.grad(wanted, images, gradient)
    (made_gradient,) = torch.autograd.grad(made, images, gradient)
    torch.testing.assert_close(made_gradient, wanted_gradient)


def test_cifarnet_is_what_the_tutorial_says() -> None:
    model = models.build("cifarnet", classes=10, channels=3, size=24, seed=0)
    norm = nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0)
    images = torch.randn(4, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([1, 5, 7, 9])
    w = dict(model.named_parameters())

    def plain() -> torch.Tensor:
        x = torch.relu(functional.conv2d(images, w["conv1.weight"], w["conv1.bias"], padding=2))
        x = norm(functional.max_pool2d(functional.pad(x, (0, 1, 0, 1), value=-torch.inf), 3, 2))
        x = norm(torch.relu(functional.conv2d(x, w["conv2.weight"], w["conv2.bias"], padding=2)))
        x = functional.max_pool2d(functional.pad(x, (0, 1, 0, 1), value=-torch.inf), 3, 2)
        x = x.permute(0, 2, 3, 1).flatten(1)
        for name in ("linear1", "linear2"):
            x = torch.relu(functional.linear(x, w[f"{name}.weight"], w[f"{name}.bias"]))
        return functional.linear(x, w["linear3.weight"], w["linear3.bias"])

    wanted, made = plain(), model(images)
    torch.testing.assert_close(made, wanted)
    wanted_gradients = torch.autograd.grad(functional.cross_entropy(wanted, labels), list(w.values()))
    made_gradients = torch.autograd.grad(functional.cross_entropy(made, labels), list(w.values()))
    for a, b in zip(made_gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)
