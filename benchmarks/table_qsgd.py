"""QSGD (Alistarh et al., 2017) as a student report measured it: bits, rounding and error feedback on 1 to 8 nodes.

    python benchmarks/table_qsgd.py --quick
    python benchmarks/table_qsgd.py                            # about 40 minutes on two cores

The full grid, three seeds, on LeNet and Fashion-MNIST, which a CPU can afford; AlexNet and ResNet-20 on CIFAR-10 for
as many steps as there is time for; ResNet-110 and ResNet-50 for a few, for times and bytes. A tenth of the
training data is held out, and all accuracies are of that tenth.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import validation_split
from result_table import ResultTable, Row
from table_runs import Cell, Found, Strategy, cells, columns, row_difference, rows, run, table
from tables import Claim, Document, Options, main, number

from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.report.comparison_table import seeds_text
from weightgrad.lab.report.runs import Run

BITS = (2, 4, 8)
PLAIN = "fp32"
# Seconds of one node's pass over the whole batch in the simulated world: assumed, a small GPU's.
SECONDS = {"lenet": 0.01, "alexnet32": 0.03, "resnet20": 0.05, "resnet110": 0.25, "resnet50": 0.3}
RATES = {"lenet": 0.05, "alexnet32": 0.02, "resnet20": 0.1, "resnet110": 0.1, "resnet50": 0.05}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The length of the runs and the number of nodes."""

    steps: int = number(200, "steps of LeNet")
    seeds: int = number(3, "seeds of each row of LeNet")
    cifar_seeds: int = number(3, "the same, AlexNet and ResNet-20")
    alexnet_steps: int = number(60, "steps of AlexNet")
    resnet_steps: int = number(30, "steps of ResNet-20")
    timing_steps: int = number(3, "steps of ResNet-110 and ResNet-50")
    batch: int = number(128, "images a step over all nodes")
    evaluate_on: int = number(6000, "held-out images, LeNet")
    cifar_evaluate_on: int = number(1000, "the same, AlexNet and ResNet-20")
    most_nodes: int = number(8, "nodes of the grid; half, a quarter ... of them for the rest")
    timed: tuple[str, ...] = ("resnet50", "resnet110")


QUICK = Plan(
    steps=4,
    seeds=1,
    cifar_seeds=1,
    alexnet_steps=1,
    resnet_steps=1,
    timing_steps=1,
    batch=8,
    evaluate_on=100,
    cifar_evaluate_on=10,
    most_nodes=2,
    timed=("resnet110",),
)


def recipe(model: str, split: validation_split.Split, plan: Plan, nodes: int) -> Recipe:
    """Nodes of one worker, with links of 1 Gbit/s to a server whose own network is unlimited."""
    steps = {"lenet": plan.steps, "alexnet32": plan.alexnet_steps, "resnet20": plan.resnet_steps}
    length = steps.get(model, plan.timing_steps)
    tested = {"lenet": plan.evaluate_on, "resnet110": 20, "resnet50": 8}.get(model, plan.cifar_evaluate_on)
    batch = nodes * 2 if model in ("resnet110", "resnet50") else plan.batch
    text = {
        "name": f"qsgd-{model}",
        "data": {"name": "fashion-mnist" if model == "lenet" else "cifar10"},
        "model": {"name": model},
        "training": {
            "steps": length,
            "batch": batch,
            "optimizer": {"name": "sgd", "lr": RATES[model], "momentum": 0.9},
            "schedule": "cosine",
            "warmup": length // 10,
            "evaluate_every": length + 1,  # the last evaluation is made anyway
        },
        "server": {"name": "hub"},
        "sites": [{"name": "node-{}", "count": nodes, "workers": 1}],
        "links": [{"between": ["hub", "node-{}"], "bandwidth": "1 Gbit/s", "delay": "0.1 ms"}],
        "compute": {"seconds_per_step": SECONDS[model] / nodes},
    }
    return Recipe.parse(json.dumps(text), f"{model}.yaml").with_settings(split.settings(tested))


