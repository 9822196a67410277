"""Chaos: schedules that anybody can repeat, verdicts that can fail, and five hundred runs that do not."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from typer.testing import CliRunner

from weightgrad.cli import app
from weightgrad.sim.accounts import Accounts
from weightgrad.train.chaos import SimulatedChaos, replay
from weightgrad.train.chaos_schedule import FAR_SECONDS, LOSS, NARROW, SLOWER, conditions, schedule
from weightgrad.train.chaos_verdict import Verdict, all_of, timeless, worst_resume, worst_stall
from weightgrad.train.recipe import Recipe
from weightgrad.train.run import chosen_strategy
from weightgrad.wan.aggregators import Accumulator
from weightgrad.wan.base import Base
from weightgrad.wan.messages import Answer
from weightgrad.wan.outbound import Outbound

from ..sim.toy import Toy

SMALL = """
name: small
data: {name: digits}
model: {name: mlp, options: {width: 4, depth: 1}}
training: {steps: 7, batch: 12, optimizer: {name: sgd, lr: 0.1, momentum: 0.5}}
server: {name: hub}
sites: [{name: a, workers: 1}, {name: b, workers: 1}, {name: c, workers: 2}]
links:
  - {between: [hub, a], bandwidth: 1 Mbit/s, delay: 5 ms}
  - {between: [b, hub], bandwidth: 0.5 Mbit/s, delay: 10 ms}
  - {between: [hub, c], bandwidth: 2 Mbit/s, delay: 20 ms}
