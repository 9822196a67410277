"""Chaos with real processes: when faults strike, what a run leaves behind, and one short run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import xxhash

from weightgrad.ledger import Ledger
from weightgrad.runtime import saved
from weightgrad.train.chaos_emulated import EmulatedChaos, disturbed
from weightgrad.train.chaos_schedule import schedule
from weightgrad.train.chaos_storm import Storm
from weightgrad.train.chaos_verdict import first_difference, remains
from weightgrad.train.launch import Standing
from weightgrad.train.recipe import Recipe
from weightgrad.train.recipe_plan import Fault
from weightgrad.train.scenes import Scene, Timetable

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


def tiny(row: str = "weightgrad", *more: str) -> Recipe:
    return Recipe.parse(f"{TINY}strategy: {{name: {row}}}\n", "tiny.yaml").with_settings(more)


def at(step: int, rounds: int = 0, **others: int) -> Standing:
    return Standing({"east": step, "west": step, **others}, {}, rounds, 0, 0.0)


# -- when faults strike ---------------------------------------------------------------------


def played(storm: Storm, seconds: float, now: Standing) -> list[tuple[str, tuple[str, ...]]]:
    found: list[Scene] = []
    while (scene := storm.next(seconds, now)) is not None:
        found.append(scene)
    return [(scene.what, scene.where) for scene in found]


def test_a_fault_strikes_when_the_run_is_so_far_and_ends_by_the_clock() -> None:
    storm = Storm([Fault(50.0, "kill", ("west",), 3.0)], 100.0, 40)
    assert played(storm, 900.0, at(19)) == []
    assert played(storm, 901.0, at(20)) == [("kill", ("west",))]
    assert bool(storm.brings_back)
    assert played(storm, 903.9, at(40)) == []
    assert played(storm, 904.0, at(20, 3)) == [("start", ("west",))]
    assert not bool(storm.brings_back)
    assert (storm.ends, storm.rounds) == ([904.0], [904.0] * 3)


def test_nothing_happens_before_the_first_step() -> None:
    storm = Storm([Fault(1.0, "join", ("west",))], 100.0, 40)
    assert played(storm, float("-inf"), at(40)) == []


def test_a_late_site_comes_by_the_clock_and_holds_nothing_back() -> None:
    storm = Storm([Fault(5.0, "cut", ("hub", "east"), 1.0), Fault(10.0, "join", ("west",))], 100.0, 40)
    assert storm.absent == {"west"}
    assert played(storm, 9.0, at(0)) == []
    assert played(storm, 10.0, at(0)) == [("start", ("west",))]
    assert played(storm, 99.0, at(30, west=0)) == [], "now it is waited for"
    assert played(storm, 99.5, at(30)) == [("cut", ("hub", "east"))]


def test_faults_that_belong_together_strike_into_what_the_first_has_stopped() -> None:
    faults = [
        Fault(50.0, "kill", ("hub",), 5.0),
        Fault(51.0, "kill-worker", ("east", "1")),
        Fault(90.0, "kill", ("west",), 1.0),
    ]
    storm = Storm(faults, 100.0, 40)
    assert played(storm, 7.0, at(20)) == [("kill", ("hub",))]
    assert played(storm, 8.0, at(20)) == [("kill-worker", ("east", "1"))]
    assert played(storm, 300.0, at(20)) == [("start", ("hub",))], "the next waits until something has moved"
    assert played(storm, 301.0, at(36)) == [("kill", ("west",))]


def test_every_fault_of_any_schedule_strikes_before_the_end() -> None:
    for seed in range(30):
        faults = schedule(tiny(), seed, 25, 200.0, longest=6.0)
        storm = Storm(faults, 200.0, 40)
        seconds = 0.0
        for step in range(40):
            for _ in range(20):
                seconds += 0.5
                played(storm, seconds, at(step))
        assert len(storm.struck) == 25
        played(storm, seconds + 10.0, at(39))
        assert len(storm.ends) == 25
        assert not storm.brings_back


def test_a_recipe_s_own_faults_come_by_the_clock() -> None:
    faults = "[{at: 2 s, slow: [hub, east], factor: 0.5, for: 1 s}, {at: 1 s, kill: west, for: 5 s}]"
    plot = Timetable(tiny("weightgrad", f"faults={faults}"))
    assert plot.next(0.9, at(1)) is None
    assert plot.brings_back
    found = [plot.next(9.0, at(1)) for _ in range(5)]
    assert [scene.what for scene in found if scene is not None] == ["kill", "slow", "unslow", "start"]
    assert not plot.brings_back


# -- what a run leaves behind ---------------------------------------------------------------


class Left:
    """A run directory, made by hand: two sites, three rounds."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.bases = [torch.full((3,), float(version)) for version in range(4)]
        (directory / "state").mkdir()
        self.rounds: list[dict[str, Any]] = [
            {"version": n, "base": self.digest(n), "pushes": [["east", n], ["west", n]]} for n in (1, 2, 3)
        ]
        self.sites: dict[str, list[tuple[str, dict[str, int]]]] = {
            name: [("start", {"pushed": 0}), *(("push", {"round": n}) for n in (1, 2, 3))] for name in ("east", "west")
        }
        self.last = {"east": 3, "west": 3}

    def digest(self, version: int) -> str:
        return xxhash.xxh3_64_hexdigest(self.bases[version].numpy().tobytes())

    def write(self) -> Path:
        with Ledger(self.directory / "ledger.jsonl", replace=True) as book:
            for line in self.rounds:
                book.write("round", 0.0, **line)
        for name, lines in self.sites.items():
            place = self.directory / "state" / name
            tensors = {"end.base.base": self.bases[self.last[name]]}
            saved.write(place, "rank-0", 9, tensors, {"version": self.last[name]})
            with Ledger(place / "ledger.jsonl", replace=True) as book:
                for kind, fields in lines:
                    book.write(kind, 0.0, **fields)
        return self.directory


