"""Tasks outside recipes/gpt.yaml: other numbers of sites, optimizers, models and lines, `auto` beside three rivals.

    python benchmarks/table_untuned.py --quick
    python benchmarks/table_untuned.py                         # thirteen tasks, 200 steps each, seed 6
    python benchmarks/table_untuned.py --seeds 2

By the tasks in CHOSEN_BY the parts of `auto` were chosen on 2026-11-18 and 19. No setting was chosen by the others, and
claims are made for those alone. Every row has the same steps, so the loss says how well a strategy trains a step, and
the seconds what it takes. The last column is the time to the loss that the baseline ends with; a row without one has
not got there in these steps.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from result_table import ResultTable, Row
from table_runs import Cell, Found, Strategy, cells, columns, run, table
from table_transformer import reached
from tables import ROOT, Claim, Document, Options, main, number

from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.report.comparison_table import seeds_text
from weightgrad.lab.report.runs import Run

PARTIAL = True
ROWS: Mapping[str, Strategy] = {
    "baseline": "baseline",
    "auto": "auto",
    "sparseloco": "sparseloco",
    "diloco, every 10": {"name": "diloco", "every": 10},
}
_LINES = {  # Mbit/s, ms one way
    "virginia": (100, 6),
    "tokyo": (20, 65),
    "frankfurt": (50, 45),
    "sydney": (30, 60),
    "oregon": (100, 25),
    "mumbai": (20, 95),
    "london": (50, 40),
    "saopaulo": (30, 62),
}


def _sites(count: int) -> tuple[str, ...]:
    """Settings for so many sites of one worker, with lines like those of recipes/gpt.yaml."""
    names = list(_LINES)[:count]
    sites = [{"name": name, "workers": 1} for name in names]
    links = [
        {"between": ["ohio", name], "bandwidth": f"{_LINES[name][0]} Mbit/s", "delay": f"{_LINES[name][1]} ms"}
        for name in names
    ]
    return f"sites={json.dumps(sites)}", f"links={json.dumps(links)}"


def _optimizer(**options: Any) -> tuple[str, ...]:
    return (f"training.optimizer={json.dumps(options)}",)


def _lines(mbit_s: float, ms: float, *sites: str) -> tuple[str, ...]:
    """Settings for lines that are all alike."""
    links = [{"between": ["ohio", name], "bandwidth": f"{mbit_s:g} Mbit/s", "delay": f"{ms:g} ms"} for name in sites]
    return (f"links={json.dumps(links)}",)


CHOSEN_BY = ("2 sites", "8 sites", "SGD", "Muon", "wider GPT", "LeNet, AdamW", "LeNet, Muon")
TASKS: Mapping[str, tuple[str, tuple[str, ...]]] = {  # the recipe, and what is changed in it
    "2 sites": ("gpt", _sites(2)),
    "8 sites": ("gpt", _sites(8)),
    "SGD": ("gpt", _optimizer(name="sgd", lr=0.1, momentum=0.9)),
    "Muon": ("gpt", _optimizer(name="muon", lr=0.005, momentum=0.95, weight_decay=0.1)),
    "wider GPT": (
        "gpt",
        ('model.options={"width": 128, "layers": 2, "heads": 4}', "training.batch=16", "training.optimizer.lr=0.001"),
    ),
    "LeNet, AdamW": ("laptop", _optimizer(name="adamw", lr=0.002, weight_decay=0.01)),
    "3 sites, Adam": (
        "gpt",
        (*_sites(3), *_optimizer(name="adam", lr=0.001), "training.schedule=constant", "training.batch=24"),
    ),
    "thin lines": ("gpt", _lines(1, 150, "virginia", "frankfurt", "tokyo", "sydney")),
    "CifarNet, AdamW": (
        "paper",
        (
            *_optimizer(name="adamw", lr=0.001, weight_decay=0.01),
            *_lines(50, 40, "virginia", "california"),
        ),
    ),
    "LeNet, Muon": ("laptop", _optimizer(name="muon", lr=0.005, momentum=0.95)),
    "6 sites, constant rate": (
        "gpt",
        (
            *_sites(6),
            *_optimizer(name="adamw", lr=0.001, betas=[0.9, 0.99]),
            "training.schedule=constant",
            "training.batch=48",
        ),
    ),
    "5 sites, LeNet, Adam": ("laptop", (*_sites(5), *_optimizer(name="adam", lr=0.001), "training.batch=80")),
    "skewed LeNet, AdamW": (
        "laptop",
        ("data.shards={dirichlet: 0.1}", *_optimizer(name="adamw", lr=0.002, weight_decay=0.01)),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The length of the runs, and the tasks."""

    steps: int = number(200, "steps")
    seeds: int = number(1, "seeds of each row")
    first_seed: int = number(6, "the first of them")
    evaluate_on: int = number(512, "test windows or images")
    tasks: tuple[str, ...] = tuple(TASKS)