def coded(bits: int, rounding: str = "stochastic", *, feedback: bool = False) -> dict[str, Strategy]:
    """One row: QSGD in both directions, and nothing is sent after the last step."""
    codec = f"qsgd(bits={bits}, rounding='{rounding}')"
    codec = f"ef({codec})" if feedback else codec
    label = f"{bits} bits, {rounding}{', error feedback' if feedback else ''}"
    changed = {"up": codec, "down": codec, "gradients": "fp32", "keep_loss": feedback, "flush": "none"}
    return {label: {"name": "qsgd", **changed}}


def grid() -> dict[str, Strategy]:
    """All rows of the grid."""
    made: dict[str, Strategy] = {PLAIN: "baseline"}
    for feedback in (False, True):
        for rounding in ("stochastic", "nearest"):
            for bits in BITS:
                made |= coded(bits, rounding, feedback=feedback)
    return made


def few() -> dict[str, Strategy]:
    """The rows of QSGD as published, one for each number of bits."""
    made: dict[str, Strategy] = {PLAIN: "baseline"}
    for bits in BITS:
        made |= coded(bits)
    return made


def part_name(model: str, nodes: int) -> str:
    """The name of a part of the table."""
    names = {"lenet": "LeNet", "alexnet32": "AlexNet", "resnet20": "ResNet-20"}
    shown = names.get(model, model.replace("resnet", "ResNet-"))
    return f"{shown}, {nodes} node{'s' if nodes > 1 else ''}"


