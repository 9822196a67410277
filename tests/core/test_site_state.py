"""A site that is killed and comes back with an old state does its steps again, and ends with the same bits."""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightgrad.core import parts
from weightgrad.core.global_model import GlobalModel
from weightgrad.core.server.result_log import ResultLog
from weightgrad.core.server.state import Outbox, ServerState
from weightgrad.core.site.state import SiteState
from weightgrad.core.strategies import PRESETS, find
from weightgrad.kernels.noise import derive
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.messages import Message, RoundResult

from .harness import LAYOUT, noise

STEPS = 25
EPOCH = 6  # steps, so that the dynamic threshold moves
# Short rounds and small models: every part of a strategy has something to do in a few steps.
CHANGES: dict[str, dict[str, Any]] = {
    "dgc": {"up": "dgc(0.05, momentum=0.9, warmup=5)"},
    "onebit": {"up": "warmup(2, onebit())", "down": "warmup(2, onebit())"},
    "adaptive": {"up": "warmup(2, adaptive(pi=64))"},
    "diloco": {"every": 3},
    "streaming": {"trigger": "staggered(4, 4)"},
    "sparseloco": {"every": 4, "up": "ef(topk(0.1) > codebook(bits=2))"},
    "weightgrad": {"overlap": 2, "trigger": "significance(threshold=1.2, at_most=4, low=1.1, every=2)"},
    "weightgrad-serial": {"overlap": 1},
}
LOSSY = {"every": 3, "up": "ef(topk(0.2))", "down": "ef(topk(0.4))"}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, CHANGES.get(name, {})) for name in PRESETS},
    "waiting": ("diloco", LOSSY),
    "waiting with a share": ("diloco", {**LOSSY, "resume": "global_model_and_residual(0.25)"}),
    "overlapped": ("diloco", {**LOSSY, "overlap": 2}),
    "overlapped with all": ("diloco", {**LOSSY, "overlap": 2, "resume": "global_model_and_residual"}),
    "waiting for fragments": (
        "streaming",
        {"trigger": "staggered(4, 4)", "overlap": 0, "resume": "global_model", "up": "ef(topk(0.2))"},
    ),
    "fragments with states": (
        "streaming",
        {"trigger": "staggered(4, 4)", "up": "dgc(0.2, momentum=0.5)", "down": "dgc(0.3, momentum=0.5)"},
    ),
    "pieces with states": ("diloco", {"every": 2, "up": "dgc(0.2, momentum=0.5)", "down": "dgc(0.3, momentum=0.5)"}),
    "elements": (
        "weightgrad",
        {
            "selector": "significant('element')",
            "up": "qsgd(bits=4)",
            "trigger": "significance(2.0, at_most=4, every=2)",
        },
    ),
}
HOLDINGS = {
    "east": [Intervals(((0, 15), (30, 33))), Intervals(((15, 30), (33, 64)))],
    "west": [Intervals(((40, 50),)), Intervals(()), Intervals(((0, 40), (50, 64)))],
}


def untold(step: int) -> float:
    raise AssertionError(f"nobody said the rate of step {step}")


class Kept:
    """A log that forgets nothing, as the server's on disk."""

    def __init__(self) -> None:
        self._results: dict[int, RoundResult] = {}

    def append(self, result: RoundResult) -> None:
        self._results[result.version] = result

    @property
    def first(self) -> int:
        return min(self._results, default=2**62)

    def since(self, version: int, now: int) -> tuple[RoundResult, ...] | None:
        return tuple(self._results[number] for number in range(version + 1, now + 1))

    def restart(self, version: int) -> None:
        self._results = {number: result for number, result in self._results.items() if number <= version}