compute: {seconds_per_step: 10 ms, jitter: 0.1}
"""
ROWS = (
    ("baseline", "diloco, every: 3", "gaia", "streaming, trigger: 'staggered(4, 4)'", "auto"),
    ("weightgrad", "sparseloco, every: 3", "terngrad", "weightgrad, consistency: 'async_()'", "diloco, every: 2"),
)


def small(row: str = "weightgrad") -> Recipe:
    return Recipe.parse(f"{SMALL}strategy: {{name: {row}}}\n", "small.yaml")


_made: dict[str, SimulatedChaos] = {}


def toy(row: str) -> SimulatedChaos:
    """With a task that needs no data; undisturbed runs are remembered."""
    if row not in _made:
        _made[row] = SimulatedChaos(small(row).with_settings(["sites.2.workers=1"]), Toy(3, workers=1))
    return _made[row]


# -- schedules ------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**40), events=st.integers(1, 60), horizon=st.floats(0.1, 1e4))
def test_a_schedule_is_its_seed_and_lets_the_run_finish(seed: int, events: int, horizon: float) -> None:
    recipe = small()
    faults = schedule(recipe, seed, events, horizon)
    assert faults == schedule(recipe, seed, events, horizon)
    assert len(faults) == events
    assert [f.at_seconds for f in faults] == sorted(f.at_seconds for f in faults)
    assert all(0 < f.at_seconds < horizon for f in faults)
    joins = {f.where[0]: f.at_seconds for f in faults if f.what == "join"}
    assert len(joins) < 3
    for fault in faults:
        assert fault.what in ("kill", "kill-worker", "cut", "flap", "slow", "join")
        assert (fault.for_seconds is None) == (fault.what == "join"), "everything but a join is over some time"
        assert fault.factor is None or 0.02 <= fault.factor <= 0.5
        if fault.what.startswith("kill"):
            assert joins.get(fault.where[0], 0.0) < fault.at_seconds, "nobody dies before he has come"
        if fault.what == "kill-worker":
            assert fault.where[0] == "c"
            assert int(fault.where[1]) < 2


def test_seeds_differ_and_every_kind_of_fault_is_drawn() -> None:
    drawn = [schedule(small(), seed, 10, 1.0) for seed in range(40)]
    assert len(set(drawn)) == 40
    assert {f.what for faults in drawn for f in faults} == {"kill", "kill-worker", "cut", "flap", "slow", "join"}
    assert {f.where[0] for faults in drawn for f in faults if f.what == "kill"} == {"hub", "a", "b", "c"}


def test_the_longest_fault_is_as_long_as_told() -> None:
    faults = [f for seed in range(20) for f in schedule(small(), seed, 20, 160.0, longest=6.0)]
    assert max(f.for_seconds or 0.0 for f in faults) <= 6.0


def test_the_weather_is_the_four_hardships_of_the_issue() -> None:
    seen = set()
    for seed in range(60):
        weather = conditions(small(), seed)
        assert weather == conditions(small(), seed)
        changed = small().with_settings([setting for one in weather for setting in one.settings])
        links = changed.link_list
        for name, there in {
            "loss": any(x.loss == LOSS for x in links),
            "far": any(x.delay_seconds == FAR_SECONDS for x in links),
            "narrow": any(
                x.back_bit_s and max(x.back_bit_s, x.bandwidth_bit_s) == NARROW * x.least_bit_s for x in links
            ),
            "slow": any(s.factor == SLOWER for s in changed.compute.stragglers),
        }.items():
            seen |= {name} if there else set()
        assert len(weather) == sum(
            (any(x.loss for x in links), any(x.delay_seconds > 0.1 for x in links),
             any(x.back_bit_s for x in links), bool(changed.compute.stragglers))
        )  # fmt: skip
    assert seen == {"loss", "far", "narrow", "slow"}


# -- five hundred runs ----------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS, ids=["one half", "other half"])
@settings(max_examples=252, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), seed=st.integers(0, 10**6), events=st.integers(1, 10))
def test_nothing_is_lost_whatever_happens(rows: tuple[str, ...], data: st.DataObject, seed: int, events: int) -> None:
    row = data.draw(st.sampled_from(rows))
    found = toy(row).run(seed, events)
    assert found.good, (row, seed, events, found)
    assert found.events <= events
    assert found.updates > 0


def test_runs_that_wait_for_everybody_have_the_bits_of_an_undisturbed_one() -> None:
    found = [toy("weightgrad, t_global: null").run(seed, 6) for seed in range(12)]
    assert all(one.good for one in found)
    assert [one.identical for one in found].count(True) >= 3, "those without a late site"


def test_a_run_is_its_seed() -> None:
    first, second = (toy("diloco, every: 3").run(11, 8) for _ in range(2))
    assert first == second


# -- verdicts -------------------------------------------------------------------------------


def test_an_update_that_the_server_drops_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = Accumulator.add, 0

    def add(self: Accumulator, sender: str, parts: Any, weight: float = 1.0) -> None:
        nonlocal calls
        calls += bool(parts)
        original(self, sender, () if calls == 2 and parts else parts, weight)

    chaos = toy("weightgrad, t_global: null")
    seed = next(s for s in range(20) if not any(f.what == "join" for f in schedule(small(), s, 3, 1.0)))
    chaos.run(seed, 3)  # so that the undisturbed run is a good one
    monkeypatch.setattr(Accumulator, "add", add)
    found = chaos.run(seed, 3)
    assert not found.good
    assert found.updates_lost == 1
    assert "the sums of the server do not add up" in found.why
    assert not found.bases_equal
    assert found.identical is False


def test_what_pending_forgets_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = Outbound.take, 0

    def take(self: Outbound, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        found = original(self, *args, **options)
        if calls == 5:
            self.held.zero_()
        return found

    chaos = toy("sparseloco, every: 2")
    chaos.run(1, 2)
    monkeypatch.setattr(Outbound, "take", take)
    found = chaos.run(1, 2)
    assert not found.good
    assert found.updates_lost == 1
    assert "do not add up" in found.why


def test_a_base_of_its_own_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original, bases = Base.apply, list[Base]()

    def apply(self: Base, answer: Answer, mean: Tensor | None = None) -> None:
        original(self, answer, mean)
        bases.append(self)
        if answer.version == 2 and self is bases[0]:  # the server moves first
            return
        if answer.version == 2 and not torch.equal(self.vector, bases[0].vector):
            return
        if answer.version == 2:
            self.vector[0] += 1e-3

    chaos = toy("gaia")
    chaos.run(3, 2)
    monkeypatch.setattr(Base, "apply", apply)
    found = chaos.run(3, 2)
    assert not found.bases_equal
    assert "another base than the server" in found.why
    assert not found.good


def test_a_push_that_is_never_taken_and_one_that_is_taken_twice_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Accounts.taken
    monkeypatch.setattr(Accounts, "taken", lambda self, closed: [original(self, closed) for _ in range(2)])
    twice = toy("diloco, every: 3").run(4, 2)
    assert twice.updates_twice == twice.updates
    assert not twice.good
    monkeypatch.setattr(Accounts, "taken", lambda self, closed: None)
    lost = toy("diloco, every: 3").run(4, 2)
    assert lost.updates_lost == lost.updates
    assert not lost.good
    assert "is lost" in lost.why


def test_a_run_that_never_ends_is_not_good(monkeypatch: pytest.MonkeyPatch) -> None:
    chaos = toy("diloco, every: 3")
    chaos.run(5, 2)
    monkeypatch.setattr("weightgrad.train.chaos._PATIENCE", 0.1)
    found = chaos.run(5, 2)
    assert not found.good
    assert "has not finished" in found.why


@pytest.mark.parametrize(
    ("row", "same"),
    [
        ("weightgrad, t_global: null", True),
        ("baseline, t_global: null", True),
        ("baseline", False),  # who is away for a minute is given up
        ("gaia, t_global: null", False),  # runs ahead
        ("weightgrad-paper, t_global: null", False),  # calls
        ("auto, t_global: null", False),  # measures
        ("diloco, t_global: null, consistency: 'async_()'", False),
    ],
)
def test_which_rows_depend_on_nothing_but_the_recipe(row: str, same: bool) -> None:
    assert timeless(chosen_strategy(small(row))) is same


def test_resume_and_stall() -> None:
    rounds = [1.0, 2.0, 7.0, 8.0]
    assert worst_stall(rounds) == 5.0
    assert worst_resume([1.5, 3.0], rounds) == 4.0
    assert worst_resume([9.0], rounds) == 0.0
    assert worst_stall([]) == worst_resume([], []) == 0.0


def test_many_runs_are_as_bad_as_the_worst() -> None:
    good = Verdict(events=3, updates_lost=0, bases_equal=True, worst_resume_s=1.0, worst_stall_s=2.0, seed=4)
    bad = Verdict(
        events=2, updates_lost=1, bases_equal=False, worst_resume_s=3.0, worst_stall_s=1.0, seed=5, why="x", command="y"
    )
    together = all_of([good, bad])
    assert (together.events, together.updates_lost, together.bases_equal) == (5, 1, False)
    assert (together.worst_resume_s, together.worst_stall_s, together.command) == (3.0, 2.0, "y")
    assert not together.good
    assert all_of([good, good]).good


# -- the command ----------------------------------------------------------------------------


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.yaml").write_text(f"{SMALL}strategy: {{name: diloco, every: 3}}\n")
    monkeypatch.chdir(tmp_path)
    command = ["chaos", "small.yaml", "--seed", "3", "--events", "4", "--simulated"]
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 0, told.output
    assert "bases equal   yes" in told.output
    assert "updates lost  0 of" in told.output
    assert len([line for line in told.output.splitlines() if "s: " in line]) == 4, "one line an event"
    many = CliRunner().invoke(app, [*command, "--schedules", "2", "--strategies", "baseline,diloco(every=2)", "--json"])
    assert many.exit_code == 0, many.output
    found = json.loads(many.stdout)
    assert found.keys() >= {"events", "updates_lost", "bases_equal", "worst_resume_s", "worst_stall_s"}
    assert found["schedules"] == 4
    assert found["events"] == 16
    assert (found["updates_lost"], found["bases_equal"], found["failures"]) == (0, True, [])


def test_a_failing_schedule_prints_the_command_that_replays_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.yaml").write_text(f"{SMALL}strategy: gaia\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Accounts, "taken", lambda self, closed: None)
    setting = "strategy={name: diloco, every: 2}"
    command = ["chaos", "small.yaml", "--seed", "3", "--events", "4", "--simulated", "--set", setting]
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 1
    (again,) = [line.removeprefix("again").strip() for line in told.output.splitlines() if line.startswith("again")]
    assert shlex.split(again) == ["weightgrad", *command]
    assert CliRunner().invoke(app, shlex.split(again)[1:]).exit_code == 1
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, shlex.split(again)[1:]).exit_code == 0


def test_a_replay_can_be_typed() -> None:
    again = replay("recipes/my own.yaml", 7, 100, "--set", "strategy={name: diloco}")
    assert shlex.split(again)[:6] == ["weightgrad", "chaos", "recipes/my own.yaml", "--seed", "7", "--events"]