SITES = ("east", "west")


def test_a_good_run(tmp_path: Path) -> None:
    found = remains(Left(tmp_path).write(), SITES)
    assert (found.lost, found.twice, found.differences, found.refused) == ([], [], (), 0)
    assert len(found.pushed) == 6


def test_a_push_in_no_round_is_lost_and_one_in_two_is_there_twice(tmp_path: Path) -> None:
    left = Left(tmp_path)
    left.rounds[1]["pushes"] = [["east", 2], ["east", 3]]
    found = remains(left.write(), SITES)
    assert found.lost == [("west", 2)]
    assert found.twice == [("east", 3)]


def test_what_a_life_pushed_after_its_checkpoint_and_the_next_did_not_is_not_lost(tmp_path: Path) -> None:
    left = Left(tmp_path)
    left.sites["west"] += [("push", {"round": 4}), ("start", {"pushed": 3}), ("push", {"round": 5})]
    left.rounds.append({"version": 4, "base": left.digest(3), "pushes": [["west", 5]]})
    assert remains(left.write(), SITES).lost == [], "it was in pending again, and left under another number"
    left.sites["west"] += [("push", {"round": 6})]
    assert remains(left.write(), SITES).lost == [("west", 6)]


def test_another_base_is_noticed(tmp_path: Path) -> None:
    left = Left(tmp_path)
    left.last["west"] = 2
    assert remains(left.write(), SITES).differences == (), "of an older version, but that version's"
    left.bases[2] = left.bases[2] + 1e-6
    (wrong,) = remains(left.write(), SITES).differences
    assert "west ended with another base of version 2" in wrong
    left.rounds.pop(1)
    assert len(remains(left.write(), SITES).differences) == 2


def test_a_version_that_differs_from_the_undisturbed_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, other = Left(tmp_path / "a"), Left(tmp_path / "b")
    assert first_difference(one.write(), other.write()) is None
    other.rounds[1]["base"] = "0"
    assert first_difference(one.write(), other.write()) == "version 2 of the base is not what it is undisturbed"
    other.rounds.pop(1)
    assert first_difference(one.write(), other.write()) is not None


# -- a run ----------------------------------------------------------------------------------


def test_nobody_is_given_up_unless_the_recipe_says_so() -> None:
    assert disturbed(tiny(), 1)[0].strategy.overrides == {"t_global": None}
    assert disturbed(tiny("weightgrad, t_global: 5"), 1)[0].strategy.overrides == {"t_global": 5}


def test_real_processes_in_chaos_lose_nothing_and_end_with_the_predicted_bits(tmp_path: Path) -> None:
    lines: list[str] = []
    chaos = EmulatedChaos(tiny(), 34, 6, tmp_path, say=lines.append, seconds_per_event=4.0, longest=2.0, measures=False)
    found = chaos.run()
    assert found.good, (found, lines)
    assert (found.events, found.updates_lost, found.bases_equal, found.identical) == (6, 0, True, True)
    assert found.updates == 2 * found.rounds
    assert 0 < found.worst_resume_s < 300
    assert found.worst_stall_s > 0
    assert sum("kill" in line for line in lines) >= 2
