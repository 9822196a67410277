"""Comparison of strategies with a baseline: accuracy, cost, and time to the same accuracy.

Accuracy is that at the end of a run; its spread is the sample standard deviation over the seeds. Speedup is the virtual
time in which the baseline reaches an accuracy, divided by the time in which the strategy reaches the same: strategies
that end with different accuracies cannot be compared by the length of their runs. Unless a target is given, the
accuracy to reach is, for each seed, 99 % of what the baseline ends with. The time is interpolated linearly between the
evaluations before and after the best accuracy so far first passes the target; so are the bytes sent until then.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightgrad.lab.report.runs import Line, Run

BASELINE = "baseline"
SHARE_OF_BASELINE = 0.99
KEYS = (
    *("strategy", "accuracy_mean", "accuracy_std", "virtual_seconds", "speedup_to_accuracy"),
    *("wan_bytes", "wan_ratio", "lan_bytes", "waiting_share"),
)


def is_own_strategy(strategy: str) -> bool:
    """Whether it is one of this project's own strategies: auto or weightgrad, with whatever settings."""
    return re.match(r"(auto|weightgrad)\b", strategy) is not None


def highlighted_strategy(names: Iterable[str]) -> str | None:
    """The own strategy to highlight: auto before weightgrad, one without settings before one with; None if none is."""
    return min(filter(is_own_strategy, names), key=len, default=None)


@dataclass(frozen=True)
class Row:
    """One strategy over its seeds. Values are means unless the name says otherwise; bytes are rounded."""

    strategy: str
    seeds: tuple[int, ...]
    accuracy_mean: float | None  # None: no seed was evaluated
    accuracy_std: float
    difference_points: float | None  # from the reference, in percentage points
    virtual_seconds: float
    speedup_to_accuracy: float | None  # None: no seed has reached the target
    seconds_to_accuracy: float | None
    reached: int  # seeds that have reached it
    wan_bytes: int
    wan_ratio: float | None  # the reference's bytes divided by these; None: no bytes
    wan_ratio_to_accuracy: float | None  # the same, up to the target accuracy; None: no seed has reached it
    lan_bytes: int
    waiting_share: float
    quantized_accuracy: float | None
    ema_accuracy: float | None
    top5_accuracy: float | None
    unfinished: int  # seeds whose run was interrupted
    diverged: int  # seeds whose loss became infinite or NaN

    def as_dict(self) -> dict[str, object]:
        """The fields that `--json` prints."""
        return {key: getattr(self, key) for key in KEYS}


@dataclass(frozen=True)
class Comparison:
    """The rows of all strategies, the reference first."""

    rows: tuple[Row, ...]
    reference: str
    target: float | None  # as given; None: 99 % of the reference, seed by seed

    @property
    def against_baseline(self) -> bool:
        """Whether the reference is the strategy `baseline`, not only the first one."""
        return self.reference == BASELINE

    @property
    def has_top5(self) -> bool:
        """Whether the data set has a top-5 accuracy."""
        return any(row.top5_accuracy is not None for row in self.rows)

    def as_list(self) -> list[dict[str, object]]:
        """The list that `--json` prints."""
        return [row.as_dict() for row in self.rows]


def seconds_to(evaluations: Sequence[Line], target: float) -> float | None:
    """The virtual time at which the best accuracy so far first reaches the target; None if it never does."""
    return _first("t", evaluations, target)


def wan_bytes_to(evaluations: Sequence[Line], target: float) -> float | None:
    """The WAN bytes sent until the best accuracy so far first reaches the target; None if it never does."""
    return _first("wan_bytes", evaluations, target)


def _first(key: str, evaluations: Sequence[Line], target: float) -> float | None:
    before: tuple[float, float] | None = None
    for line in evaluations:
        if line["accuracy"] is None:
            continue
        value, accuracy = float(line[key]), float(line["accuracy"])
        if accuracy >= target:
            if before is None:
                return value
            return before[0] + (value - before[0]) * (target - before[1]) / (accuracy - before[1])
        # Below the target, interpolation starts from the best accuracy so far.
        before = (value, accuracy if before is None else max(accuracy, before[1]))
    return None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _points(accuracy: float | None, reference: float | None) -> float | None:
    return None if accuracy is None or reference is None else 100 * (accuracy - reference)