class World:
    """Two sites that take STEPS steps each, queues between them and the server, and states to come back with.

    Args:
        row: a key of ROWS.
        sharded: whether the sites have several ranks.
    """

    def __init__(self, row: str, *, sharded: bool = False) -> None:
        name, changes = ROWS[row]
        self.strategy = find(name, changes)
        self.holdings = HOLDINGS if sharded else {}
        self.now = 0.0
        self.server = self._server(Kept())
        self.names = ["east", "west"]
        self.ends = {name: self._end(name) for name in self.names}
        self.states = {name: end.state() for name, end in self.ends.items()}
        self.up_queue: dict[str, deque[Message]] = {name: deque() for name in self.names}
        self.down_queue: dict[str, deque[Message]] = {name: deque() for name in self.names}
        self.global_models: dict[int, str] = {}
        for name in self.names:
            self.server.members.join(name)
            self.up_queue[name].extend(self.ends[name].join())
        self.checkpoint = self.server.checkpoint()

    def _global_model(self) -> GlobalModel:
        optimizer = ("sgd", {"lr": 0.1, "momentum": 0.9}) if self.strategy.shares == "gradients" else None
        return GlobalModel(LAYOUT, noise(99), optimizer=optimizer, rate=untold)

    def _end(self, name: str) -> SiteState:
        return SiteState(
            name,
            self._global_model(),
            self.strategy.for_site(),
            samples=8,
            key=derive(2, self.names.index(name)),
            holdings=self.holdings.get(name),
        )

    def _server(self, log: ResultLog) -> ServerState:
        made = ServerState(self._global_model(), self.strategy.for_server(), 1, make_log=lambda _: log)
        for name, held in self.holdings.items():
            made.set_holdings(name, held)
        return made

    # -- what may happen --------------------------------------------------------------------

    def step(self, name: str) -> bool:
        """One local step, or the end of training, if the site may."""
        end = self.ends[name]
        end.apply_results()
        if end.finishing or end.blocked(self.now) is not None:
            return False
        self.now += 0.01
        if end.step == STEPS:
            self.up_queue[name].extend(end.finish(self.now))
            return True
        if end.step and end.step % EPOCH == 0:
            end.new_epoch()
        # It depends on the weights, so that a wrong bit anywhere is wrong everywhere soon.
        made = noise(self.names.index(name), end.step) * 0.1 - 0.05 * end.model
        if self.strategy.shares == "gradients":
            end.rate = 0.1 / (1 + end.step)  # as in a deployment, where the server does not know it
            self.up_queue[name].extend(end.after_step(self.now, made))
        else:
            end.model += made
            self.up_queue[name].extend(end.after_step(self.now))
        end.apply_results()
        return True

    def up(self, name: str) -> bool:
        if not self.up_queue[name]:
            return False
        self._act(self.server.receive(self.up_queue[name].popleft(), self.now))
        return True

    def down(self, name: str) -> bool:
        if not self.down_queue[name]:
            return False
        self.up_queue[name].extend(self.ends[name].receive(self.down_queue[name].popleft(), self.now))
        return True

    def save(self, name: str) -> bool:
        self.states[name] = self.ends[name].state()
        return True

    def kill(self, name: str) -> bool:
        """kill -9, and the same command again: all that is left is the last state that was written."""
        self.up_queue[name].clear()
        self.down_queue[name].clear()
        end = self.ends[name] = self._end(name)
        end.load(self.states[name])
        self.up_queue[name].extend(end.join())
        return True

    def kill_server(self, name: str) -> bool:
        del name
        for queue in (*self.up_queue.values(), *self.down_queue.values()):
            queue.clear()
        self.server = self._server(self.server.shards[0].log)
        self._act(self.server.restore(self.checkpoint))
        return True

    def _act(self, out: Outbox) -> None:
        for closed in out.closed:
            assert self.global_models.setdefault(closed.result.version, closed.digest) == closed.digest
        if out.closed:
            self.checkpoint = self.server.checkpoint()
        for name, message in out.messages:
            self.down_queue[name].append(message)

    def finish(self) -> World:
        """Everything goes its way until nothing moves."""
        moves = (self.step, self.up, self.down)
        while sum(move(name) for name in self.names for move in moves):
            pass
        for name, end in self.ends.items():
            end.apply_results()
            assert end.finished, (name, end.blocked(self.now), end.step)
            assert end.digest() == self.server.global_model.digest()
        return self