def wanted(plan: Plan, options: Options) -> list[Cell]:
    """All runs, the longest first."""
    place = options.runs / options.name / "validation"
    cifar, fashion = validation_split.cifar10(place), validation_split.fashion_mnist(place)
    most = plan.most_nodes
    found: list[Cell] = []
    for model in ("resnet20", "alexnet32"):
        chosen = few() | coded(4, "nearest") | coded(4, "nearest", feedback=True)
        found += cells(part_name(model, most // 2), recipe(model, cifar, plan, most // 2), chosen, plan.cifar_seeds)
    for model in plan.timed:
        found += cells(part_name(model, most // 2), recipe(model, cifar, plan, most // 2), few(), 1)
    found += cells(part_name("lenet", most), recipe("lenet", fashion, plan, most), grid(), plan.seeds)
    nodes = most // 2
    while nodes >= 1:
        found += cells(part_name("lenet", nodes), recipe("lenet", fashion, plan, nodes), few(), plan.seeds)
        nodes //= 2
    return found


def tables(found: Found) -> list[ResultTable]:
    """A table for each model and number of nodes."""
    shown = columns("accuracy", "spread", "points", "loss", "step_ms", "speedup", first="")
    sent = [("kB a node, step and way", "kb", "{:.4g}"), ("fewer bytes", "ratio", "{:.3g}")]
    made = []
    for part, runs in found.parts.items():
        first = next(iter(runs.values()))[0]
        training, nodes = first.recipe["training"], len(first.header["sites"])
        about = f"{first.summary['parameters']:,} parameters, {training['steps']} steps of {training['batch']} images"
        about += f", {training['evaluate_on']} held-out images, {seeds_text(len(next(iter(runs.values()))))}."
        if _is_timing(part):
            about += " For times and bytes: accuracies mean nothing after so few steps."
        made.append(table(part, about, [*shown, *sent], runs))
        for row in made[-1].rows:
            row["kb"] = None if row["diverged"] else 1000 * row["wan_mb"] / nodes / training["steps"] / 2
    return made


def _is_timing(part: str) -> bool:
    return part.startswith(("ResNet-50", "ResNet-110"))


def by_nodes(found: Found) -> ResultTable:
    """The accuracy of LeNet by nodes and bits."""
    parts = {part: rows(runs) for part, runs in found.parts.items() if part.startswith("LeNet")}
    order = sorted(parts, key=lambda part: int(part.split()[1]))
    headings = [(part.removeprefix("LeNet, "), part, "{}") for part in order]
    made = ResultTable(
        "nodes", "LeNet by nodes", "Accuracy % ± over the seeds; speedup over fp32 in brackets.", headings
    )
    made.columns.insert(0, ("", "row", "{}"))
    for name in few():
        cells_: Row = {"row": name}
        for part in order:
            row = next((r for r in parts[part] if r["name"] == name), None)
            if row is not None and row["accuracy"] is not None:
                spread = "" if row["spread"] is None else f" ± {row['spread']:.2f}"
                cells_[part] = f"{row['accuracy']:.2f}{spread} ({row['speedup']:.2f})"
        made.rows.append(cells_)
    return made


def claims(found: Found, plan: Plan) -> list[Claim]:
    """The two claims of the report, and what rounding and error feedback should do."""
    made = []
    for part, runs in found.parts.items():
        if _is_timing(part):
            continue
        tested = _tested(runs)
        for bits, word, limit in ((8, "4 times fewer bytes are free", 0.5), (4, "8 times fewer nearly free", 1.0)):
            far = row_difference(runs, f"{bits} bits, stochastic", PLAIN, tested)
            if far is not None:
                what = f"{part}: {word}: {bits} bits lose at most {limit} points."
                made.append(Claim(what, far.above(-limit), f"{far.text()}."))
    return made + _grid_claims(found.parts.get(part_name("lenet", plan.most_nodes), {}))


def _tested(runs: Mapping[str, Sequence[Run]]) -> int:
    """The number of images that the accuracies are measured on."""
    return int(next(iter(runs.values()))[0].recipe["training"]["evaluate_on"])


def _grid_claims(runs: Mapping[str, Sequence[Run]]) -> list[Claim]:
    made = []
    tested = _tested(runs) if runs else 0
    for bits in BITS:
        for better, worse, why in (
            ("stochastic", "nearest", "rounding at random is better than to the nearest"),
            ("stochastic, error feedback", "stochastic", "error feedback helps stochastic rounding"),
            ("nearest, error feedback", "nearest", "error feedback helps rounding to the nearest"),
        ):
            far = row_difference(runs, f"{bits} bits, {better}", f"{bits} bits, {worse}", tested)
            if far is not None:
                made.append(Claim(f"LeNet, {bits} bits: {why}.", far.above(0.0), f"{far.text()}."))
    return made


MEASURED = [
    "Measured: losses, accuracies (of the held-out tenth; the test data is never looked at), bytes of every message.",
    "Modelled: seconds. A node's pass is assumed (a small GPU's, shared equally by the nodes), links are 1 Gbit/s and "
    "0.1 ms, the server's own card is unlimited, codecs cost what `weightgrad bench codecs` measured.",
    "Both ways are quantized here, to the server and back. QSGD's own system sends everyone's encoded gradient to "
    "everyone and quantizes once: its noise is smaller by the way back, its bytes grow with the nodes.",
    "Batch norm sees every node's batches in the simulator, and its statistics cost no bytes.",
]


def make(plan: Plan, options: Options) -> Document:
    """Make the missing runs, and the document."""
    found = run(wanted(plan, options), options)
    both = f"{plan.alexnet_steps} steps of AlexNet and {plan.resnet_steps} of ResNet-20"
    lengths = f"{both}, {seeds_text(plan.cifar_seeds)}"
    timed = " and ".join(model.replace("resnet", "ResNet-") for model in plan.timed)
    return Document(
        title="QSGD: bits, rounding, error feedback and nodes",
        rests_on=[
            f"Here: {plan.steps} steps of LeNet on Fashion-MNIST, {seeds_text(plan.seeds)}; on CIFAR-10 {lengths}; "
            f"{plan.timing_steps} of {timed}, for times and bytes. SGD with momentum 0.9 and "
            "cosine, 10 % of the training data held out for validation.",
            "The report: AlexNet, ResNet-50 and ResNet-110 on CIFAR-10, 1, 2, 4 and 8 nodes, 10 % held out; it found 4 "
            "times fewer bytes free and 8 times nearly free. Our notes have neither its epochs nor its number of runs.",
            *found.facts(),
        ],
        tables=[by_nodes(found), *tables(found)],
        claims=claims(found, plan),
        measured=MEASURED,
        failures=found.failures,
    )


if __name__ == "__main__":
    main(Plan(), QUICK, __doc__ or "", make)
