"""What the dynamic threshold of WeightGrad brings: rounds on significance against rounds every H steps, at equal bytes.

    python benchmarks/table_threshold.py --quick
    python benchmarks/table_threshold.py                       # digits, five seeds: some minutes of one core

A site sends when its update since the last push is at least G times that of one step (or T steps have gone by), and G
follows the learning rate and the momentum (`weightgrad/core/parts/triggers.py`). What that is worth is the accuracy of
such a row less the accuracy of `every(H)` at the same bytes. No H gives exactly the same bytes, so the accuracy is
interpolated, seed by seed, between the two nearest rows (linearly in the logarithm of the bytes).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from charts import Chart, Dot, Dots
from result_table import ResultTable
from table_runs import Cell, Found, Strategy, cells, columns, rows, run, table
from tables import ROOT, Claim, Difference, Document, Options, difference, main, number

from weightgrad.core import parts, strategies
from weightgrad.core.parts.triggers import Significance
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.report.comparison_table import seeds_text
from weightgrad.lab.report.runs import Run

PART = "weightgrad by trigger"
FIXED = {f"every({steps})": steps for steps in (2, 4, 6, 8)}
SHIPPED = "as shipped"
SIGNIFICANT = {
    SHIPPED: strategies.PRESETS["weightgrad"].trigger,
    "G from 4, T = 8": "significance(threshold=4.0, at_most=8, low=1.5, every=2)",
    "G from 6, T = 8": "significance(threshold=6.0, at_most=8, low=1.5, every=2)",
    "G = 4, T = 8": "significance(threshold=4.0, at_most=8, low=4.0, high=4.0, every=2)",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The length of the runs."""

    steps: int = number(300, "steps")
    seeds: int = number(5, "seeds of each row")
    evaluate_on: int = number(600, "test images; 600 are all")


QUICK = Plan(steps=30, seeds=1, evaluate_on=100)
PARTIAL = True


def recipe(plan: Plan) -> Recipe:
    """Three sites on digits: 25 epochs in 300 steps, so that G has time to follow the cosine of the learning rate."""
    return Recipe.load(ROOT / "recipes" / "laptop.yaml").with_settings(
        [f"training.steps={plan.steps}", f"training.evaluate_on={plan.evaluate_on}", "training.evaluate_every=100"]
    )


def wanted(plan: Plan) -> list[Cell]:
    """The runs of every trigger."""
    chosen: dict[str, Strategy] = {
        name: {"name": "weightgrad", "trigger": trigger}
        for name, trigger in {**{name: name for name in FIXED}, **SIGNIFICANT}.items()
    }
    return cells(PART, recipe(plan), chosen, plan.seeds)


def tables(found: Found) -> list[ResultTable]:
    """The rows with what they send, and G."""
    shown = columns("accuracy", "spread", "loss", "wan_mb", first="trigger")
    shown += [
        ("bytes of every(H), H", "between", "{:.2f}"),
        ("G at the start", "first", "{:.2f}"),
        ("G at the end", "last", "{:.2f}"),
        ("epochs at a bound of G %", "bound", "{:.0f}"),
    ]
    made = []
    for part, runs in found.parts.items():
        made.append(table(part, "G is that of the first site, over all seeds.", shown, runs))
        numbers = made[-1].rows
        fixed = [Point(row["wan_mb"], float(FIXED[row["name"]])) for row in numbers if row["name"] in FIXED]
        for row in numbers:
            row |= {**_threshold(runs[row["name"]]), "between": value_at(fixed, row["wan_mb"])}
    return made


def _threshold(runs: Sequence[Run]) -> dict[str, float | None]:
    """What the threshold does."""
    known = [values for one in runs if (values := _values(one))]
    bounds = {bound for one in runs for bound in _bounds(one)}
    epochs = [value for values in known for value in values[1:]]
    return {
        "first": sum(values[0] for values in known) / len(known) if known else None,
        "last": sum(values[-1] for values in known) / len(known) if known else None,
        "bound": 100 * sum(value in bounds for value in epochs) / len(epochs) if epochs else None,
    }


