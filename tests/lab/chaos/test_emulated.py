"""Chaos with real processes: when faults strike, what a run leaves behind, and one short run."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from weightgrad.core.global_model import digest_of
from weightgrad.event_log import EventLog
from weightgrad.lab.chaos.emulated import EmulatedChaos, with_conditions
from weightgrad.lab.chaos.progress_schedule import ProgressFaultSchedule
from weightgrad.lab.chaos.random_faults import random_faults
from weightgrad.lab.chaos.verdict import audit_deployment, first_difference
from weightgrad.lab.recipes.expansion import Fault
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.fault_schedule import FaultAction, TimedFaultSchedule
from weightgrad.lab.run.launch import RunProgress
from weightgrad.wire.intervals import Intervals

TINY = """
name: tiny
data: {name: digits}
model: {name: mlp, options: {width: 8, depth: 1}}
training: {steps: 40, batch: 12, optimizer: {name: sgd, lr: 0.1, momentum: 0.5}}
server: {name: hub}
sites: [{name: east, workers: 2}, {name: west, workers: 1}]
links:
  - {between: [hub, east], bandwidth: 4 Mbit/s, delay: 5 ms}
  - {between: [hub, west], bandwidth: 2 Mbit/s, delay: 20 ms}
compute: {seconds_per_step: 40 ms}
"""


def tiny(strategy: str = "weightgrad", *more: str) -> Recipe:
    return Recipe.parse(f"{TINY}strategy: {{name: {strategy}}}\n", "tiny.yaml").with_settings(more)


def at(step: int, rounds: int = 0, **others: int) -> RunProgress:
    return RunProgress({"east": step, "west": step, **others}, {}, rounds, 0, 0.0)


# -- when faults strike ---------------------------------------------------------------------


def played(schedule: ProgressFaultSchedule, seconds: float, now: RunProgress) -> list[tuple[str, tuple[str, ...]]]:
    found: list[FaultAction] = []
    while (action := schedule.next(seconds, now)) is not None:
        found.append(action)
    return [(action.what, action.where) for action in found]


def test_a_fault_strikes_when_the_run_is_so_far_and_ends_by_the_clock() -> None:
    schedule = ProgressFaultSchedule([Fault(50.0, "kill", ("west",), 3.0)], 100.0, 40)
    assert played(schedule, 900.0, at(19)) == []
    assert played(schedule, 901.0, at(20)) == [("kill", ("west",))]
    assert bool(schedule.has_pending_start)
    assert played(schedule, 903.9, at(40)) == []
    assert played(schedule, 904.0, at(20, 3)) == [("start", ("west",))]
    assert not bool(schedule.has_pending_start)
    assert (schedule.ends, schedule.rounds) == ([904.0], [904.0] * 3)


def test_nothing_happens_before_the_first_step() -> None:
    schedule = ProgressFaultSchedule([Fault(1.0, "join", ("west",))], 100.0, 40)
    assert played(schedule, float("-inf"), at(40)) == []


def test_a_late_site_comes_by_the_clock_and_holds_nothing_back() -> None:
    schedule = ProgressFaultSchedule(
        [Fault(5.0, "cut", ("hub", "east"), 1.0), Fault(10.0, "join", ("west",))], 100.0, 40
    )
    assert schedule.absent == {"west"}
    assert played(schedule, 9.0, at(0)) == []
    assert played(schedule, 10.0, at(0)) == [("start", ("west",))]
    assert played(schedule, 99.0, at(30, west=0)) == [], "now it is waited for"
    assert played(schedule, 99.5, at(30)) == [("cut", ("hub", "east"))]


def test_faults_that_belong_together_strike_into_what_the_first_has_stopped() -> None:
    faults = [
        Fault(50.0, "kill", ("hub",), 5.0),
        Fault(51.0, "kill-worker", ("east", "1")),
        Fault(90.0, "kill", ("west",), 1.0),
    ]
    schedule = ProgressFaultSchedule(faults, 100.0, 40)
    assert played(schedule, 7.0, at(20)) == [("kill", ("hub",))]
    assert played(schedule, 8.0, at(20)) == [("kill-worker", ("east", "1"))]
    assert played(schedule, 300.0, at(20)) == [("start", ("hub",))], "the next waits until something has moved"
    assert played(schedule, 301.0, at(36)) == [("kill", ("west",))]


def test_every_fault_of_any_schedule_strikes_before_the_end() -> None:
    for seed in range(30):
        faults = random_faults(tiny(), seed, 25, 200.0, longest=6.0)
        schedule = ProgressFaultSchedule(faults, 200.0, 40)
        seconds = 0.0
        for step in range(40):
            for _ in range(20):
                seconds += 0.5
                played(schedule, seconds, at(step))
        assert len(schedule.struck) == 25
        played(schedule, seconds + 10.0, at(39))
        assert len(schedule.ends) == 25
        assert not schedule.has_pending_start


def test_a_recipe_s_own_faults_come_by_the_clock() -> None:
    faults = "[{at: 2 s, slow: [hub, east], factor: 0.5, for: 1 s}, {at: 1 s, kill: west, for: 5 s}]"
    schedule = TimedFaultSchedule(tiny("weightgrad", f"faults={faults}"))
    assert schedule.next(0.9, at(1)) is None
    assert schedule.has_pending_start
    found = [schedule.next(9.0, at(1)) for _ in range(5)]
    assert [action.what for action in found if action is not None] == ["kill", "slow", "unslow", "start"]
    assert not schedule.has_pending_start


# -- what a run leaves behind ---------------------------------------------------------------


class Left:
    """A run directory, made by hand: two sites, three rounds."""

    def __init__(self, directory: Path, tensor: str = "vector.global_model") -> None:
        self.directory, self.tensor = directory, tensor
        self.global_models = [torch.full((3,), float(version)) for version in range(4)]
        (directory / "state").mkdir()
        self.rounds: list[dict[str, Any]] = [
            {"version": n, "digest": self.digest(n), "pushes": [["east", n], ["west", n]]} for n in (1, 2, 3)
        ]
        self.sites: dict[str, list[tuple[str, dict[str, int]]]] = {
            name: [("start", {"pushed": 0}), *(("push", {"round": n}) for n in (1, 2, 3))] for name in ("east", "west")
        }
        self.last = {"east": 3, "west": 3}

    def digest(self, version: int) -> str:
        return f"{digest_of(self.global_models[version], Intervals.whole(3)):016x}"

    def write(self) -> Path:
        with EventLog(self.directory / "events.jsonl", replace=True) as log:
            for line in self.rounds:
                log.write("round", 0.0, **line)
        for name, lines in self.sites.items():
            place = self.directory / "state" / name
            self.write_checkpoint(place / "checkpoint-000000000009", self.last[name])
            with EventLog(place / "events.jsonl", replace=True) as log:
                for kind, fields in lines:
                    log.write(kind, 0.0, **fields)
        return self.directory

    def write_checkpoint(self, place: Path, version: int) -> None:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        (place / "facts.json").write_text(json.dumps({"version": version, "layout": [["w", [3]]]}))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            tensors = {self.tensor: self.global_models[version]}
            save(tensors, storage_writer=FileSystemWriter(place), no_dist=True)


SITES = ("east", "west")


@pytest.mark.parametrize("tensor", ["vector.global_model", "model.w"], ids=["shares updates", "shares gradients"])
def test_a_good_run(tmp_path: Path, tensor: str) -> None:
    found = audit_deployment(Left(tmp_path, tensor).write(), SITES)
    assert (found.lost, found.twice, found.differences, found.refused) == ([], [], (), 0)
    assert len(found.pushed) == 6


def test_a_push_in_no_round_is_lost_and_one_in_two_is_there_twice(tmp_path: Path) -> None:
    left = Left(tmp_path)
    left.rounds[1]["pushes"] = [["east", 2], ["east", 3]]
    found = audit_deployment(left.write(), SITES)
    assert found.lost == [("west", 2)]
    assert found.twice == [("east", 3)]


def test_what_a_life_pushed_after_its_checkpoint_and_the_next_did_not_is_not_lost(tmp_path: Path) -> None:
    left = Left(tmp_path)
    left.sites["west"] += [("push", {"round": 4}), ("start", {"pushed": 3}), ("push", {"round": 5})]
    left.rounds.append({"version": 4, "digest": left.digest(3), "pushes": [["west", 5]]})
    assert audit_deployment(left.write(), SITES).lost == [], (
        "it was in the residual again, and left under another number"
    )
    left.sites["west"] += [("push", {"round": 6})]
    assert audit_deployment(left.write(), SITES).lost == [("west", 6)]


def test_another_global_model_is_noticed(tmp_path: Path) -> None:
    left = Left(tmp_path)
    left.last["west"] = 2
    assert audit_deployment(left.write(), SITES).differences == (), "of an older version, but that version's"
    left.global_models[2] = left.global_models[2] + 1e-6
    (wrong,) = audit_deployment(left.write(), SITES).differences
    assert "west ended with another global model of version 2" in wrong
    left.rounds.pop(1)
    assert len(audit_deployment(left.write(), SITES).differences) == 2


def test_a_version_that_differs_from_the_undisturbed_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, other = Left(tmp_path / "a"), Left(tmp_path / "b")
    assert first_difference(one.write(), other.write()) is None
    other.rounds[1]["digest"] = "0"
    assert (
        first_difference(one.write(), other.write())
        == "version 2 of the global model differs from that of the run without faults"
    )
    other.rounds.pop(1)
    assert first_difference(one.write(), other.write()) is not None


# -- a run ----------------------------------------------------------------------------------


def test_nobody_is_given_up_unless_the_recipe_says_so() -> None:
    assert with_conditions(tiny(), 1)[0].strategy.overrides == {"t_global": None}
    assert with_conditions(tiny("weightgrad, t_global: 5"), 1)[0].strategy.overrides == {"t_global": 5}


def test_real_processes_in_chaos_lose_nothing_and_end_with_the_predicted_bits(tmp_path: Path) -> None:
    lines: list[str] = []
    chaos = EmulatedChaos(tiny(), 34, 6, tmp_path, say=lines.append, seconds_per_event=4.0, longest=2.0, measures=False)
    found = chaos.run()
    assert found.good, (found, lines)
    assert (found.events, found.updates_lost, found.models_equal, found.identical) == (6, 0, True, True)
    assert found.updates == 2 * found.rounds
    assert 0 < found.worst_resume_s < 300
    assert found.worst_stall_s > 0
    assert sum("kill" in line for line in lines) >= 2
