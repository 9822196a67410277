"""Sharded sites and servers of several processes: the simulator's bits, and kill -9 of any process at any time."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightgrad import event_log
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.simulation import simulate

from .deployment import Rehearsal, assert_same_bits, model_of, tiny


def sharded(strategy: str, *, steps: int = 24, processes: int = 2) -> Recipe:
    """East is sharded by FSDP2; west is two replicas."""
    recipe = tiny(strategy, steps=steps)
    return recipe.with_settings([f"server.processes={processes}", "sites.0.sharding=fsdp2"])


@pytest.mark.parametrize("strategy", ["baseline", "diloco", "sparseloco"])
def test_sharded_site_and_two_server_processes_end_with_the_bits_of_the_simulator(
    strategy: str, tmp_path: Path
) -> None:
    recipe = sharded(strategy)
    simulate(recipe, tmp_path / "simulated")
    with Rehearsal(recipe, tmp_path / "run") as run:
        run.start()
        run.finish()
    assert_same_bits(model_of(tmp_path / "run"), model_of(tmp_path / "simulated"))


@pytest.mark.parametrize("strategy", ["baseline", "sparseloco"])
def test_killed_server_processes_and_a_killed_rank_of_a_sharded_site(strategy: str, tmp_path: Path) -> None:
    recipe = sharded(strategy, steps=90)
    simulate(recipe, tmp_path / "simulated")
    with Rehearsal(recipe, tmp_path / "run", "--checkpoint-every", "7") as run:
        run.start()
        run.until("east", 10)
        run.kill_worker("server", 1)
        run.until("west", 30)
        run.kill_worker("server", 0)
        run.until("east", 50)
        run.kill_worker("east", 1)
        run.until("west", 65)
        run.kill("server")
        run.start("server")
        run.finish()
    assert_same_bits(model_of(tmp_path / "run"), model_of(tmp_path / "simulated"))
    book = event_log.read(tmp_path / "run" / "events.jsonl")
    versions = [e["version"] for e in book if e["kind"] == "round"]
    assert versions == sorted(set(versions)), "no round was closed twice"


def test_a_sharded_site_returns_with_another_number_of_ranks(tmp_path: Path) -> None:
    """What its ranks had in flight and in their residuals is dealt anew, and nothing of it is lost."""
    recipe = sharded("sparseloco", steps=400).with_settings(["training.batch=36"])
    with Rehearsal(recipe, tmp_path / "run", "--checkpoint-every", "5") as run:
        run.start()
        run.until("east", 20)
        run.kill("east")
        run.use(recipe.with_settings(["sites.0.workers=4"]))
        run.start("east")
        run.until("east", 150)
        run.kill("east")
        run.use(recipe.with_settings(["sites.0.workers=1"]))
        run.start("east")
        run.finish()
        assert "joins with global model version" in run.log("east")
    book = event_log.read(tmp_path / "run" / "events.jsonl")
    rounds = [e for e in book if e["kind"] == "round"]
    assert rounds[-1]["step"] == 400
    assert all(e["senders"] == ["east", "west"] for e in rounds)