QUICK = Plan(steps=4, first_seed=0, evaluate_on=16, tasks=("skewed LeNet, AdamW",))


def recipe(plan: Plan, task: str) -> Recipe:
    """The recipe of a task; a tenth of the steps is warm-up."""
    name, settings = TASKS[task]
    length = [
        f"training.steps={plan.steps}",
        f"training.warmup={plan.steps // 10}",
        f"training.evaluate_every={max(1, plan.steps // 20)}",
        f"training.evaluate_on={plan.evaluate_on}",
    ]
    return Recipe.load(ROOT / "recipes" / f"{name}.yaml").with_settings([*length, *settings])


def wanted(plan: Plan) -> list[Cell]:
    """The runs, seed by seed: with one seed there is already a whole table."""
    found = [
        cell
        for task in plan.tasks
        for cell in cells(task, recipe(plan, task), ROWS, plan.seeds, first_seed=plan.first_seed)
    ]
    return sorted(found, key=lambda cell: cell.key.seed)


def _loss(runs: Sequence[Run]) -> float:
    return statistics.fmean(one.summary["loss"] for one in runs)


def overview(found: Found, plan: Plan) -> ResultTable:
    """All tasks in one table, one row for each strategy."""
    made = ResultTable(
        "overview",
        "Every task",
        f"The test loss after {plan.steps} steps and its distance to the baseline's, the virtual seconds and bytes of "
        "these steps, and the time to the loss that the baseline ends with.",
        [
            ("task", "task", "{}"),
            ("auto was chosen by it", "tuned", "{}"),
            ("strategy", "row", "{}"),
            ("loss", "loss", "{:.3f}"),
            ("above the baseline", "above", "{:+.3f}"),
            ("seconds", "seconds", "{:.4g}"),
            ("WAN MB", "mb", "{:.4g}"),
            ("seconds to the baseline's loss", "t", "{:.4g}"),
        ],
    )
    for task, rows in found.parts.items():
        losses = {one.seed: one.summary["loss"] for one in rows["baseline"]}
        for row, runs in rows.items():
            loss = _loss(runs)
            tuned = "yes" if task in CHOSEN_BY else "no"
            shown: Row = {
                "task": task,
                "tuned": tuned,
                "row": row,
                "loss": loss,
                "above": loss - _loss(rows["baseline"]),
            }
            shown["seconds"] = statistics.fmean(one.summary["virtual_seconds"] for one in runs)
            shown["mb"] = statistics.fmean(one.summary["wan_bytes"] for one in runs) / 1e6
            if (seconds := reached(runs, losses, "t")) is not None:
                shown["t"] = seconds
            made.rows.append(shown)
    return made


def claims(goal: ResultTable) -> list[Claim]:
    """What was set as a goal for `auto`, task by task."""
    made = []
    for task in dict.fromkeys(row["task"] for row in goal.rows if row["tuned"] == "no"):
        rows = {row["row"]: row for row in goal.rows if row["task"] == task}
        apart = [row for row in rows if row not in ("baseline", "auto")]
        if "auto" not in rows or not apart:
            continue
        best = min(apart, key=lambda row: rows[row]["loss"])
        far = rows["auto"]["loss"] - rows[best]["loss"]
        what = f"{task}: at equal steps auto is at most 0.005 above the best that trains apart."
        made.append(Claim(what, far <= 0.005, f"{far:+.3f} against {best}."))
        own, others = rows["auto"].get("t"), {row: rows[row]["t"] for row in rows if row != "auto" and "t" in rows[row]}
        if not others:
            continue
        first = min(others, key=lambda row: others[row])
        said = f"{'not in these steps' if own is None else f'{own:.4g} s'}; {first} has it after {others[first]:.4g} s."
        what = f"{task}: auto has the baseline's loss before everybody else."
        made.append(Claim(what, own is not None and own <= others[first], said))
    return made


def make(plan: Plan, options: Options) -> Document:
    """Make the missing runs, and the document."""
    found = run(wanted(plan), options)
    goal = overview(found, plan)
    shown = columns("loss", "accuracy", "seconds", "step_ms", "wan_mb", "ratio", "waiting")
    return Document(
        title="Tasks outside recipes/gpt.yaml",
        rests_on=[
            f"{len(found.parts)} tasks, {plan.steps} steps, {seeds_text(plan.seeds)} from {plan.first_seed} on. "
            "Learning rates are common ones and were not searched for.",
            *(f"{task}: `recipes/{TASKS[task][0]}.yaml` with {' '.join(TASKS[task][1])}" for task in plan.tasks),
            *found.facts(),
        ],
        tables=[goal, *(table(part, "Losses and bytes.", shown, runs) for part, runs in found.parts.items())],
        claims=claims(goal),
        measured=[
            "Measured: losses of the global model on test data, bytes of every message.",
            "Modelled: seconds. Compute and links are as the recipe says.",
        ],
        failures=found.failures,
    )


if __name__ == "__main__":
    main(Plan(), QUICK, __doc__ or "", make)
