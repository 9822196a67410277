"""Base + the residual is conserved for every strategy, whatever happens on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightgrad.core.strategies import PRESETS

from .harness import Harness

# DGC's own momentum makes its updates others than the gradients it is given; without it they are the same.
# The warm starts end within the few rounds of a test.
CHANGES = {
    "dgc": {"up": "dgc(0.05, momentum=0.0, warmup=5)"},
    "onebit": {"up": "warmup(2, onebit())", "down": "warmup(2, onebit())"},
    "adaptive": {"up": "warmup(2, adaptive(pi=64))"},
}
ROWS = [(name, CHANGES.get(name, {})) for name in PRESETS]
CONSISTENT = [
    "sync",
    "bounded(2)",
    "backup(1)",
    "async_()",
    "async_(staleness='inverse')",
    "async_(staleness='inverse_share')",
]

events = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "up", "up", "down", "down", "crash_site", "crash_server", "time_out"]),
        st.integers(0, 2),
    ),
    max_size=60,
)


def play(world: Harness, schedule: list[tuple[str, int]]) -> None:
    for what, who in schedule:
        if what in ("crash_server", "time_out"):
            getattr(world, what)()
        else:
            getattr(world, what)(world.names[who])
    world.finish()
    world.check()


@pytest.mark.parametrize(("name", "changes"), ROWS, ids=[name for name, _ in ROWS])
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(schedule=events)
def test_nothing_is_lost(name: str, changes: dict[str, Any], schedule: list[tuple[str, int]]) -> None:
    play(Harness(name, **changes), schedule)


@pytest.mark.parametrize("consistency", CONSISTENT)
@pytest.mark.parametrize("name", ["baseline", "weightgrad", "diloco"])
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(schedule=events)
def test_nothing_is_lost_with_any_consistency(name: str, consistency: str, schedule: list[tuple[str, int]]) -> None:
    play(Harness(name, consistency=consistency), schedule)


def test_the_check_can_fail() -> None:
    world = Harness("weightgrad")
    for _ in range(20):
        for n in world.names:
            world.step(n)
            world.drain(n)
    world.ends["site-1"].shards[0].residual.whole()[3] += 1.0
    world.finish()
    with pytest.raises(AssertionError):
        world.check()


def test_global_models_are_the_same_bits_at_the_same_version() -> None:
    world = Harness("weightgrad", consistency="bounded(2)")
    seen: dict[int, str] = {}
    for _ in range(40):
        for n in world.names:
            world.step(n)
            world.up(n)
            world.down(n)
            end = world.ends[n]
            assert seen.setdefault(end.version, end.digest()) == end.digest()
    assert len(seen) > 3
    assert torch.isfinite(world.server.global_model.vector).all()
