"""Skewed sites: labels by a Dirichlet distribution with alpha 0.1 and 1, or without skew, for five strategies.

    python benchmarks/table_skew.py --quick
    python benchmarks/table_skew.py                            # about 9 minutes on two cores

Of each class, sites get shares drawn from a Dirichlet distribution (Hsu et al., 2019): at 0.1 most sites see two or
three classes. Hsieh et al. (2020) found that strategies with local steps or thresholds lose most there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from result_table import ResultTable, Row
from table_runs import Cell, Found, cells, columns, paired, row_difference, rows, run, table
from tables import Claim, Difference, Document, Options, main, number

from weightgrad.core import strategies
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.report.comparison_table import seeds_text
from weightgrad.lab.report.runs import Run

STRATEGIES = ("baseline", "gaia", "diloco", "weightgrad", "auto")
IID = "iid"
SHARDS = {IID: "iid", "α = 1": "{dirichlet: 1.0}", "α = 0.1": "{dirichlet: 0.1}"}  # noqa: RUF001
LINKS = (("virginia", 50, 6), ("frankfurt", 30, 50), ("tokyo", 20, 65), ("sydney", 20, 90))  # Mbit/s, ms


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The length of the runs, the model and the data."""

    steps: int = number(500, "steps")
    seeds: int = number(3, "seeds of each row")
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
    """The runs of every strategy at every skew."""
    chosen = {name: name for name in STRATEGIES if name in strategies.PRESETS}
    return [cell for part, shards in SHARDS.items() for cell in cells(part, recipe(plan, shards), chosen, plan.seeds)]


def cost(found: Found, row: str, skew: str, tested: int) -> Difference | None:
    """The accuracy that a skew costs a strategy, in points, seed by seed; None if there are no such runs."""
    skewed, without = (found.parts.get(part, {}).get(row, ()) for part in (skew, IID))
    return paired(skewed, without, tested)


def by_row(found: Found) -> ResultTable:
    """Accuracy by strategy and skew."""
    made = ResultTable(
        "skew",
        "Accuracy by skew",
        "% ± over the seeds; in brackets the points that the skew costs the same strategy.",
        [("strategy", "row", "{}"), *((part, part, "{}") for part in SHARDS)],
    )
    by_part = {part: {row["name"]: row for row in rows(runs)} for part, runs in found.parts.items()}
    for name in STRATEGIES:
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


def tables(found: Found) -> list[ResultTable]:
    """A summary, and a table for each skew."""
    shown = columns("accuracy", "spread", "points", "seconds", "speedup_to", "reached", "wan_mb", "ratio", "waiting")
    about = "Δ and speedup are against the baseline with the same skew; speedup to 99 % of what it ends with."
    return [by_row(found), *(table(part, about, shown, runs) for part, runs in found.parts.items())]


def claims(found: Found, plan: Plan) -> list[Claim]:
    """The claims of Hsieh et al., and that each strategy stays close to the baseline."""
    made = []
    for skew in list(SHARDS)[1:]:
        lost = cost(found, "baseline", skew, plan.evaluate_on)
        if lost is not None:
            what = f"{skew}: skew costs the baseline nothing, which averages every step (at most a point)."
            made.append(Claim(what, lost.above(-1.0), f"{lost.text()}."))
        runs: Mapping[str, Sequence[Run]] = found.parts.get(skew, {})
        for name in STRATEGIES[1:]:
            far = row_difference(runs, name, "baseline", plan.evaluate_on)
            own = cost(found, name, skew, plan.evaluate_on)
            if far is not None and own is not None:
                what = f"{skew}: {name} stays within a point of the baseline with the same skew."
                made.append(Claim(what, far.above(-1.0), f"{far.text()}; against itself without skew {own.text()}."))
    return made


MEASURED = [
    "Measured: losses, accuracies of the global model on test data that is not skewed, bytes of every message.",
    "Modelled: seconds. A step takes 20 ms with 10 % jitter, links are "
    + ", ".join(f"{name} {speed} Mbit/s and {delay} ms" for name, speed, delay in LINKS)
    + "; codecs cost what `weightgrad bench codecs` measured.",
    "Every site makes the same number of steps of the same size, however few samples it has; sites count alike.",
]


def make(plan: Plan, options: Options) -> Document:
    """Make the missing runs, and the document."""
    found = run(wanted(plan), options)
    missing = [name for name in STRATEGIES if name not in strategies.PRESETS]
    return Document(
        title="Skewed sites",
        rests_on=[
            f"Here: 4 sites of 2 workers, {plan.model} on {plan.data}, {plan.steps} steps of {plan.batch} images, "
            f"{seeds_text(plan.seeds)}, SGD 0.05 with momentum 0.9 and cosine, {plan.evaluate_on} test images. The "
            "seed decides who has which labels, too.",
            "Published: Hsu et al. (2019) train for thousands of rounds on CIFAR-10 with 100 clients, Hsieh et al. "
            "(2020) several networks to the end. Neither is one table to repeat: the direction is what is tested.",
            *([f"Strategies that this version does not have: {', '.join(missing)}."] if missing else []),
            *found.facts(),
        ],
        tables=tables(found),
        claims=claims(found, plan),
        measured=MEASURED,
        failures=found.failures,
    )


if __name__ == "__main__":
    main(Plan(), QUICK, __doc__ or "", make)
