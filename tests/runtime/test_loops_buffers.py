"""Running statistics of batch norm between sites: two real sites over gRPC."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from weightgrad.core.layout import Layout
from weightgrad.core.shared_buffers import MOST_BYTES, SharedBuffers, combined
from weightgrad.errors import StrategyError
from weightgrad.lab.run.deployment import run_config
from weightgrad.runtime.checkpoints.final_state import FinalStates, SiteFinalState
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.runtime.session import Site
from weightgrad.runtime.site.buffers import SiteBuffers

from .deployment import Hub, tiny
from .user_sites import NAMES, Meet, UserScript, run_sites, seeded, served

STRATEGIES = ["baseline", "diloco, every: 2", "streaming", "auto", "gaia"]


def normed() -> nn.Sequential:
    with seeded(3):
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def data(name: str, step: int) -> tuple[Tensor, Tensor]:
    """The sites see different distributions, so that their own statistics are far apart."""
    place = NAMES.index(name)
    draw = torch.Generator().manual_seed(1000 * place + step)
    x = torch.randn(16, 6, generator=draw) * (1 + 4 * place) + 3 * place
    return x, (x.sum(1) > 9 * place).long()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, number: int) -> None:
    x, y = data(name, number)
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def mean_of(model: nn.Sequential) -> Tensor:
    found = model[1].running_mean
    assert isinstance(found, Tensor)
    return found.clone()


def trains(**options: Any) -> Any:
    def script(site: Site, meet: Meet) -> dict[str, Tensor]:
        model = normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        site.prepare(model, optimizer, **options)
        meet()
        for number in range(12):
            step(model, optimizer, site.name, number)
        site.leave()
        return {name: one.clone() for name, one in model.state_dict().items()}

    return script


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sites_end_with_the_same_statistics(strategy: str) -> None:
    results, _ = run_sites(strategy, trains())
    found, west = (results[name] for name in NAMES)
    assert all(torch.equal(found[name], west[name]) for name in found)
    assert int(found["1.num_batches_tracked"]) == 12
    if strategy == "streaming":  # with results that come late
        alone, _ = run_sites(strategy, trains(buffers="local"))
        assert not torch.equal(alone["east"]["1.running_var"], alone["west"]["1.running_var"])
        for name in ("0.weight", "3.bias"):
            assert torch.equal(found[name], alone["east"][name]), "the exchange of buffers changes no weight"


def test_the_mean_is_by_samples() -> None:
    def script(site: Site, meet: Meet) -> Tensor:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=1.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        site.prepare(model, optimizer, samples=3 if site.name == "east" else 1)
        meet()
        for parameter, value in zip(model[0].parameters(), (torch.eye(2), torch.zeros(2)), strict=True):
            parameter.data.copy_(value)
        x = torch.full((4, 2), 1.0 if site.name == "east" else 5.0)
        model(x).sum().backward()
        optimizer.step()
        site.leave()
        return mean_of(model)

    results, _ = run_sites("diloco, every: 1", script)
    for found in results.values():
        assert torch.equal(found, torch.full((2,), 2.0))


def test_a_late_site_gets_the_statistics_with_the_model() -> None:
    found: dict[str, Tensor] = {}
    trained, joined = threading.Event(), threading.Event()

    def early(site: Site, meet: Meet) -> None:
        model = normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        site.prepare(model, optimizer)
        for number in range(4):
            step(model, optimizer, "east", number)
        found["east"] = mean_of(model)
        trained.set()
        assert joined.wait(120)
        site.leave()

    def late(site: Site, meet: Meet) -> None:
        model = normed()
        site.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        found["west"] = mean_of(model)
        joined.set()

    config = run_config(tiny("{name: diloco, every: 2, t_global: 1}", workers=1))  # rounds wait for west for a second
    with Hub(replace(config, sites=NAMES)) as hub:
        first = UserScript(hub.address, "east", early)
        hub.until(trained.is_set)
        second = UserScript(hub.address, "west", late)
        hub.until(lambda: not first.is_alive() and not second.is_alive())
        first.end()
        second.end()
        last = hub.core.buffers.mean["1.running_mean"]
    assert bool(found["east"].any())
    assert torch.equal(found["east"], found["west"])
    assert torch.equal(found["east"], last)


def test_a_result_that_comes_some_passes_later() -> None:
    """The site is where it would be had it gone on from the mean."""
    norm, again = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    shared = SiteBuffers(norm, SiteGroup(), averages=True, stages=False, shared=True)
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        norm(torch.randn(8, 3, generator=draw) * 9)
    sent = shared.gather(1)
    mean = {name: (one * 0.1 if one.is_floating_point() else one) for name, one in sent.items()}
    again.load_state_dict(mean, strict=False)
    for _ in range(4):
        x = torch.randn(8, 3, generator=draw) * 0.01
        norm(x), again(x)
    shared.take(mean, 1)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(norm, name), getattr(again, name))
    assert bool((torch.as_tensor(norm.running_var) > 0).all())
    before = torch.as_tensor(norm.running_mean).clone()
    shared.take(mean, 2)
    assert torch.equal(torch.as_tensor(norm.running_mean), before), "nothing of this site is under way"


def test_what_cannot_travel_stays() -> None:
    module = nn.Module()
    module.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    module.register_buffer("flags", torch.tensor([True]))
    module.register_buffer("low", torch.tensor([1.5], dtype=torch.bfloat16))
    module.register_buffer("cache", torch.ones(2), persistent=False)
    shared = SiteBuffers(module, SiteGroup(), averages=True, stages=False, shared=True)
    assert shared.gather(1).keys() == {"low"}
    shared.take({"low": torch.tensor([2.5]), "mask": torch.ones(2), "cache": torch.zeros(2)}, 1)
    found = dict(module.named_buffers())
    assert found["low"].item() == 2.5
    assert found["mask"].tolist() == [0.0, -torch.inf]
    assert found["cache"].tolist() == [1.0, 1.0]
    module.register_buffer("large", torch.zeros(MOST_BYTES))
    assert SiteBuffers(module, SiteGroup(), averages=True, stages=False, shared=True).nbytes == 0


def test_the_server_leaves_out_what_is_not_finite_or_too_much() -> None:
    shared = SharedBuffers()
    shared.take("east", 3, {"a": torch.tensor([1.0]), "n": torch.tensor([4])})
    shared.take("west", 1, {"a": torch.tensor([torch.nan]), "n": torch.tensor([9])})
    assert shared.combine(["east", "west"])["a"] == 1.0
    assert shared.mean["n"] == 9
    shared.take("west", 1, {"a": torch.tensor([5.0])})
    shared.take("west", 1, {"a": torch.zeros(MOST_BYTES)})
    again = SharedBuffers()
    again.load({name: one.clone() for name, one in shared.state().items()})
    assert again.mean["n"] == 9
    assert again.combine(["east", "west"])["a"] == 2.0
    assert again.combine(["east"])["a"] == 1.0
    third = torch.tensor([0.1, 1e30, -3.7e-12])
    assert torch.equal(combined([(1, {"a": third}), (2, {"a": third}), (4, {"a": third})])["a"], third)


def test_the_final_file_has_the_last_mean(tmp_path: Path) -> None:
    layout = Layout.of_shapes([("w", (1,))])
    states = FinalStates(tmp_path, ["east"])
    state = SiteFinalState.of(layout, None, {"m": torch.tensor([1.0]), "k": torch.tensor([2.0])}, version=1, samples=1)
    for part in state.parts("east"):
        states.take(part, 1)
    found = states.collect(layout, 1, wanted=False, shared={"m": torch.tensor([7.0]), "other": torch.zeros(1)})
    assert {name: float(one) for name, one in found.buffers.items()} == {"m": 7.0, "k": 2.0}


def test_an_unknown_word_is_refused() -> None:
    with served("baseline") as hub, pytest.raises(StrategyError, match='"shared", "site" or "local"'):
        UserScript(hub.address, "east", trains(buffers="mean")).end()


def test_statistics_that_another_site_has_spoilt_neither_end_nor_spoil_this_one() -> None:
    """With two sites there is no majority: a negative variance would be NaN, a counter at its end an overflow."""
    model = normed()
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    buffers = SiteBuffers(model, SiteGroup(), averages=False, stages=False, shared=True)
    model(data("east", 0)[0])
    buffers.gather(1)
    hostile = {"1.running_var": torch.full((16,), -5.0), "1.num_batches_tracked": torch.tensor(2**63 - 1)}
    buffers.take(hostile, 1)
    for number in (2, 3):
        model(data("east", number)[0])
        buffers.gather(number)
        model(data("east", number)[0])  # the counter overflows between the push and its result
        buffers.take(dict.fromkeys(["1.running_mean", "1.running_var"], torch.ones(16)), number)
    model.eval()
    assert model(data("east", 9)[0]).isfinite().all()
