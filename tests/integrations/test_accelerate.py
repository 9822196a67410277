"""An Accelerator inside each of two sites: the script of the documentation, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.user_sites import Meet, backward, flat, network, run_sites
from weightgrad.errors import StrategyError
from weightgrad.runtime.join import join
from weightgrad.runtime.session import Site

from .documented_scripts import run_two_processes

accelerate = pytest.importorskip(
    "accelerate", reason="accelerate is not installed (the extra `accelerate`)", exc_type=ImportError
)


def test_the_documented_script_trains_at_two_sites_one_of_two_ranks(tmp_path: Path) -> None:
    vector = run_two_processes("accelerate.md", "diloco, every: 4", tmp_path)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    nn.utils.vector_to_parameters(vector, model.parameters())
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(9))
    right = (model(x).argmax(1) == (x.sum(1) > 0).long()).float().mean()
    assert right > 0.8


def test_a_step_that_the_scaler_skips_is_a_skipped_one_for_accelerate_too() -> None:
    accelerate.Accelerator(cpu=True)  # one for both sites, which are threads here: two at a time make half of its state

    def script(site: Site, meet: Meet) -> tuple[list[bool], Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        model = network()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = accelerate.optimizer.AcceleratedOptimizer(plain, scaler=scaler)
        model, optimizer = site.prepare(model, optimizer)
        meet()
        skipped = []
        for step in range(4):
            optimizer.zero_grad()
            backward(model, site.name, step)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(scaler.scale(torch.ones(())))
            if step == 1:
                first = next(model.parameters()).grad
                assert first is not None
                first[0, 0] = float("nan")
            optimizer.step()
            skipped.append(optimizer.step_was_skipped)
        assert site.steps == 3
        site.leave()
        return skipped, flat(model)

    results, global_model = run_sites("baseline", script)
    for skipped, vector in results.values():
        assert skipped == [False, True, False, False]
        assert torch.equal(vector, global_model)


def test_what_an_accelerator_may_not_be() -> None:
    from weightgrad.integrations.accelerate import prepare

    site = join("127.0.0.1:1", site="east", insecure=True)
    model: Any = nn.Linear(2, 2)
    for made, why in (
        (SimpleNamespace(distributed_type=SimpleNamespace(name="DEEPSPEED"), num_processes=1), "DEEPSPEED keeps"),
        (SimpleNamespace(distributed_type=SimpleNamespace(name="NO"), num_processes=2), "2 processes and the site 1"),
    ):
        with pytest.raises(StrategyError, match=why):
            prepare(made, site, model, torch.optim.SGD(model.parameters(), lr=0.1))
