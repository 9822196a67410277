"""Scale: from 2 to 100 sites. Virtual time and bytes of a run, and what an update costs the global server.

    python benchmarks/table_scale.py --quick
    python benchmarks/table_scale.py                           # about 7 minutes on two cores

The same training (data, batch, steps) is divided among more and more sites, each behind its own link; all share the
network card of the server. Then the time and memory of the real `ServerState` are measured with as many sites.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

import server_cost
from charts import Lines
from result_table import MeasurementCache, ResultTable, Row, parameters
from server_cost import Case
from table_runs import Cell, Found, cells, columns, rows, run
from tables import Claim, Document, Options, main, number

from weightgrad.core import strategies
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.report.comparison_table import seeds_text

STRATEGIES = ("baseline", "diloco", "weightgrad", "auto")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The length of the runs, and the numbers of sites and parameters."""

    sites: tuple[int, ...] = (2, 5, 10, 25, 50, 100)
    numels: tuple[int, ...] = (1_000_000, 10_000_000)
    steps: int = number(150, "steps of a run")
    seeds: int = number(1, "seeds of each row")
    batch: int = number(400, "images a step over all sites")
    width: int = number(64, "units of the model's hidden layer")
    rounds: int = number(3, "rounds of the server, of which the best counts")


QUICK = Plan(sites=(2, 10), numels=(20_000,), steps=6, batch=40, width=16, rounds=1)