def deterministic(row: str) -> bool:
    """Whether a run of this strategy does not depend on how fast messages are."""
    name, changes = ROWS[row]
    strategy = find(name, changes)
    return (
        strategy.consistency == "sync" and not parts.parse("trigger", strategy.trigger).calls and strategy.auto is None
    )


@cache
def undisturbed(row: str, *, sharded: bool) -> World:
    return World(row, sharded=sharded).finish()


def schedules(*more: str) -> st.SearchStrategy[list[tuple[str, int]]]:
    usual = ["step"] * 4 + ["up"] * 4 + ["down"] * 4 + ["save"]
    return st.lists(st.tuples(st.sampled_from([*usual, *more]), st.integers(0, 1)), max_size=100)


# West is killed when the server has its first push; east's closes the round, and its result comes before the JoinReply.
ANSWERED_BEFORE_WELCOMED = [
    *[("up", 0), ("up", 1), ("down", 0), ("down", 1)],
    *[("step", 1), ("up", 1), ("kill", 1), ("step", 0), ("up", 0), ("down", 1), ("step", 1)],
]


# West has pushed and waits, or has some pushes in flight, when its state is written.
SAVED_WHILE_WAITING = [
    *[("up", 0), ("up", 1), ("down", 0), ("down", 1)],
    *[("step", 1), ("step", 1), ("step", 1), ("step", 1), ("save", 1), ("up", 1), ("kill", 1)],
]


def play(world: World, schedule: list[tuple[str, int]]) -> None:
    for what, who in schedule:
        getattr(world, what)(world.names[who])


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("row", [row for row in ROWS if deterministic(row)])
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(schedule=schedules("kill", "kill", "kill_server"))
@example(schedule=ANSWERED_BEFORE_WELCOMED)
@example(schedule=SAVED_WHILE_WAITING)
def test_killed_and_restored_sites_end_with_the_same_bits(
    row: str, sharded: bool, schedule: list[tuple[str, int]]
) -> None:
    world, expected = World(row, sharded=sharded), undisturbed(row, sharded=sharded)
    play(world, schedule)
    world.finish()
    assert world.global_models == expected.global_models, "every version, not only the last"
    for site, end in world.ends.items():
        assert end.step == STEPS
        assert torch.equal(end.residual(), expected.ends[site].residual())


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("row", ROWS)
@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow])
@given(schedule=schedules())
def test_a_state_is_all_there_is(row: str, sharded: bool, schedule: list[tuple[str, int]]) -> None:
    world = World(row, sharded=sharded)
    play(world, schedule)
    for site, end in world.ends.items():
        again = world._end(site)
        again.load(end.state())
        assert_same(again.state(), end.state())
        assert torch.equal(again.fresh_update(), end.fresh_update())
        again.model.zero_()
        assert end.model.any(), "it shares no memory with what it was made from"


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("row", [row for row in ROWS if not deterministic(row)])
@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow])
@given(schedule=schedules("kill", "kill_server"))
def test_where_speed_matters_sites_agree_all_the_same(row: str, sharded: bool, schedule: list[tuple[str, int]]) -> None:
    world = World(row, sharded=sharded)
    play(world, schedule)
    world.finish()


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


def test_the_comparison_can_fail() -> None:
    world = World("diloco")
    for _ in range(10):
        for name in world.names:
            world.step(name)
            world.up(name)
            world.down(name)
    world.states["west"] = world.ends["west"].state()
    world.states["west"]["model"][3] += 1.0
    world.kill("west")
    assert world.finish().global_models != undisturbed("diloco", sharded=False).global_models
