"""What each part of WeightGrad as published costs: the strategy with one part at a time in full precision.

    python benchmarks/table_ablation.py --quick
    python benchmarks/table_ablation.py                        # 1,500 steps, three seeds: ten hours of one core
    python benchmarks/table_ablation.py --steps 500 --seeds 1

CifarNet on CIFAR-10 over the paper's links (recipes/paper.yaml). A row's gain over `weightgrad-paper` is what the part
that it leaves out costs. Three rows have a part in another form, and the last ones have weights of other bits.
`weightgrad-paper` is judged by its quantized weights, the model that it makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from charts import Accuracies, Chart
from result_table import ResultTable
from table_runs import Cell, Found, Strategy, cells, columns, row_difference, run, table
from tables import ROOT, Claim, Document, Options, main, number

from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.report.comparison_table import seeds_text
from weightgrad.lab.report.runs import Run

PART = "weightgrad-paper, part by part"
BASELINE, PAPER = "baseline", "weightgrad-paper"
FULL_WEIGHTS, FULL_GRADIENTS = "fp32 weights", "fp32 LAN gradients"
FULL_WAN, NO_THRESHOLD = "fp32 WAN", "no threshold"
WITHOUT: dict[str, Strategy] = {
    FULL_WEIGHTS: {"name": PAPER, "weights": "fp32", "evaluate": "global_model"},
    FULL_GRADIENTS: {"name": PAPER, "gradients": "fp32"},
    FULL_WAN: {"name": PAPER, "up": "fp32", "down": "fp32"},
    NO_THRESHOLD: {"name": PAPER, "trigger": "every(1)", "selector": "all"},
}
VARIANTS: dict[str, Strategy] = {
    "momentum correction": {"name": PAPER, "correction": 0.9},
    "curvature √v": {"name": PAPER, "weights": "lossaware(bits='ternary')"},
    "a scale for each row": {"name": PAPER, "weights": "lossaware(bits='ternary', fisher=True, per='row')"},
}
BITS: dict[str, Strategy] = {
    f"{bits}-bit weights": {"name": PAPER, "weights": f"lossaware(bits={bits}, fisher=True)"} for bits in (1, 3, 4, 8)
}
ROWS: dict[str, Strategy] = {BASELINE: BASELINE, PAPER: PAPER, **WITHOUT, **VARIANTS, **BITS}
WHAT = {
    FULL_WEIGHTS: "quantized weights",
    FULL_GRADIENTS: "ternary gradients inside the site",
    FULL_WAN: "ternary pushes and 4-bit results over the WAN",
    NO_THRESHOLD: "the threshold: rounds on significance, of significant tensors, instead of everything at every step",
}
GOAL = 0.5  # points below the baseline that the strategy may be


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The length of the runs, the model and the data."""

    steps: int = number(1500, "steps")
    seeds: int = number(3, "seeds of each row")
    batch: int = number(128, "images a step over all workers")
    evaluate_on: int = number(10_000, "test images; 10,000 are all")
    data: str = "cifar10"
    model: str = "cifarnet"


QUICK = Plan(steps=30, seeds=1, batch=16, evaluate_on=200, data="digits", model="lenet-digits")
PARTIAL = True


def recipe(plan: Plan) -> Recipe:
    """The paper's testbed, evaluated every sixth of the run."""
    return Recipe.load(ROOT / "recipes" / "paper.yaml").with_settings(
        [
            f"data.name={plan.data}",
            f"model.name={plan.model}",
            f"training.steps={plan.steps}",
            f"training.batch={plan.batch}",
            f"training.evaluate_on={plan.evaluate_on}",
            f"training.evaluate_every={max(1, plan.steps // 6)}",
        ]
    )


def wanted(plan: Plan) -> list[Cell]:
    """All runs: first the goal, then the parts, then other choices and the bits of the weights."""
    made = cells(PART, recipe(plan), ROWS, plan.seeds)
    return [cell for group in ((BASELINE, PAPER), WITHOUT, VARIANTS, BITS) for cell in made if cell.row in group]


def tables(found: Found) -> list[ResultTable]:
    """The rows, with both forms of the model where weights are quantized."""
    shown = columns("accuracy", "spread", "points", "loss", "seconds", "wan_mb", "ratio")
    shown += [
        ("LAN MB", "lan_mb", "{:.4g}"),
        ("master weights %", "master", "{:.2f}"),
        ("seed by seed", "each", "{}"),
    ]
    made = []
    for part, runs in found.parts.items():
        about = "Accuracy of the model that the strategy hands over: quantized weights, except where they are fp32."
        made.append(table(part, about, shown, runs))
        for row in made[-1].rows:
            row["master"] = _master(runs[row["name"]])
            row["each"] = ", ".join(f"{run.seed}: {_percent(run.summary['accuracy'])}" for run in runs[row["name"]])
    return made


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.2f}"


def _master(runs: Sequence[Run]) -> float | None:
    """Accuracy of the full-precision weights at the end, where the strategy is judged by others."""
    last = [run.evaluations[-1] for run in runs if run.evaluations]
    if not last or any(line.get("quantized_accuracy") is None for line in last):
        return None
    return 100 * sum(float(line["global_model_accuracy"]) for line in last) / len(last)


def claims(found: Found, plan: Plan) -> list[Claim]:
    """Whether the strategy is near the baseline, and what each part costs."""
    runs, made = found.parts.get(PART, {}), []
    far = row_difference(runs, PAPER, BASELINE, plan.evaluate_on)
    if far is not None:
        what = f"{PAPER}, judged by its quantized weights, is at most {GOAL} points below the baseline."
        made.append(Claim(what, far.above(-GOAL), f"{far.text()}."))
    for row, part in WHAT.items():
        far = row_difference(runs, row, PAPER, plan.evaluate_on)
        if far is not None:
            above = far.above(0.0)
            made.append(Claim(f"Accuracy is lost to {part}.", above, f"Without: {far.text()}."))
    for row in VARIANTS:
        far = row_difference(runs, row, PAPER, plan.evaluate_on)
        if far is not None:
            made.append(Claim(f"{PAPER} would be more accurate with {row}.", far.above(0.0), f"{far.text()}."))
    return made


MEASURED = [
    "Measured: losses, accuracies, bytes of every message (true frames).",
    "Modelled: seconds, with 30 ms of compute a step and the paper's bandwidths.",
]


def make(plan: Plan, options: Options) -> Document:
    """Make the missing runs, and the document."""
    found = run(wanted(plan), options)
    charts: dict[str, Chart] = {
        "accuracy": Accuracies.of_runs(found.parts.get(PART, {}), title=f"{PART}: accuracy over time")
    }
    return Document(
        title="Ablation of WeightGrad as published",
        rests_on=[
            f"Here: two sites of four workers, {plan.model} on {plan.data}, {plan.steps} steps of {plan.batch} images, "
            f"{seeds_text(plan.seeds)}, SGD 0.05 with momentum 0.9, cosine to zero over these steps, "
            f"{plan.evaluate_on} test images.",
            "The paper: WeightGrad equals its baseline to 0.02 points after 50,000 steps; it has no ablation.",
            "± of a difference is two standard errors, from the seeds where there are several, else from the test "
            "images alone.",
            *found.facts(),
        ],
        tables=tables(found),
        claims=claims(found, plan),
        measured=MEASURED,
        charts=charts,
        failures=found.failures,
    )


if __name__ == "__main__":
    main(Plan(), QUICK, __doc__ or "", make)