def _savings(
    key: str, runs: Sequence[Run], reference: Mapping[int, Run], target: float | None
) -> list[tuple[float, float]]:
    """(reference's value divided by the run's, the run's value) at the target, for seeds in which both reach it.

    `key` is the value: time (`t`) or bytes (`wan_bytes`).
    """
    found = []
    for run in runs:
        same_seed = reference.get(run.seed)
        if same_seed is None or (target is None and same_seed.summary["accuracy"] is None):
            continue
        wanted = SHARE_OF_BASELINE * same_seed.summary["accuracy"] if target is None else target
        its, own = _first(key, same_seed.evaluations, wanted), _first(key, run.evaluations, wanted)
        if its is not None and own is not None and own > 0:
            found.append((its / own, own))
    return found


def _row(strategy: str, runs: Sequence[Run], reference: Sequence[Run], target: float | None) -> Row:
    summaries = [run.summary for run in runs]
    accuracies = [float(s["accuracy"]) for s in summaries if s["accuracy"] is not None]
    accuracy = _mean(accuracies)
    reference_accuracy = _mean(run.summary["accuracy"] for run in reference)
    wan = statistics.fmean(s["wan_bytes"] for s in summaries)
    reference_wan = statistics.fmean(run.summary["wan_bytes"] for run in reference)
    by_seed = {run.seed: run for run in reference}
    speedups = _savings("t", runs, by_seed, target)
    return Row(
        strategy=strategy,
        seeds=tuple(run.seed for run in runs),
        accuracy_mean=accuracy,
        accuracy_std=statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0,
        difference_points=_points(accuracy, reference_accuracy),
        virtual_seconds=statistics.fmean(s["virtual_seconds"] for s in summaries),
        speedup_to_accuracy=_mean(ratio for ratio, _ in speedups),
        seconds_to_accuracy=_mean(seconds for _, seconds in speedups),
        reached=len(speedups),
        wan_bytes=round(wan),
        wan_ratio=reference_wan / wan if wan else None,
        wan_ratio_to_accuracy=_mean(ratio for ratio, _ in _savings("wan_bytes", runs, by_seed, target)),
        lan_bytes=round(statistics.fmean(s["lan_bytes"] for s in summaries)),
        waiting_share=statistics.fmean(s["waiting_share"] for s in summaries),
        quantized_accuracy=_mean(s.get("quantized_accuracy") for s in summaries),
        ema_accuracy=_mean(s.get("ema_accuracy") for s in summaries),
        top5_accuracy=_mean(s.get("top5_accuracy") for s in summaries),
        unfinished=sum(not run.finished for run in runs),
        diverged=sum(run.status == "diverged" for run in runs),
    )


def compare(groups: Mapping[str, Sequence[Run]], *, target: float | None = None) -> Comparison:
    """Compare runs grouped by strategy.

    Args:
        groups: Runs by strategy. The baseline is the reference and comes first; without one, the first strategy is.
        target: The accuracy to reach; None means 99 % of the reference's, seed by seed.
    """
    names = [name for name, runs in groups.items() if runs]
    if not names:
        return Comparison((), BASELINE, target)
    reference = BASELINE if BASELINE in names else names[0]
    names.sort(key=lambda name: name != reference)
    rows = tuple(_row(name, groups[name], groups[reference], target) for name in names)
    return Comparison(rows, reference, target)


def flat(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """A recipe as one mapping with keys such as `training.steps`."""
    found: dict[str, object] = {}
    for key, value in recipe.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _shared(run: Run) -> dict[str, object]:
    """The settings that runs of one comparison should share: all but strategy and seed."""
    return flat({key: value for key, value in run.recipe.items() if key not in ("strategy", "seed")})


def differing(runs: Sequence[Run]) -> list[str]:
    """The settings in which runs differ, other than strategy and seed; a comparison should have none."""
    recipes = [_shared(run) for run in runs]
    keys = sorted({key for recipe in recipes for key in recipe})
    return [key for key in keys if len({json.dumps(recipe.get(key), default=str) for recipe in recipes}) > 1]


def grouped(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs by strategy and recipe, with the seeds in order."""
    by_recipe: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        by_recipe.setdefault((run.strategy, json.dumps(_shared(run), sort_keys=True, default=str)), []).append(run)
    groups: dict[str, list[Run]] = {}
    for (strategy, _), members in by_recipe.items():
        rivals = [others[0] for (name, _), others in by_recipe.items() if name == strategy]
        settings = [f"{key}={_shared(members[0]).get(key)}" for key in differing(rivals)]
        label = f"{strategy} [{', '.join(settings)}]" if settings else strategy
        groups[label] = sorted(members, key=lambda run: run.seed)
    return groups