def recipe(plan: Plan, sites: int) -> Recipe:
    """Sites of one worker behind 10 Mbit/s and 40 ms, a server with 1 Gbit/s for all of them."""
    text = {
        "name": "scale",
        "data": {"name": "synthetic"},
        "model": {"name": "mlp", "options": {"width": plan.width, "depth": 1}},
        "training": {
            "steps": plan.steps,
            "batch": plan.batch,
            "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
            "schedule": "cosine",
            "evaluate_every": max(1, plan.steps // 5),
        },
        "server": {"name": "hub", "bandwidth": "1 Gbit/s"},
        "sites": [{"name": "site-{}", "count": sites, "workers": 1}],
        "links": [{"between": ["hub", "site-{}"], "bandwidth": "10 Mbit/s", "delay": "40 ms"}],
        "compute": {"seconds_per_step": 0.05, "jitter": 0.1},
    }
    return Recipe.parse(json.dumps(text), "scale.yaml")


def wanted(plan: Plan) -> list[Cell]:
    """All runs, the largest first."""
    chosen = {name: name for name in STRATEGIES if name in strategies.PRESETS}
    return [
        cell
        for sites in sorted(plan.sites, reverse=True)
        for cell in cells(f"{sites} sites", recipe(plan, sites), chosen, plan.seeds)
    ]


def costs(plan: Plan, cache: MeasurementCache) -> list[Row]:
    """The cost of the server for every strategy, number of sites and size of the model that fits into memory."""
    found = []
    for numel in plan.numels:
        for name in STRATEGIES:
            for sites in plan.sites:
                if name in strategies.PRESETS:
                    own = json.dumps(
                        strategies.find(name).to_dict(), sort_keys=True
                    )  # a changed strategy is measured again
                    how = functools.partial(_cost, Case(name, sites, numel), plan.rounds)
                    row = cache.get(f"{sites} {numel} {plan.rounds} {own}", how)
                    found += [{**row, "shown": parameters(numel)}] if row else []
    return found


def _cost(case: Case, rounds: int) -> Row:
    return server_cost.measure(case, rounds) or {}


def by_sites(found: Found) -> dict[str, dict[int, Row]]:
    """Rows of every strategy by number of sites."""
    made: dict[str, dict[int, Row]] = {}
    for part, runs in found.parts.items():
        for row in rows(runs):
            sites = int(part.split()[0])
            made.setdefault(row["name"], {})[sites] = {**row, "sites": sites, "site_kb": _site_kb(row, sites)}
    return {name: dict(sorted(of.items())) for name, of in made.items()}


def _site_kb(row: Row, sites: int) -> float:
    return 1000 * float(row["wan_mb"]) / sites


def tables(found: Found, cost: list[Row]) -> list[ResultTable]:
    """The runs by number of sites, and the cost of the server."""
    shown = columns("accuracy", "seconds", "step_ms", "speedup", "waiting", "wan_mb", "ratio")
    simulated = ResultTable(
        "runs",
        "The same training by sites",
        "Speedup, and how many times fewer bytes, are against the baseline with as many sites.",
        [("sites", "sites", "{:d}"), *shown, ("kB a site", "site_kb", "{:.4g}")],
    )
    of = by_sites(found)
    simulated.rows = [
        of[name][n] for n in sorted({n for row in of.values() for n in row}) for name in of if n in of[name]
    ]
    server = ResultTable(
        "server",
        "The global server",
        "Processor time to take one site's update (decode, add, and its share of closing the round: aggregate, encode, "
        "step, fingerprint), also in passes of `copy_` over the model; what it holds in tensors when all but one push "
        "of a round have come, in the order of the sites' names, and in the worst one, when encoded pushes must wait.",
        [
            *(("strategy", "strategy", "{}"), ("parameters", "shown", "{}"), ("sites", "sites", "{:d}")),
            *(("push kB", "push_kb", "{:.4g}"), ("result kB", "result_kb", "{:.4g}")),
            *(("ms an update", "update_ms", "{:.3g}"), ("passes", "passes", "{:.2f}")),
            *(("ms a round", "round_ms", "{:.4g}"), ("MB held", "held_mb", "{:.4g}")),
            *(("in models", "held_models", "{:.2f}"), ("MB held, worst order", "backwards_mb", "{:.4g}")),
        ],
        cost,
    )
    return [simulated, server]


def claims(found: Found, cost: list[Row]) -> list[Claim]:
    """What a design for many sites must achieve."""
    made = []
    for name, of in by_sites(found).items():
        few, many = of[min(of)], of[max(of)]
        slower = many["seconds"] / few["seconds"]
        what = f"{name}: {many['sites']} sites take no longer than {few['sites']} (at most 10 % more virtual time)."
        made.append(
            Claim(what, slower <= 1.1, f"{few['seconds']:.3g} s and {many['seconds']:.3g} s: {slower:.2f} times.")
        )
    for numel in sorted({row["numel"] for row in cost}):
        for name in STRATEGIES:
            of_name = sorted(
                (r for r in cost if (r["strategy"], r["numel"]) == (name, numel)), key=lambda row: int(row["sites"])
            )
            if not of_name:
                continue
            few, many = of_name[0], of_name[-1]
            where = f"{name}, {parameters(numel)}, {few['sites']} to {many['sites']} sites"
            said = f"{few['passes']:.2f} and {many['passes']:.2f} passes."
            made.append(
                Claim(
                    f"{where}: an update costs near one pass over the model (at most two).", many["passes"] <= 2, said
                )
            )
            grown = many["held_mb"] - few["held_mb"]
            what = f"{where}: memory does not grow with the sites (at most a tenth of a model in all)."
            made.append(
                Claim(what, grown <= 0.4 * numel / 1e6, f"{few['held_mb']:.4g} MB and {many['held_mb']:.4g} MB.")
            )
    return made


MEASURED = [
    "Measured: losses, accuracies and bytes of the runs; processor time and tensors of the real `ServerState`, with "
    "real payloads of normal noise, in one process, without a network around it (`benchmarks/bench_field.py` has that: "
    "TLS, disk, processes).",
    "Modelled: the seconds of the runs. A step computes 50 ms with 10 % jitter whatever the number of sites, links are "
    "10 Mbit/s and 40 ms, the server's card 1 Gbit/s; its processor time is modelled as decoding and encoding only.",
]


def make(plan: Plan, options: Options) -> Document:
    """Make the missing runs and measurements, and the document."""
    found = run(wanted(plan), options)
    cost = costs(plan, MeasurementCache(options.runs / options.name / "measured.json"))
    of = by_sites(found)
    times = {name: [(float(n), float(row["step_ms"])) for n, row in runs.items()] for name, runs in of.items()}
    chart = Lines(
        title="Virtual time of a step by the number of sites",
        x="sites, log scale",
        y="ms a step, log scale",
        series=times,
        log_y=True,
    )
    left_out = len(plan.numels) * len([n for n in STRATEGIES if n in strategies.PRESETS]) * len(plan.sites) - len(cost)
    small = next(iter(found.all()), None)
    return Document(
        title="Scale: 2 to 100 sites, and the global server's cost",
        rests_on=[
            f"Here: {plan.steps} steps of {plan.batch} images over all sites, "
            f"{'' if small is None else f'''{small.summary['parameters']:,} parameters, '''}synthetic images, "
            f"{seeds_text(plan.seeds)}; the server's own cost is the best of {plan.rounds} rounds.",
            "No published table: the goals are this project's own.",
            *([f"{left_out} servers were left out: the pushes of a round would be above 1.5 GB."] if left_out else []),
            *found.facts(),
        ],
        tables=tables(found, cost),
        claims=claims(found, cost),
        measured=MEASURED,
        charts={"step-time": chart},
        failures=found.failures,
    )


if __name__ == "__main__":
    main(Plan(), QUICK, __doc__ or "", make)
