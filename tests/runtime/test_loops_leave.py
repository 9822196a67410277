"""What a site has learnt and not shared when it leaves: two real sites over gRPC."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from weightgrad.core import strategies
from weightgrad.core.controller import near_line
from weightgrad.errors import StrategyError
from weightgrad.runtime.session import Site
from weightgrad.runtime.site import progress_log
from weightgrad.runtime.site.progress_log import FlushProgress

from .user_sites import NAMES, Meet, batch, flat, network, run_sites

SPARSE = (
    "sparseloco, every: 4, aggregator: mean, resume: global_model_and_residual(0.25), "
    "flush: {flush}, flush_residual: local"
)


def trains(steps: int, *, flush: bool = True) -> Any:
    def script(site: Site, meet: Meet) -> tuple[Tensor, Tensor, float]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        site.prepare(model, optimizer)
        meet()
        for step in range(steps):
            x, y = batch(site.name, step)
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        local = flat(model)
        meet()  # nobody is to finish a round that another has not begun
        site.leave(flush=flush)
        return local, flat(model), loss_of(model)

    return script


def loss_of(model: nn.Module) -> float:
    x, y = (
        torch.cat(parts) for parts in zip(*(batch(name, 1000 + n) for name in NAMES for n in range(8)), strict=True)
    )
    with torch.no_grad():
        return float(functional.cross_entropy(model(x), y))


def test_the_global_model_ends_as_the_mean_of_the_local_models() -> None:
    results, last = run_sites(SPARSE.format(flush="fp32"), trains(14))
    (east, model, _), (west, other, _) = (results[name] for name in NAMES)
    assert not torch.allclose(east, west, atol=1e-3)
    torch.testing.assert_close(model, (east + west) / 2, rtol=1e-4, atol=1e-5)
    assert torch.equal(model, other)
    assert torch.equal(model, last)


def test_a_short_run_of_auto_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 % of the entries in each of a few rounds: most of what was learnt goes out at the end."""
    monkeypatch.setattr(near_line, "NEAR_S", 0.0)  # as over a line with distance
    first = network()
    kept, _ = run_sites("auto", trains(40))
    lost, _ = run_sites("auto", trains(40, flush=False))
    assert torch.equal(kept["east"][1], kept["west"][1])
    assert torch.equal(lost["east"][1], lost["west"][1])
    assert kept["east"][2] < 0.8 * lost["east"][2]
    assert kept["east"][2] < 0.5 * loss_of(first)


def test_without_flush_nothing_is_sent() -> None:
    def script(site: Site, meet: Meet) -> tuple[Tensor, int]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        site.prepare(model, optimizer)
        before = flat(model)
        meet()
        for step in range(3):
            x, y = batch(site.name, step)
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        site.leave(flush=False)
        return before - flat(model), site.steps

    results, _ = run_sites("diloco, every: 4", script)
    for moved, steps in results.values():
        assert steps == 3
        assert not moved.any()


def test_a_bar_shows_how_far_the_last_push_has_come(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "weightgrad")
    times = iter([0.0, 1.0, 2.5, 2.5, 2.6, 5.0, 5.0])
    progress = FlushProgress("east", 4_000_000, clock=lambda: next(times))
    progress.look(4_000_000)
    assert not caplog.records
    progress.look(1_000_000)
    progress.look(900_000)
    progress.look(0)
    first, last = (record.getMessage() for record in caplog.records)
    assert "[###############     ]  75 %" in first
    assert "waiting for the result" in last
    assert progress_log.FLUSH_EVERY_S == 2.0


def test_what_the_strategy_may_say() -> None:
    with pytest.raises(StrategyError, match='flush_residual = \'most\'; it is "all" or "local"'):
        strategies.find("auto", {"flush_residual": "most"})
    with pytest.raises(StrategyError, match="flush_residual = 'local' needs shares = 'updates'"):
        strategies.find("baseline", {"flush_residual": "local"})
