"""The user's own checkpoints: two real sites that end, and go on in another life from what they saved."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from weightgrad.errors import CheckpointError, RefusedError, StrategyError
from weightgrad.runtime.checkpoints.portable_state import PortableState
from weightgrad.runtime.session import Site

from .deployment import PATIENCE_S
from .test_loops_written_options import Counting
from .user_sites import NAMES, Meet, UserScript, backward, flat, network, run_sites, served

BEFORE, AFTER = 5, 6
STRATEGIES = ["baseline", "diloco, every: 2", "streaming"]


class GoneError(Exception):
    """The process ends here."""


def save(path: Path, site: Site, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "site": site.state_dict()}
    torch.save(state, path / f"{site.name}.pt")


def load(path: Path, site: Site, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = torch.load(path / f"{site.name}.pt", weights_only=True)
    model.load_state_dict(state["model"])
    site.load_state_dict(state["site"])


def save_dcp(path: Path, site: Site, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state_dict_saver.save({"model": model.state_dict(), "site": site}, checkpoint_id=path / site.name, no_dist=True)


def load_dcp(path: Path, site: Site, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state_dict_loader.load({"model": model.state_dict(), "site": site}, checkpoint_id=path / site.name, no_dist=True)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def script(
    path: Path | None,
    *,
    ends_at: int,
    resumes: Any = None,
    saves: Any = save,
    leaves: bool = True,
    make: Callable[[torch.nn.Module], torch.optim.Optimizer] = adamw,
) -> Any:
    def run(site: Site, meet: Meet) -> Tensor:
        model = network(1 if resumes is None else 9)  # another life begins with whatever weights
        optimizer = make(model)
        if resumes is not None:
            assert path is not None
            resumes(path, site, model, optimizer)
        site.prepare(model, optimizer)
        meet()
        while site.steps < ends_at:
            backward(model, site.name, site.steps)
            optimizer.step()
            optimizer.zero_grad()
            if site.steps == BEFORE and path is not None and resumes is None:
                saves(path, site, model, optimizer)
        meet()
        if not leaves:
            raise GoneError
        site.leave()
        return flat(model)

    return run


def two_lives(
    strategy: str, path: Path, first_ends: int, saves: Any = save, loads: Any = load, make: Any = adamw
) -> dict[str, Tensor]:
    """What sites end with that were ended after `first_ends` steps, and went on from what they had saved."""
    with served(strategy) as hub:
        for life in (
            script(path, ends_at=first_ends, saves=saves, leaves=False, make=make),
            script(path, ends_at=BEFORE + AFTER, resumes=loads, make=make),
        ):
            meeting = threading.Barrier(len(NAMES), timeout=PATIENCE_S)
            threads = [UserScript(hub.address, name, life, meeting.wait) for name in NAMES]
            while any(thread.is_alive() for thread in threads):
                hub.tick()
            if all(isinstance(thread.error, GoneError) for thread in threads):
                hub.until(lambda: not any(member.live for member in hub.core.members.by_name.values()))
        return {thread.name: thread.end() for thread in threads}


@pytest.mark.filterwarnings("ignore:.*begins without the state")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_goes_on_as_if_nothing_had_been(strategy: str, tmp_path: Path) -> None:
    results = two_lives(strategy, tmp_path, BEFORE)
    reference, _ = run_sites(strategy, script(None, ends_at=BEFORE + AFTER))
    for name in NAMES:
        assert torch.equal(results[name], reference[name])


@pytest.mark.parametrize("strategy", ["baseline", "diloco, every: 2"])
def test_an_optimizer_that_counts_its_steps_among_its_options_goes_on_counting(strategy: str, tmp_path: Path) -> None:
    def counting(model: torch.nn.Module) -> torch.optim.Optimizer:
        return Counting(model.parameters())

    results = two_lives(strategy, tmp_path, BEFORE, make=counting)
    reference, _ = run_sites(strategy, script(None, ends_at=BEFORE + AFTER, make=counting))
    for name in NAMES:
        assert torch.equal(results[name], reference[name])


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of torch, about a checkpoint of one rank
def test_steps_after_the_checkpoint_are_repeated(tmp_path: Path) -> None:
    """Sites that ended later than their checkpoints, here of torch.distributed.checkpoint."""
    results = two_lives("diloco, every: 2", tmp_path, BEFORE + 4, save_dcp, load_dcp)
    reference, _ = run_sites("diloco, every: 2", script(None, ends_at=BEFORE + AFTER))
    for name in NAMES:
        assert torch.equal(results[name], reference[name])


def test_what_is_refused(tmp_path: Path) -> None:
    def after(site: Site, meet: Meet) -> dict[str, Any]:
        model = network()
        assert site.state_dict() == {"state": b""}
        site.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        state = site.state_dict()
        with pytest.raises(StrategyError, match="before prepare"):
            site.load_state_dict(state)
        return state

    with served("diloco, every: 2", "east") as hub:
        thread = UserScript(hub.address, "east", after)
        hub.until(lambda: not thread.is_alive())
        state = thread.end()
        site = thread.site
    for wrong in (b"", None, b"12345678{}", state["state"][:-5], {"a": 1}):
        with pytest.raises(CheckpointError):
            PortableState.read(wrong)
    with pytest.raises(StrategyError, match="before prepare"):
        site.load_state_dict(state)

    def goes_on(site: Site, meet: Meet) -> None:
        model = network()
        site.load_state_dict(state)
        site.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with served("diloco, every: 4", "east") as hub, pytest.raises(CheckpointError, match="strategy is another"):
        UserScript(hub.address, "east", goes_on).end()

    def ahead(site: Site, meet: Meet) -> None:
        found = PortableState.read(state["state"])
        site._loaded = PortableState({**found.facts, "version": 7}, found.tensors)
        model = network()
        site.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with served("diloco, every: 2", "east") as hub, pytest.raises(RefusedError, match="version 7 and the server none"):
        UserScript(hub.address, "east", ahead).end()
