"""What a site and the global server may allocate, in models of 4 bytes a parameter: a bound that holds at 16 M.

Tensors and buffers of real processes are counted (`weightgrad/lab/bench/allocations.py`), from `join` to `leave`, in
the middle of a round too. What a plain training loop has, weights, gradients and momentum, is not counted.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from deployment.memory import Memory, Run, run

from weightgrad.core import pieces
from weightgrad.core.layout import Layout
from weightgrad.wire.intervals import Intervals

NUMEL = 16_000_000
STEPS = 12  # with a round of every strategy here
_LAYOUT = Layout.of_shapes([("weights", (NUMEL,))])
LARGEST_PIECE = max(piece.numel for piece in pieces.cut(Intervals.whole(NUMEL), _LAYOUT, per_tensor=False))


def measured(strategy: str, *, ranks: int = 1, optimizer: str = "sgd") -> Memory:
    case = Run(strategy, NUMEL, ranks=ranks, sharded=ranks > 1, optimizer=optimizer, steps=STEPS, pause=0.02)
    return run(case)


def show(found: Memory) -> str:
    model = 4 * found.parameters
    parties = {"site": found.sites[0], "server": found.server}
    lines = [
        f"{name}: kept {party.kept / model:.2f}, "
        + ", ".join(f"{phase} {peak / model:.2f}" for phase, peak in party.peaks.items())
        for name, party in parties.items()
    ]
    return "; ".join([*lines, f"a push {found.push / model:.2f}", str(found.held)])


@pytest.mark.parametrize(("strategy", "ranks"), [("auto", 1), ("auto", 2), ("weightgrad", 1), ("diloco", 1)])
def test_a_site_keeps_two_and_a_half_models_and_the_server_three(strategy: str, ranks: int) -> None:
    """Two ranks are sharded by FSDP2."""
    found = measured(strategy, ranks=ranks)
    model, site, server = 4 * found.parameters, found.sites[0], found.server
    assert site.kept <= 2.5 * model, show(found)
    assert site.peak <= 3 * model, show(found)
    assert server.kept <= 3 * model, show(found)
    assert server.peak <= 3.5 * model + found.push * len(found.sites), show(found)
    full = {"auto": 0.01, "weightgrad": 0.03, "diloco": 4.0}[strategy]  # bytes a parameter in the mean of all pushes
    assert found.push >= full * found.parameters, show(found)


def test_what_adam_on_shared_gradients_takes() -> None:
    """The user's own optimizer is the site's; the server has a second one: moments, a gradient and the weights."""
    found = measured("baseline", optimizer="adamw")
    model, site, server = 4 * found.parameters, found.sites[0], found.server
    assert site.kept <= 1.5 * model, show(found)
    assert site.peak <= 3.5 * model, show(found)
    assert server.kept <= 5 * model, show(found)
    assert server.peak <= 7 * model + found.push, show(found)
