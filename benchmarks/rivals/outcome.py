"""What one rival did over one line: when each step ended, what crossed the line, and how good the model was when."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rivals.tasks import WARM
from torch import Tensor

from weightgrad.train.recipe import Recipe
from weightgrad.train.task import Training


@dataclass(frozen=True)
class Look:
    """The weights that were there after so many steps and seconds."""

    step: int
    seconds: float
    weights: Tensor


@dataclass(frozen=True)
class Trace:
    """A finished run: seconds since the start at the end of each step and at the very end, and weights on the way."""

    ends: list[float]
    finished: float
    looks: list[Look]
    final: Tensor
    line_bytes: int
    late: float  # share of the passes that took longer than the recipe's
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The same as numbers. `curve` is (step, seconds, accuracy); the last entry is the model that is delivered."""

    rival: str
    mbit_s: float
    rtt_ms: float
    steps: int
    step_seconds: float
    step_bytes: float
    seconds: float
    accuracy: float
    curve: list[tuple[int, float, float]]
    late: float
    trusted: bool
    verdict: str
    notes: tuple[str, ...] = ()

    def seconds_to(self, accuracy: float) -> float | None:
        """When it was first found to be that good; None: never."""
        return next((seconds for _, seconds, found in self.curve if found >= accuracy), None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def judge(recipe: Recipe, trace: Trace) -> tuple[list[tuple[int, float, float]], float]:
    """The accuracy at every look, and of the delivered model; after the clock has stopped."""
    task = Training(recipe)
    curve = [
        (look.step, look.seconds, task.evaluate(look.weights).accuracy)
        for look in trace.looks
        if look.step < recipe.training.steps  # the last is the delivered one
    ]
    final = task.evaluate(trace.final).accuracy
    return [*curve, (recipe.training.steps, trace.finished, final)], final


def mean_step(ends: list[float]) -> float:
    """Of the steps after the first fifth."""
    kept = ends[max(0, int(WARM * len(ends)) - 1) :]
    return (kept[-1] - kept[0]) / (len(kept) - 1) if len(kept) > 1 else kept[0]
