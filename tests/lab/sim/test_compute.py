"""How long a step takes."""

from __future__ import annotations

import random
import statistics

import pytest

from weightgrad.lab.sim.compute import Compute, Straggler


def times(compute: Compute, steps: int = 4000, site: str = "a", worker: int = 0, seed: int = 0) -> list[float]:
    return [compute.seconds(seed, site, 0, worker, step) for step in range(steps)]


def test_without_jitter_it_is_the_mean() -> None:
    assert set(times(Compute(0.03), 50)) == {0.03}


@pytest.mark.parametrize("jitter", [0.05, 0.3])
def test_jitter_has_the_mean_and_the_spread_it_says(jitter: float) -> None:
    found = times(Compute(0.03, jitter))
    assert statistics.fmean(found) == pytest.approx(0.03, rel=0.02)
    assert statistics.stdev(found) == pytest.approx(0.03 * jitter, rel=0.1)
    assert min(found) > 0


def test_workers_sites_steps_and_seeds_differ() -> None:
    compute = Compute(1.0, 0.2)
    found = [
        compute.seconds(s, "a", site, w, t) for s in range(2) for site in range(2) for w in range(2) for t in range(2)
    ]
    assert len(set(found)) == 16


def test_it_is_a_pure_function_of_the_seed() -> None:
    compute = Compute(0.03, 0.2, (Straggler(3.0, probability=0.5),))
    first = times(compute, 50)
    random.seed(1)
    assert list(reversed([compute.seconds(0, "a", 0, 0, step) for step in reversed(range(50))])) == first


def test_a_straggler_is_the_one_that_is_meant() -> None:
    compute = Compute(1.0, 0.0, (Straggler(3.0, site="a", worker=2),))
    assert set(times(compute, 5, worker=2)) == {3.0}
    assert set(times(compute, 5, worker=1)) == {1.0}
    assert set(times(compute, 5, site="b", worker=2)) == {1.0}
    assert set(times(Compute(1.0, 0.0, (Straggler(3.0, site="a"),)), 5, worker=7)) == {3.0}


def test_slow_steps_come_as_often_as_they_should() -> None:
    found = times(Compute(1.0, 0.0, (Straggler(5.0, probability=0.1),)))
    assert set(found) == {1.0, 5.0}
    assert found.count(5.0) / len(found) == pytest.approx(0.1, abs=0.02)


def test_two_reasons_to_be_slow_multiply() -> None:
    compute = Compute(1.0, 0.0, (Straggler(2.0, site="a"), Straggler(3.0, worker=0)))
    assert set(times(compute, 5)) == {6.0}