def _values(run: Run) -> list[float]:
    """G of the first site, at the start and after each epoch."""
    site = run.thresholds[0]["site"] if run.thresholds else None
    return [float(line["value"]) for line in run.thresholds if line["site"] == site]


def _bounds(run: Run) -> tuple[float, ...]:
    """The least and the largest G of the run's trigger."""
    trigger = parts.parse("trigger", str(run.header["parts"]["trigger"]))
    return (trigger.low, trigger.high) if isinstance(trigger, Significance) else ()


@dataclass(frozen=True)
class Point:
    """A run of `every(H)`: its bytes, and its accuracy or H."""

    nbytes: float
    value: float


def value_at(points: Sequence[Point], nbytes: float) -> float | None:
    """The value at these bytes, between the two nearest points; None beyond the outermost of them."""
    ordered = sorted(points, key=lambda point: point.nbytes)
    for low, high in itertools.pairwise(ordered):
        if low.nbytes <= nbytes <= high.nbytes:
            span = math.log(high.nbytes / low.nbytes)
            share = math.log(nbytes / low.nbytes) / span if span else 0.0
            return low.value + share * (high.value - low.value)
    return None


def gain(part: Mapping[str, Sequence[Run]], row: str, tested: int) -> Difference | None:
    """The accuracy of a row less that of `every(H)` at its bytes, over the seeds that have both."""
    own, fixed = [], []
    for one in part.get(row, ()):
        same = [other for name in FIXED for other in part.get(name, ()) if other.seed == one.seed]
        points = [Point(other.summary["wan_bytes"], other.summary["accuracy"]) for other in same]
        at_same = value_at(points, one.summary["wan_bytes"])
        if at_same is not None:
            own.append(float(one.summary["accuracy"]))
            fixed.append(at_same)
    return difference(own, fixed, tested) if own else None


def claims(found: Found, plan: Plan) -> list[Claim]:
    """Whether significance is worth more than its bytes."""
    made, runs = [], found.parts.get(PART, {})
    for row, trigger in SIGNIFICANT.items():
        far = gain(runs, row, plan.evaluate_on)
        if far is not None:
            what = f"{row}: {trigger} is more accurate than every(H) with the same bytes."
            made.append(Claim(what, far.above(0.0), f"{far.text()}."))
    return made


def charts(found: Found) -> dict[str, Chart]:
    """Accuracy against bytes."""
    made: dict[str, list[Dot]] = {"every(H)": [], "significance": []}
    for row in rows(found.parts.get(PART, {})):
        if row["accuracy"] is not None:
            kind = "every(H)" if row["name"] in FIXED else "significance"
            made[kind].append(Dot(row["wan_mb"], row["accuracy"], row["spread"] or 0.0, row["name"]))
    title, x = "Accuracy by WAN bytes", "WAN MB, log scale"
    return {"bytes": Dots(title=title, x=x, y="accuracy %", series={k: v for k, v in made.items() if v})}


MEASURED = [
    "Measured: accuracies, bytes of every message, and G after each epoch (`threshold` in the event log).",
    "The paper's own start, G = |g|_2 / |g|_max, is 14.6 for the first gradient here and 7.9 for CifarNet's (for "
    "ternary ones the root of the number of nonzeros, 226 and 909). It waits for T until G has fallen.",
]


def make(plan: Plan, options: Options) -> Document:
    """Make the missing runs, and the document."""
    found = run(wanted(plan), options)
    return Document(
        title="The dynamic threshold: rounds on significance against rounds every H steps",
        rests_on=[
            f"Here: three sites of two workers, digits, {plan.steps} steps of 96 images, {seeds_text(plan.seeds)}, SGD "
            f"0.05 with momentum 0.9, cosine to zero over these steps, {plan.evaluate_on} test images.",
            "The paper has no such comparison.",
            "± of a difference is two standard errors, from the seeds or from the test images, whichever is larger.",
            *found.facts(),
        ],
        tables=tables(found),
        claims=claims(found, plan),
        measured=MEASURED,
        charts=charts(found),
        failures=found.failures,
    )


if __name__ == "__main__":
    main(Plan(), QUICK, __doc__ or "", make)
