"""Consistency at the global server: sync, bounded, backup and async, with and without stragglers.

    python benchmarks/table_consistency.py --quick
    python benchmarks/table_consistency.py                     # about 9 minutes on two cores

The strategy is `baseline` with another `consistency`: full-precision gradients of every site at every step, so that
only the waiting and the staleness differ. Bounded: Ho et al., 2013; backup: Chen et al., 2016; staleness-aware: Zhang
et al., 2016; delay compensation: Zheng et al., 2017.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from charts import Accuracies, Chart
from result_table import ResultTable, Row
from table_runs import Cell, Found, Strategy, cells, columns, row_difference, rows, run, table
from tables import Claim, Document, Options, main, number

from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.report.comparison_table import seeds_text

SYNC = "sync"
ROWS: dict[str, str] = {
    SYNC: "sync",
    "bounded(1)": "bounded(1)",
    "bounded(4)": "bounded(4)",
    "backup(1)": "backup(1)",
    "backup(2)": "backup(2)",
    "async": "async_",
    "async, staleness-aware": "async_(staleness='inverse')",
    "async, share by staleness": "async_(staleness='inverse_share')",
    "async, compensated 0.04": "async_(compensate=0.04)",
    "async, compensated 10": "async_(compensate=10.0)",
}
STEADY, STRAGGLING = "Steady", "With stragglers"
SLOW, NOW_AND_THEN, OFTEN = 4, 5, 0.05


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The length of the runs, the model and the data."""

    steps: int = number(300, "steps of every site")
    seeds: int = number(3, "seeds of each row")
    sites: int = number(8, "sites of one worker")
    batch: int = number(128, "images a step over all sites")
    evaluations: int = number(15, "evaluations of a run")
    evaluate_on: int = number(3000, "test images")
    data: str = "fashion-mnist"
    model: str = "lenet"


QUICK = Plan(steps=8, seeds=1, batch=32, evaluations=2, evaluate_on=100, data="digits", model="lenet-digits")


