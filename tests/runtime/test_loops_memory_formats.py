"""Parameters whose memory has another order than their elements: two real sites over gRPC."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from weightgrad.runtime.session import Site

from .user_sites import NAMES, Meet, flat, run_sites, seeded


def convolutional(*, last: bool) -> nn.Sequential:
    with seeded(4):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    if last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        linear, _ = model[3].parameters()
        linear.data = linear.data.t().contiguous().t()
    return model


def trains(*, last: bool, optimizer: str) -> object:
    def script(site: Site, meet: Meet) -> tuple[Tensor, list[bool]]:
        model = convolutional(last=last)
        stepping = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
        site.prepare(model, stepping)
        meet()
        draw = torch.Generator().manual_seed(NAMES.index(site.name))
        for _ in range(6):
            x, y = torch.randn(8, 3, 6, 6, generator=draw), torch.randint(0, 2, (8,), generator=draw)
            functional.cross_entropy(model(x), y).backward()
            stepping.step()
            stepping.zero_grad()
        site.leave()
        return flat(model), [one.is_contiguous() for one in model.parameters() if one.dim() > 1]

    return script


@pytest.mark.parametrize(
    ("strategy", "optimizer"), [("baseline", "Adam"), ("diloco, every: 2", "AdamW"), ("sparseloco, every: 2", "SGD")]
)
def test_the_order_of_memory_changes_nothing_but_rounding(strategy: str, optimizer: str) -> None:
    results, last = run_sites(strategy, trains(last=True, optimizer=optimizer))  # type: ignore[arg-type]
    plain, _ = run_sites(strategy, trains(last=False, optimizer=optimizer))  # type: ignore[arg-type]
    for found, contiguous in results.values():
        assert contiguous == [False, False]
        assert torch.equal(found, last)
        torch.testing.assert_close(found, plain["east"][0], rtol=1e-3, atol=1e-4)
