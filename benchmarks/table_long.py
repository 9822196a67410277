"""Six strategies over 10,000 steps of CifarNet on CIFAR-10: does what holds after 1,500 steps hold after many more?

    python benchmarks/table_long.py --quick
    python benchmarks/run_all.py --resume --only long          # about an hour of a core for each of six runs

WeightGrad's own recipe (recipes/paper.yaml): two sites of four workers over the paper's links. The paper trains for
50,000 steps; short runs may hide what quantized weights cost, or exaggerate it.
"""

from __future__ import annotations

from dataclasses import dataclass

from charts import Accuracies, Chart, Lines, losses
from result_table import ResultTable, Row
from table_runs import Cell, Found, cells, columns, row_difference, run, table
from tables import ROOT, Claim, Document, Options, main, number

from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.report.comparison_table import seeds_text

STRATEGIES = ("baseline", "weightgrad-paper", "weightgrad", "auto", "gaia", "terngrad")
PART = "CifarNet, 8 workers"
PARTIAL = True
NEAR = 0.2  # points: the paper's WeightGrad is at most 0.02 from its baseline; tenths are not reproducible


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The length of the runs."""

    steps: int = number(10_000, "steps of each run")
    seeds: int = number(1, "seeds of each row")
    batch: int = number(128, "images a step over all workers")
    evaluations: int = number(20, "points of the curve")
    evaluate_on: int = number(10_000, "test images")
    recipe: str = "paper.yaml"


QUICK = Plan(steps=8, batch=16, evaluations=2, evaluate_on=100)


def recipe(plan: Plan) -> Recipe:
    """The paper's recipe with this length."""
    return Recipe.load(ROOT / "recipes" / plan.recipe).with_settings(
        [
            f"training.steps={plan.steps}",
            f"training.batch={plan.batch}",
            f"training.evaluate_on={plan.evaluate_on}",
            f"training.evaluate_every={max(1, plan.steps // plan.evaluations)}",
        ]
    )


def wanted(plan: Plan) -> list[Cell]:
    """All runs."""
    return cells(PART, recipe(plan), {name: name for name in STRATEGIES}, plan.seeds)


def tables(found: Found, plan: Plan) -> list[ResultTable]:
    """The end of the runs, and the curve."""
    runs = found.parts.get(PART, {})
    if not runs:
        return []
    about = f"{plan.steps:,} steps of {plan.batch} images, tested on {plan.evaluate_on:,}, {seeds_text(plan.seeds)}."
    shown = columns("accuracy", "spread", "points", "loss", "seconds", "speedup", "speedup_to", "wan_mb", "ratio")
    return [table(PART, about, shown, runs), curve(found, plan)]


def curve(found: Found, plan: Plan) -> ResultTable:
    """The test accuracy over the steps; a round may end a few steps after the evaluation is due."""
    runs = {row: one[0] for row, one in found.parts.get(PART, {}).items()}
    headings = [("steps", "steps", "{:,}"), *((f"{row} %", row, "{:.2f}") for row in runs)]
    every = max(1, plan.steps // plan.evaluations)
    made = ResultTable("curve", "Test accuracy over the steps", "Seed 0; of the weights that the row judges.", headings)
    for due in range(every, plan.steps + 1, every):
        row: Row = {"steps": due}
        for name, one in runs.items():
            after = [line["accuracy"] for line in one.evaluations if due <= line["step"] < due + every]
            shown = after[-1:] if due == plan.steps else after[:1]  # at the end, after what was left has been sent
            if shown and shown[0] is not None:
                row[name] = 100 * shown[0]
        made.rows.append(row)
    return made


def claims(found: Found, plan: Plan) -> list[Claim]:
    """Each row against the baseline."""
    made = []
    for row in STRATEGIES[1:]:
        far = row_difference(found.parts.get(PART, {}), row, "baseline", plan.evaluate_on)
        if far is not None:
            what = f"{row} is at most {NEAR} points below the baseline after {plan.steps:,} steps."
            within = "Between {:+.2f} and {:+.2f} points".format(*far.interval)
            made.append(Claim(what, far.above(-NEAR), f"{far.text()}.", undecided=within))
    return made


def charts(found: Found) -> dict[str, Chart]:
    """Accuracy and loss over virtual time."""
    runs = found.parts.get(PART, {})
    return {
        "accuracy": Accuracies.of_runs(runs, title=f"{PART}: accuracy over time"),
        "loss": Lines(title=f"{PART}: training loss", x="virtual seconds, log scale", y="loss", series=losses(runs)),
    }


MEASURED = [
    "Measured: losses, accuracies, bytes of every message (true frames), number of rounds, waiting times.",
    "Modelled: seconds. Compute is 30 ms a step with 10 % jitter; links and LAN are the paper's bandwidths, with "
    "delays that it does not give; codecs cost what `weightgrad bench codecs` measured.",
]


def make(plan: Plan, options: Options) -> Document:
    """Make the missing runs, and the document."""
    found = run(wanted(plan), options)
    return Document(
        title=f"{plan.steps:,} steps: what is left of the differences",
        rests_on=[
            f"Here: {plan.steps:,} steps of CifarNet ({plan.batch} images) in two sites of four workers over the "
            f"paper's links, {seeds_text(plan.seeds)}; SGD with momentum 0.9, lr 0.05, cosine to zero over these "
            "steps, without augmentation and parameter average.",
            "The paper: 50,000 steps of 512 images, lr 0.1 decayed by 0.1, crops and flips, parameter average 0.9999.",
            "± of a difference is two standard errors; with one seed it is that of the test images alone.",
            *found.facts(),
        ],
        tables=tables(found, plan),
        claims=claims(found, plan),
        measured=MEASURED,
        charts=charts(found),
        failures=found.failures,
    )


if __name__ == "__main__":
    main(Plan(), QUICK, __doc__ or "", make)
