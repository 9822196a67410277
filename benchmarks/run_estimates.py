"""How long a missing run will take: from the records of runs like it, or from a few passes of its network."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from pathlib import Path

from result_table import MeasurementCache
from table_runs import Cell

from weightgrad.errors import WeightGradError
from weightgrad.lab.report.runs import Run
from weightgrad.lab.run.task import Training

_MOST_SAMPLES = 32  # of a worker in a measured pass
_MORE = 1.3  # a step is more than its passes: codecs, optimizer, evaluation


class RunEstimates:
    """Seconds of a run on one core.

    Args:
        runs: Finished runs; those with the same network and data tell how long a sample takes.
        cache: A file that keeps what was measured on this machine.
        measure: Whether to measure networks that no finished run had.
    """

    def __init__(self, runs: Iterable[Run], cache: Path, *, measure: bool = True) -> None:
        self._cache, self._measure = MeasurementCache(cache), measure
        self._per_sample: dict[str, list[float]] = {}
        for run in runs:
            training = run.recipe["training"]
            samples = int(run.summary["steps"]) * int(training["batch"])
            seconds = run.wall.get("wall_seconds")
            if samples and seconds:
                name = _name(run.recipe["model"]["name"], run.recipe["data"]["name"], run.recipe["model"]["options"])
                self._per_sample.setdefault(name, []).append(float(seconds) / samples)

    def seconds(self, cell: Cell) -> float | None:
        """Seconds of a run; None if there is nothing to tell from."""
        recipe = cell.recipe
        name = _name(recipe.model.name, recipe.data.name, recipe.model.options)
        each = self._per_sample.get(name)
        if each is None:
            measured = self._measured(name, cell)
            if measured is None:
                return None
            each = [_MORE * measured]
        return statistics.median(each) * recipe.training.steps * recipe.training.batch

    def _measured(self, name: str, cell: Cell) -> float | None:
        known = self._cache.known(name)
        if known is None and self._measure:
            try:
                known = {"seconds": _seconds_a_sample(cell)}
            except WeightGradError:  # such as data that has not been fetched
                return None
            self._cache.keep(name, known)
        return None if known is None else float(known["seconds"])


def _name(model: str, data: str, options: object) -> str:
    return f"{model} {options} on {data}"


def _seconds_a_sample(cell: Cell) -> float:
    """Processor time of one worker, the best of three passes; other processes hardly disturb it."""
    workers = cell.recipe.workers
    samples = max(1, min(cell.recipe.training.batch // workers, _MOST_SAMPLES))
    task = Training(cell.recipe.with_settings([f"training.batch={samples * workers}", "training.evaluate_on=1"]))
    weights = task.initial()
    best = float("inf")
    for step in range(3):
        began = time.process_time()
        next(iter(task.gradients(0, weights, step)))
        best = min(best, time.process_time() - began)
    return best / samples
