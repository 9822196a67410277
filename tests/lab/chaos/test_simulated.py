"""Chaos: schedules that anybody can repeat, verdicts that can fail, and five hundred runs that do not."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from weightgrad.cli import app
from weightgrad.core.residual import Residual
from weightgrad.core.server.push_facts import PushFacts
from weightgrad.core.server.shard import ServerShard
from weightgrad.core.site.shard_orders import ApplyOrder
from weightgrad.core.site.update_shard import UpdateShard
from weightgrad.lab.chaos.random_faults import FAR_SECONDS, LOSS, NARROW, SLOWER, random_conditions, random_faults
from weightgrad.lab.chaos.simulated import SimulatedChaos, replay
from weightgrad.lab.chaos.verdict import Verdict, combine, is_deterministic, worst_resume, worst_stall
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.simulation import chosen_strategy
from weightgrad.lab.sim.conservation import ConservationAudit
from weightgrad.wire.messages import RoundResult, Segment

from ..sim.toy_task import Toy

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


def small(strategy: str = "weightgrad") -> Recipe:
    return Recipe.parse(f"{SMALL}strategy: {{name: {strategy}}}\n", "small.yaml")


_made: dict[str, SimulatedChaos] = {}


def toy(strategy: str) -> SimulatedChaos:
    """With a task that needs no data; undisturbed runs are remembered."""
    if strategy not in _made:
        _made[strategy] = SimulatedChaos(small(strategy).with_settings(["sites.2.workers=1"]), Toy(3, workers=1))
    return _made[strategy]


# -- schedules ------------------------------------------------------------------------------


@settings(max_examples=200)
@given(seed=st.integers(0, 2**40), events=st.integers(1, 60), horizon=st.floats(0.1, 1e4))
def test_a_schedule_is_its_seed_and_lets_the_run_finish(seed: int, events: int, horizon: float) -> None:
    recipe = small()
    faults = random_faults(recipe, seed, events, horizon)
    assert faults == random_faults(recipe, seed, events, horizon)
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
    drawn = [random_faults(small(), seed, 10, 1.0) for seed in range(40)]
    assert len(set(drawn)) == 40
    assert {f.what for faults in drawn for f in faults} == {"kill", "kill-worker", "cut", "flap", "slow", "join"}
    assert {f.where[0] for faults in drawn for f in faults if f.what == "kill"} == {"hub", "a", "b", "c"}


def test_sharded_sites_and_server_processes_fail_in_parts() -> None:
    recipe = small().with_settings(["sites.2.sharding=fsdp2", "server.processes=3"])
    faults = [f for seed in range(60) for f in random_faults(recipe, seed, 10, 1.0)]
    assert {f.where for f in faults if f.what == "resize"} == {("c", "1"), ("c", "2")}
    killed = {f.where for f in faults if f.what == "kill-worker"}
    assert killed == {("c", "0"), ("c", "1"), ("hub", "0"), ("hub", "1"), ("hub", "2")}
    assert SimulatedChaos.of(recipe).run(3, 12).good


def test_the_longest_fault_is_as_long_as_told() -> None:
    faults = [f for seed in range(20) for f in random_faults(small(), seed, 20, 160.0, longest=6.0)]
    assert max(f.for_seconds or 0.0 for f in faults) <= 6.0


def test_the_weather_is_the_four_hardships_of_the_issue() -> None:
    seen = set()
    for seed in range(60):
        conditions = random_conditions(small(), seed)
        assert conditions == random_conditions(small(), seed)
        changed = small().with_settings([setting for one in conditions for setting in one.settings])
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
        assert len(conditions) == sum(
            (any(x.loss for x in links), any(x.delay_seconds > 0.1 for x in links),
             any(x.back_bit_s for x in links), bool(changed.compute.stragglers))
        )  # fmt: skip
    assert seen == {"loss", "far", "narrow", "slow"}


# -- five hundred runs ----------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS, ids=["one half", "other half"])
@settings(max_examples=252, suppress_health_check=list(HealthCheck))
@given(data=st.data(), seed=st.integers(0, 10**6), events=st.integers(1, 10))
def test_nothing_is_lost_whatever_happens(rows: tuple[str, ...], data: st.DataObject, seed: int, events: int) -> None:
    strategy = data.draw(st.sampled_from(rows))
    found = toy(strategy).run(seed, events)
    assert found.good, (strategy, seed, events, found)
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
    original, calls = ServerShard.receive, 0

    def receive(self: ServerShard, site: str, round_: int, segments: tuple[Segment, ...]) -> PushFacts:
        nonlocal calls
        calls += bool(segments)
        return original(self, site, round_, () if calls == 2 else segments)

    chaos = toy("weightgrad, t_global: null")
    seed = next(s for s in range(20) if not any(f.what == "join" for f in random_faults(small(), s, 3, 1.0)))
    chaos.run(seed, 3)  # so that the undisturbed run is a good one
    monkeypatch.setattr(ServerShard, "receive", receive)
    found = chaos.run(seed, 3)
    assert not found.good
    assert found.updates_lost == 1
    assert "the sums of the server do not add up" in found.why
    assert not found.models_equal
    assert found.identical is False


def test_what_residual_forgets_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = Residual.take, 0

    def take(self: Residual, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        found = original(self, *args, **options)
        if calls == 5:
            self.whole().zero_()
        return found

    chaos = toy("sparseloco, every: 2")
    chaos.run(1, 2)
    monkeypatch.setattr(Residual, "take", take)
    found = chaos.run(1, 2)
    assert not found.good
    assert found.updates_lost == 1
    assert "do not add up" in found.why


def test_a_global_model_of_its_own_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original, struck = UpdateShard.apply, False

    def apply(self: UpdateShard, order: ApplyOrder, result: RoundResult) -> None:
        nonlocal struck
        original(self, order, result)
        if order.version == 2 and not struck:
            struck = True
            self.global_model[0] += 1e-3

    chaos = toy("gaia")
    chaos.run(3, 2)
    monkeypatch.setattr(UpdateShard, "apply", apply)
    found = chaos.run(3, 2)
    assert not found.models_equal
    assert "another global model than the server" in found.why
    assert not found.good


def test_a_push_that_is_never_taken_and_one_that_is_taken_twice_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ConservationAudit.record_round
    monkeypatch.setattr(
        ConservationAudit, "record_round", lambda self, closed: [original(self, closed) for _ in range(2)]
    )
    twice = toy("diloco, every: 3").run(4, 2)
    assert twice.updates_twice == twice.updates
    assert not twice.good
    monkeypatch.setattr(ConservationAudit, "record_round", lambda self, closed: None)
    lost = toy("diloco, every: 3").run(4, 2)
    assert lost.updates_lost == lost.updates
    assert not lost.good
    assert "is lost" in lost.why


def test_a_run_that_never_ends_is_not_good(monkeypatch: pytest.MonkeyPatch) -> None:
    chaos = toy("diloco, every: 3")
    chaos.run(5, 2)
    monkeypatch.setattr("weightgrad.lab.chaos.simulated._TIMEOUT", 0.1)
    found = chaos.run(5, 2)
    assert not found.good
    assert "has not finished" in found.why


@pytest.mark.parametrize(
    ("strategy", "same"),
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
def test_which_strategies_depend_on_nothing_but_the_recipe(strategy: str, same: bool) -> None:
    assert is_deterministic(chosen_strategy(small(strategy))) is same


def test_resume_and_stall() -> None:
    rounds = [1.0, 2.0, 7.0, 8.0]
    assert worst_stall(rounds) == 5.0
    assert worst_resume([1.5, 3.0], rounds) == 4.0
    assert worst_resume([9.0], rounds) == 0.0
    assert worst_stall([]) == worst_resume([], []) == 0.0


def test_many_runs_are_as_bad_as_the_worst() -> None:
    good = Verdict(events=3, updates_lost=0, models_equal=True, worst_resume_s=1.0, worst_stall_s=2.0, seed=4)
    bad = Verdict(
        events=2,
        updates_lost=1,
        models_equal=False,
        worst_resume_s=3.0,
        worst_stall_s=1.0,
        seed=5,
        why="x",
        command="y",
    )
    together = combine([good, bad])
    assert (together.events, together.updates_lost, together.models_equal) == (5, 1, False)
    assert (together.worst_resume_s, together.worst_stall_s, together.command) == (3.0, 2.0, "y")
    assert not together.good
    assert combine([good, good]).good


# -- the command ----------------------------------------------------------------------------


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.yaml").write_text(f"{SMALL}strategy: {{name: diloco, every: 3}}\n")
    monkeypatch.chdir(tmp_path)
    command = ["chaos", "small.yaml", "--seed", "3", "--events", "4", "--simulated"]
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 0, told.output
    assert "equal models   yes" in told.output
    assert "updates lost   0 of" in told.output
    assert len([line for line in told.output.splitlines() if "s: " in line]) == 4, "one line an event"
    many = CliRunner().invoke(app, [*command, "--schedules", "2", "--strategies", "baseline,diloco(every=2)", "--json"])
    assert many.exit_code == 0, many.output
    found = json.loads(many.stdout)
    assert found.keys() >= {"events", "updates_lost", "models_equal", "worst_resume_s", "worst_stall_s"}
    assert found["schedules"] == 4
    assert found["events"] == 16
    assert (found["updates_lost"], found["models_equal"], found["failures"]) == (0, True, [])


def test_a_failing_schedule_prints_the_command_that_replays_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.yaml").write_text(f"{SMALL}strategy: gaia\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ConservationAudit, "record_round", lambda self, closed: None)
    setting = "strategy={name: diloco, every: 2}"
    command = ["chaos", "small.yaml", "--seed", "3", "--events", "4", "--simulated", "--set", setting]
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 1
    (again,) = [
        line.removeprefix("to repeat").strip() for line in told.output.splitlines() if line.startswith("to repeat")
    ]
    assert shlex.split(again) == ["weightgrad", *command]
    assert CliRunner().invoke(app, shlex.split(again)[1:]).exit_code == 1
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, shlex.split(again)[1:]).exit_code == 0


def test_a_replay_can_be_typed() -> None:
    again = replay("recipes/my own.yaml", 7, 100, "--set", "strategy={name: diloco}")
    assert shlex.split(again)[:6] == ["weightgrad", "chaos", "recipes/my own.yaml", "--seed", "7", "--events"]
