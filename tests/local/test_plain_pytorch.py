"""A site of one worker in float32 is plain PyTorch, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weightgrad import codecs
from weightgrad.local import GradientEncoder, Layout, LocalServer


def small_cnn() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 10, 3),
            nn.BatchNorm2d(10),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(90, 7),
        )


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, 10, 10, generator=generator), torch.randint(7, (8,), generator=generator)


@pytest.mark.parametrize("encode", [True, False])
@pytest.mark.parametrize(
    ("name", "options"), [("sgd", {"momentum": 0.9, "weight_decay": 1e-4}), ("adam", {})], ids=["sgd", "adam"]
)
def test_one_worker_in_float32_is_plain_pytorch(name: str, options: dict[str, Any], encode: bool) -> None:
    plain, model = small_cnn(), small_cnn()
    reference = (torch.optim.SGD if name == "sgd" else torch.optim.Adam)(plain.parameters(), lr=0.05, **options)
    layout = Layout.of(model)
    server = LocalServer(layout, layout.gather(model), (name, options))
    encoder = GradientEncoder(layout, codecs.Fp32(), key=1)
    start = server.master().clone()
    gradient = torch.zeros(layout.numel)
    for step in range(20):
        x, y = batch(step)
        reference.zero_grad()
        wanted = nn.functional.cross_entropy(plain(x), y)
        wanted.backward()
        reference.step()

        layout.scatter(server.working_weights(), model)
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        for view, parameter in zip(layout.views(gradient), model.parameters(), strict=True):
            assert parameter.grad is not None
            view.copy_(parameter.grad)
        server.step([encoder.encode(gradient, step) if encode else gradient], 0.05)
        assert float(loss.detach()) == float(wanted.detach())
    assert torch.equal(server.master(), layout.gather(plain))
    assert not torch.equal(server.master(), start)
