"""Between what the bytes and the time of a run lie where the data decide how much is sent."""

from __future__ import annotations

from dataclasses import dataclass

from weightgrad.core import parts
from weightgrad.core.parts.triggers import Significance
from weightgrad.core.strategies import Strategy
from weightgrad.lab.plan.prediction import Prediction, predict
from weightgrad.lab.plan.scenario import Scenario
from weightgrad.lab.plan.stand_in import ENDS

_SELECTORS = ("gaia", "significant", "nonzero")  # whose choice depends on the values of the updates
_BYTES, _SECONDS = 0.02, 0.10  # errors of what does not depend on the data, at most


@dataclass(frozen=True)
class DataRange:
    """The least and the most of a run.

    Attributes:
        wan_bytes: over all links, both ways.
        seconds: of the whole run.
    """

    wan_bytes: tuple[float, float]
    seconds: tuple[float, float]


def depends_on_data(strategy: Strategy) -> bool:
    """Whether how much a strategy sends depends on the values of the updates, or when: `auto` looks at their signs."""
    if strategy.auto is not None:
        return True
    if isinstance(parts.parse("trigger", strategy.trigger), Significance):
        return True
    return any(part in f"{strategy.selector} {strategy.down_selector}" for part in _SELECTORS)


def range_of(scenario: Scenario, strategy: Strategy, found: Prediction) -> DataRange | None:
    """What a run takes between gradients that are small and alike and those that are neither.

    Args:
        scenario: what is planned.
        strategy: the strategy.
        found: what usual gradients send.

    Returns:
        The range; None where the bytes do not depend on the data.
    """
    if not depends_on_data(found.strategy):
        return None
    least, most = (predict(scenario, strategy, gradients=kind) for kind in ENDS)
    trigger = parts.parse("trigger", found.strategy.trigger)
    fewest = most_often = 1.0
    if isinstance(trigger, Significance):  # the data decide between these two how many steps lie between rounds
        fewest = min(1.0, least.round_steps / trigger.at_most)
        most_often = max(1.0, most.round_steps / max(1, trigger.every))
    nbytes = (found.wan_bytes, least.wan_bytes * fewest, most.wan_bytes * most_often)
    seconds = (found.seconds, _seconds(scenario, least, fewest), _seconds(scenario, most, most_often))
    return DataRange(_around(nbytes, _BYTES), _around(seconds, _SECONDS))


def _seconds(scenario: Scenario, found: Prediction, often: float) -> float:
    """The time of a run with `often` times as many rounds: what is not compute grows with them."""
    compute = min(found.seconds, scenario.steps * found.compute_seconds)
    return compute + (found.seconds - compute) * often


def _around(ends: tuple[float, ...], error: float) -> tuple[float, float]:
    return (1 - error) * min(ends), (1 + error) * max(ends)
