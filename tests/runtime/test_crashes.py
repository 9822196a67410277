"""kill -9 of any role at any moment, and the same command again: the run ends with the same bits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import fork_server
from weightgrad import event_log
from weightgrad.lab.run.simulation import simulate

from .deployment import Rehearsal, assert_same_bits, model_of, tiny


@pytest.mark.parametrize(("strategy", "cold"), [("baseline", False), ("ahead", False), ("weightgrad", True)])
def test_killed_server_and_killed_site(strategy: str, cold: bool, tmp_path: Path) -> None:
    recipe = tiny(strategy, workers=1, steps=60)
    simulate(recipe, tmp_path / "simulated")
    popen = subprocess.Popen if cold else fork_server.popen()
    with Rehearsal(recipe, tmp_path / "run", "--checkpoint-every", "7", popen=popen) as run:
        run.start()
        run.until("east", 10)
        run.kill("server")
        run.start("server")
        run.until("west", 25)
        run.kill("west")
        run.start("west")
        run.until("east", 40)
        run.kill("east")
        run.kill("server")
        run.start("server", "east")
        run.finish()
    assert_same_bits(model_of(tmp_path / "run"), model_of(tmp_path / "simulated"))
    book = event_log.read(tmp_path / "run" / "events.jsonl")
    versions = [e["version"] for e in book if e["kind"] == "round"]
    assert versions == sorted(set(versions)), "no round was closed twice"


def test_killed_workers_are_started_again_by_torchrun(tmp_path: Path) -> None:
    recipe = tiny("weightgrad", steps=60)  # encoded inside the site too, with states to remember
    simulate(recipe, tmp_path / "simulated")
    with Rehearsal(recipe, tmp_path / "run", "--checkpoint-every", "7") as run:
        run.start()
        run.until("east", 15)
        run.kill_worker("east", 1)
        run.until("west", 25)
        run.kill_worker("west", 0)
        run.finish()
    assert_same_bits(model_of(tmp_path / "run"), model_of(tmp_path / "simulated"))
