"""Several models and several optimizers in one site: two real sites over gRPC."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from weightgrad.errors import StrategyError
from weightgrad.runtime.session import Site
from weightgrad.runtime.site.named_models import one_module, stepping_optimizers

from .user_sites import NAMES, Meet, UserScript, backward, flat, network, run_sites, seeded, served


def gan() -> tuple[nn.Module, nn.Module]:
    with seeded(5):
        generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    return generator, discriminator


def train_gan(
    g: nn.Module,
    d: nn.Module,
    og: torch.optim.Optimizer,
    od: torch.optim.Optimizer,
    name: str,
    steps: int,
    d_steps: int,
) -> None:
    draw = torch.Generator().manual_seed(NAMES.index(name))
    ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)
    bce = functional.binary_cross_entropy_with_logits
    for _ in range(steps):
        for _ in range(d_steps):
            real = torch.randn(16, 2, generator=draw) * 0.1 + torch.tensor([2.0, -1.0])
            fake = g(torch.randn(16, 4, generator=draw)).detach()
            (bce(d(real), ones) + bce(d(fake), zeros)).backward()
            od.step()
            od.zero_grad()
        bce(d(g(torch.randn(16, 4, generator=draw))), ones).backward()
        og.step()
        og.zero_grad()
        od.zero_grad()


@pytest.mark.parametrize("strategy", ["diloco, every: 2", "auto"])
def test_a_gan(strategy: str) -> None:
    first = flat(nn.ModuleList(gan()))

    def script(site: Site, meet: Meet) -> tuple[int, Tensor]:
        g, d = gan()
        og, od = torch.optim.Adam(g.parameters(), lr=0.01), torch.optim.Adam(d.parameters(), lr=0.01)
        models, _ = site.prepare({"g": g, "d": d}, {"g": og, "d": od})
        assert models["g"] is g
        meet()
        train_gan(g, d, og, od, site.name, steps=10, d_steps=1)
        meet()
        site.leave()
        with pytest.raises(StrategyError, match="after leave"):
            od.step()
        return site.steps, flat(nn.ModuleList((g, d)))

    results, last = run_sites(strategy, script)
    for steps, model in results.values():
        assert steps == 10
        assert torch.equal(model, last)
    assert not torch.isclose(last, first).all()
    assert (last - first)[: sum(p.numel() for p in gan()[0].parameters())].any()


def test_steps_that_do_not_alternate() -> None:
    """Five steps of one for one of the other; then one alone: none is lost."""

    def script(site: Site, meet: Meet) -> int:
        g, d = gan()
        og, od = torch.optim.Adam(g.parameters(), lr=0.01), torch.optim.Adam(d.parameters(), lr=0.01)
        site.prepare([g, d], [og, od])
        meet()
        train_gan(g, d, og, od, site.name, steps=3, d_steps=5)
        assert site.steps == 15
        od.step()
        assert site.steps == 15, "it may be the first half of a step"
        meet()
        site.leave()
        return site.steps

    results, _ = run_sites("diloco, every: 2", script)
    assert set(results.values()) == {16}


def test_one_optimizer_for_two_models_shares_gradients() -> None:
    def script(site: Site, meet: Meet) -> Tensor:
        model = network()
        head, tail = nn.Sequential(model[0], model[1]), model[2]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        site.prepare({"head": head, "tail": tail}, optimizer)
        meet()
        for step in range(4):
            backward(model, site.name, step)
            optimizer.step()
            optimizer.zero_grad()
        site.leave()
        return flat(model)

    results, last = run_sites("baseline", script)
    for found in results.values():
        assert torch.equal(found, last)


def test_states_of_both_come_back(tmp_path: Path) -> None:
    """A site of one rank that ends after its checkpoint, and another process that goes on from it."""

    def script(steps: int, more: int) -> Any:
        def run(site: Site, meet: Meet) -> tuple[int, list[float]]:
            g, d = gan()
            og, od = torch.optim.Adam(g.parameters(), lr=0.01), torch.optim.Adam(d.parameters(), lr=0.01)
            site.prepare({"g": g, "d": d}, {"g": og, "d": od})
            began = site.steps
            counts = [float(state["step"]) for one in (og, od) for state in one.state.values()]
            train_gan(g, d, og, od, "east", steps=steps, d_steps=1)
            if more:
                raise KeyboardInterrupt
            return began, counts

        return run

    with served("diloco, every: 2", "east") as hub:
        first = UserScript(hub.address, "east", script(4, 1), state=tmp_path, checkpoint_every=4)
        hub.until(lambda: not first.is_alive())
        second = UserScript(hub.address, "east", script(2, 0), state=tmp_path, checkpoint_every=4)
        hub.until(lambda: not second.is_alive())
        began, counts = second.end()
    assert began == 4
    assert counts == [4.0] * 8


def test_what_is_refused() -> None:
    g, _ = gan()
    og = torch.optim.Adam(g.parameters())
    with pytest.raises(StrategyError, match="a parameter in common"):
        stepping_optimizers([og, torch.optim.SGD(g.parameters(), lr=0.1)])
    with pytest.raises(StrategyError, match="no optimizer"):
        stepping_optimizers([])
    with pytest.raises(StrategyError, match="under two names"):
        one_module({"a": g, "b": g})
    with pytest.raises(StrategyError, match="no dot"):
        one_module({"a.b": g})
    with pytest.raises(StrategyError, match=r"wanted a torch\.nn\.Module"):
        one_module({"g": g, "d": "discriminator"})
