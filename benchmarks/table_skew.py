"""Sites that are not alike: Dirichlet skew of the labels, alpha 0.1, 1 and none, for five strategies.

    python benchmarks/table_skew.py --quick
    python benchmarks/table_skew.py                            # about 9 minutes on two cores

Of each class, sites get shares drawn from a Dirichlet distribution (Hsu et al., 2019): at 0.1 most sites see two or
three classes. Hsieh et al. (2020) found that strategies with local steps or thresholds lose most there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from field_sheet import Row, Sheet
from table_runs import Cell, Found, apart, cells, columns, rows, run, sheet
from tables import Claim, Difference, Document, Options, difference, main, number

from weightgrad.report.comparison_table import seeds_text
from weightgrad.report.runs import Run
from weightgrad.train.recipe import Recipe
from weightgrad.wan import strategies

ROWS = ("baseline", "gaia", "diloco", "weightgrad", "auto")
IID = "iid"
SHARDS = {IID: "iid", "α = 1": "{dirichlet: 1.0}", "α = 0.1": "{dirichlet: 0.1}"}  # noqa: RUF001
LINKS = (("virginia", 50, 6), ("frankfurt", 30, 50), ("tokyo", 20, 65), ("sydney", 20, 90))  # Mbit/s, ms


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long, on what."""

    steps: int = number(500, "steps")
    seeds: int = number(3, "runs of each row")
    batch: int = number(128, "images a step over all workers")
    evaluate_on: int = number(5000, "test images")
    data: str = "fashion-mnist"
    model: str = "lenet"


QUICK = Plan(steps=8, seeds=1, batch=32, evaluate_on=100, data="digits", model="lenet-digits")


def recipe(plan: Plan, shards: str) -> Recipe:
    """Four sites of two workers on slow links."""
    text = {
        "name": "skew",
        "data": {"name": plan.data},
        "model": {"name": plan.model},
        "training": {
            "steps": plan.steps,
            "batch": plan.batch,
            "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
            "schedule": "cosine",
            "evaluate_every": max(1, plan.steps // 10),
            "evaluate_on": plan.evaluate_on,
        },
        "server": {"name": "ohio"},
        "sites": [{"name": name, "workers": 2} for name, _, _ in LINKS],
        "lan": {"bandwidth": "900 Mbit/s", "delay": "0.1 ms"},
        "links": [
            {"between": ["ohio", name], "bandwidth": f"{speed} Mbit/s", "delay": f"{delay} ms"}
            for name, speed, delay in LINKS
        ],
        "compute": {"seconds_per_step": 0.02, "jitter": 0.1},
    }
    return Recipe.parse(json.dumps(text), "skew.yaml").with_settings([f"data.shards={shards}"])


def wanted(plan: Plan) -> list[Cell]:
    """Every skew, every row there is."""
    chosen = {name: name for name in ROWS if name in strategies.TABLE}
    return [cell for part, shards in SHARDS.items() for cell in cells(part, recipe(plan, shards), chosen, plan.seeds)]


def cost(found: Found, row: str, skew: str, tested: int) -> Difference | None:
    """What the skew costs a row, against itself without: points, seed by seed."""
    both = [{run.seed: run.summary["accuracy"] for run in found.parts.get(p, {}).get(row, ())} for p in (skew, IID)]
    seeds = [s for s in both[0] if both[0][s] is not None and both[1].get(s) is not None]
    return difference([both[0][s] for s in seeds], [both[1][s] for s in seeds], tested) if seeds else None


def by_row(found: Found) -> Sheet:
    """Accuracy by row and skew."""
    made = Sheet(
        "skew",
        "Accuracy by skew",
        "% ± over the seeds; in brackets the points that the skew costs the same strategy.",
        [("strategy", "row", "{}"), *((part, part, "{}") for part in SHARDS)],
    )
    by_part = {part: {row["name"]: row for row in rows(runs)} for part, runs in found.parts.items()}
    for name in ROWS:
        line: Row = {"row": name}
        for part in SHARDS:
            row = by_part.get(part, {}).get(name)
            if row is not None and row["accuracy"] is not None:
                without = by_part.get(IID, {}).get(name)
                lost = f" ({row['accuracy'] - without['accuracy']:+.2f})" if without and part != IID else ""
                spread = "" if row["spread"] is None else f" ± {row['spread']:.2f}"
                line[part] = f"{row['accuracy']:.2f}{spread}{lost}"
        if len(line) > 1:
            made.rows.append(line)
    return made


def sheets(found: Found) -> list[Sheet]:
    """The summary, and a sheet for each skew."""
    shown = columns("accuracy", "spread", "points", "seconds", "speedup_to", "reached", "wan_mb", "ratio", "waiting")
    about = "Δ and speedup are against the baseline with the same skew; speedup to 99 % of what it ends with."
    return [by_row(found), *(sheet(part, about, shown, runs) for part, runs in found.parts.items())]


def claims(found: Found, plan: Plan) -> list[Claim]:
    """Hsieh et al.'s, and what one hopes for."""
    made = []
    for skew in list(SHARDS)[1:]:
        lost = cost(found, "baseline", skew, plan.evaluate_on)
        if lost is not None:
            what = f"{skew}: skew costs the baseline nothing, which averages every step (at most a point)."
            made.append(Claim(what, lost.above(-1.0), f"{lost.text()}."))
        runs: Mapping[str, Sequence[Run]] = found.parts.get(skew, {})
        for name in ROWS[1:]:
            far = apart(runs, name, "baseline", plan.evaluate_on)
            own = cost(found, name, skew, plan.evaluate_on)
            if far is not None and own is not None:
                what = f"{skew}: {name} stays within a point of the baseline with the same skew."
                made.append(Claim(what, far.above(-1.0), f"{far.text()}; against itself without skew {own.text()}."))
    return made


MEASURED = [
    "Measured: losses, accuracies of the base on test data that is not skewed, bytes of every message.",
    "Modelled: seconds. A step takes 20 ms with 10 % jitter, links are "
    + ", ".join(f"{name} {speed} Mbit/s and {delay} ms" for name, speed, delay in LINKS)
    + "; codecs cost what `weightgrad bench codecs` measured.",
    "Every site makes the same number of steps of the same size, however few samples it has; sites count alike.",
]


def make(plan: Plan, options: Options) -> Document:
    """Run what is missing, and conclude."""
    found = run(wanted(plan), options)
    missing = [name for name in ROWS if name not in strategies.TABLE]
    return Document(
        title="Sites that are not alike",
        rests_on=[
            f"Here: 4 sites of 2 workers, {plan.model} on {plan.data}, {plan.steps} steps of {plan.batch} images, "
            f"{seeds_text(plan.seeds)}, SGD 0.05 with momentum 0.9 and cosine, {plan.evaluate_on} test images. The "
            "seed decides who has which labels, too.",
            "Published: Hsu et al. (2019) train for thousands of rounds on CIFAR-10 with 100 clients, Hsieh et al. "
            "(2020) several networks to the end. Neither is one table to repeat: the direction is what is tested.",
            *([f"Rows that this version does not have: {', '.join(missing)}."] if missing else []),
            *found.facts(),
        ],
        sheets=sheets(found),
        claims=claims(found, plan),
        measured=MEASURED,
        failures=found.failures,
    )


if __name__ == "__main__":
    main(Plan(), QUICK, __doc__ or "", make)
