"""LoRA by peft at two sites: only the adapters travel, and the base model must be the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.user_sites import STEPS, Meet, batch, flat, run_sites, seeded, served
from weightgrad.errors import RefusedError
from weightgrad.runtime.join import join
from weightgrad.runtime.session import Site

peft = pytest.importorskip("peft", reason="peft is not installed (the extra `peft`)", exc_type=ImportError)


class Net(nn.Module):
    """A base model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 2)

    def forward(self, x: Any) -> Any:
        """Two layers."""
        return self.last(torch.tanh(self.first(x)))


def adapted(seed: int = 1) -> Any:
    with seeded(seed):
        base = Net()
        torch.manual_seed(2)
        return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["first", "last"]))


@pytest.mark.parametrize("strategy", ["baseline", "diloco, every: 2"])
def test_adapters_travel_and_the_base_model_stays(strategy: str) -> None:
    def script(site: Site, meet: Meet) -> Any:
        model = adapted()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        site.prepare(model, optimizer)
        meet()
        for step in range(STEPS):
            x, y = batch(site.name, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        site.leave()
        return model

    results, global_model = run_sites(strategy, script)
    adapters = sum(p.numel() for name, p in adapted().named_parameters() if "lora_" in name)
    assert global_model.numel() == adapters
    for model in results.values():
        assert torch.equal(flat(model), global_model)
    assert not torch.equal(global_model, flat(adapted()))


def test_another_base_model_is_refused() -> None:
    with served("diloco, every: 2") as hub:
        models = [adapted(1), adapted(3)]
        sites = [join(hub.address, site=name, insecure=True) for name in ("east", "west")]
        sites[0].prepare(models[0], torch.optim.AdamW(models[0].parameters()))
        with pytest.raises(RefusedError, match="is frozen, and west has other values in it than east"):
            sites[1].prepare(models[1], torch.optim.AdamW(models[1].parameters()))
        sites[0]._abandon()
