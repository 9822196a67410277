"""What one rival did over one link: when each step ended, what crossed the link, and the accuracy over time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rivals.tasks import WARM
from torch import Tensor

from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.task import Training


@dataclass(frozen=True)
class Snapshot:
    """The weights after so many steps and seconds."""

    step: int
    seconds: float
    weights: Tensor


@dataclass(frozen=True)
class Trace:
    """A finished run: seconds from the start to the end of each step and of the run, and weights during the run."""

    ends: list[float]
    finished: float
    snapshots: list[Snapshot]
    final: Tensor
    link_bytes: int
    late: float  # share of the passes that took longer than the recipe's
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The result of a run. `curve` has (step, seconds, accuracy); its last entry is the final model."""

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
        """Seconds until a snapshot first had this accuracy; None if none had."""
        return next((seconds for _, seconds, found in self.curve if found >= accuracy), None)

    def to_dict(self) -> dict[str, Any]:
        """The outcome for a JSON file."""
        return asdict(self)


def evaluate(recipe: Recipe, trace: Trace) -> tuple[list[tuple[int, float, float]], float]:
    """The accuracy of every snapshot and of the final model, computed after the run."""
    task = Training(recipe)
    curve = [
        (snapshot.step, snapshot.seconds, task.evaluate(snapshot.weights).accuracy)
        for snapshot in trace.snapshots
        if snapshot.step < recipe.training.steps  # the last snapshot is the final model
    ]
    final = task.evaluate(trace.final).accuracy
    return [*curve, (recipe.training.steps, trace.finished, final)], final


def mean_step(ends: list[float]) -> float:
    """The mean seconds of a step after the first fifth of the steps."""
    kept = ends[max(0, int(WARM * len(ends)) - 1) :]
    return (kept[-1] - kept[0]) / (len(kept) - 1) if len(kept) > 1 else kept[0]