def recipe(plan: Plan, *, stragglers: bool) -> Recipe:
    """Sites behind 1 Gbit/s and 10 ms. Of the stragglers one site is always slow, and every site now and then."""
    compute: dict[str, Any] = {"seconds_per_step": 0.05, "jitter": 0.1}
    if stragglers:
        compute["stragglers"] = [
            {"site": f"site-{plan.sites}", "factor": SLOW},
            {"probability": OFTEN, "factor": NOW_AND_THEN},
        ]
    text = {
        "name": "consistency",
        "data": {"name": plan.data},
        "model": {"name": plan.model},
        "training": {
            "steps": plan.steps,
            "batch": plan.batch,
            "optimizer": {"name": "sgd", "lr": 0.1},  # momentum on stale gradients ends at chance
            "evaluate_every": max(1, plan.steps // plan.evaluations),
            "evaluate_on": plan.evaluate_on,
        },
        "server": {"name": "hub"},
        "sites": [{"name": "site-{}", "count": plan.sites, "workers": 1}],
        "links": [{"between": ["hub", "site-{}"], "bandwidth": "1 Gbit/s", "delay": "10 ms"}],
        "compute": compute,
    }
    return Recipe.parse(json.dumps(text), "consistency.yaml")


def wanted(plan: Plan) -> list[Cell]:
    """The runs of every row, with and without stragglers."""
    chosen: dict[str, Strategy] = {
        label: {"name": "baseline", "consistency": words, "flush": "none"} for label, words in ROWS.items()
    }
    return [
        cell
        for part, slow in ((STEADY, False), (STRAGGLING, True))
        for cell in cells(part, recipe(plan, stragglers=slow), chosen, plan.seeds)
    ]


def tables(found: Found) -> list[ResultTable]:
    """One table with and one without stragglers."""
    shown = columns(
        "accuracy", "spread", "points", "seconds_to", "speedup_to", "reached", "seconds", "waiting", "wan_mb"
    )
    made = []
    for part, runs in found.parts.items():
        about = "Seconds to accuracy: to 99 % of what sync ends with, seed by seed; speedup is over sync's."
        made.append(table(part, about, shown, runs))
    return made


def claims(found: Found, plan: Plan) -> list[Claim]:
    """What the papers say of each, tested with stragglers, where it should matter."""
    runs = found.parts.get(STRAGGLING, {})
    by_name = {row["name"]: row for row in rows(runs)}
    made = []
    for name, why in (
        ("backup(1)", "backup sites pay off with stragglers: they reach the same accuracy faster than sync"),
        ("bounded(4)", "bounded staleness pays off with stragglers: it reaches the same accuracy faster than sync"),
        ("async", "async reaches the same accuracy faster than sync with stragglers"),
    ):
        if name in by_name:
            row = by_name[name]
            times = row["speedup_to"]
            said = "No seed reached it." if times is None else f"{times:.2f} times as fast ({_reached(row)})."
            made.append(Claim(f"{name}: {why}.", times is not None and times > 1, said))
    made += _accuracies(found, plan)
    steady = {row["name"]: row for row in rows(found.parts.get(STEADY, {}))}
    if SYNC in steady and SYNC in by_name:
        lost = by_name[SYNC]["step_ms"] / steady[SYNC]["step_ms"]
        made.append(
            Claim(
                f"sync is as slow as its slowest site ({SLOW} times slower here; other sites are slow now and then).",
                lost > SLOW / 2,
                f"Its steps take {lost:.2f} times as long as without stragglers.",
            )
        )
    return made


def _reached(row: Row) -> str:
    return f"{row['reached']} of {row['seeds']} seeds reached it"


def _accuracies(found: Found, plan: Plan) -> list[Claim]:
    made = []
    runs = found.parts.get(STRAGGLING, {})
    for name, other, sign, what in (
        ("async", SYNC, -1, "async ends less accurate than sync"),
        ("backup(1)", SYNC, 0, "backup(1), whose late updates are not dropped, ends within a point of sync"),
        ("async, staleness-aware", "async", 1, "the rate η/τ makes async more accurate"),
        ("async, share by staleness", "async", 1, "the rate η/(n(1+τ)), which is ours, makes async more accurate"),
        ("async, compensated 0.04", "async", 1, "delay compensation makes async more accurate (0.04, as published)"),
        ("async, compensated 10", "async", 1, "delay compensation makes async more accurate (10)"),
    ):
        far = row_difference(runs, name, other, plan.evaluate_on)
        if far is None:
            continue
        above = far.above(-1.0 if sign == 0 else 0.0)
        holds = above if sign >= 0 or above is None else not above
        made.append(Claim(f"With stragglers: {what}.", holds, f"{far.text()}."))
    return made


MEASURED = [
    "Measured: losses, accuracies, bytes, and the order in which updates reach the global model in virtual time.",
    f"Modelled: seconds. A pass takes 50 ms with 10 % jitter; with stragglers the last site takes {SLOW} times that, "
    f"and each site {NOW_AND_THEN} times that in {100 * OFTEN:.0f} % of its steps; links are 1 Gbit/s and 10 ms, fast "
    "enough for the bytes not to matter. Async sends a result to every site for every push: its bytes grow with them.",
    "Between sites, not between the workers of one. Every site makes the same number of steps, so a run is over when "
    "the slowest is done: compare the seconds to accuracy, not those of whole runs. With backup the steps are the "
    "server's: a late site goes on where the others are, and what it has goes into the next round, while Chen et al. "
    "drop it. A constant learning rate: a schedule by steps would favour whoever is behind. Async: a push moves the "
    "global model by its share, 1/n, of a step; staleness-aware: by 1/τ of a step, for a push that is τ ≥ 1 versions "
    "old.",
]


def make(plan: Plan, options: Options) -> Document:
    """Make the missing runs, and the document."""
    found = run(wanted(plan), options)
    charts: dict[str, Chart] = {
        part.lower().replace(" ", "-"): Accuracies.of_runs(runs, title=f"{part}: accuracy over time")
        for part, runs in found.parts.items()
    }
    return Document(
        title="Consistency: who waits for whom, and what it costs",
        rests_on=[
            f"Here: {plan.sites} sites of one worker, {plan.model} on {plan.data}, {plan.steps} steps of {plan.batch} "
            f"images, {seeds_text(plan.seeds)}, SGD 0.1 without momentum, {plan.evaluate_on} test images.",
            "There is no one published table of these: each paper has its own network, and 16 to 200 workers for hours "
            "or days. What is tested here is the direction of what each says.",
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
