"""QSGD (Alistarh et al., 2017) as a student report measured it: bits, rounding and error feedback on 1 to 8 nodes.

    python benchmarks/table_qsgd.py --quick
    python benchmarks/table_qsgd.py                            # about 40 minutes on two cores
    python benchmarks/run_all.py --resume --only qsgd          # the report's own networks; days, and it can be stopped

Without `--full`: the grid, three seeds, on LeNet and Fashion-MNIST, which a CPU can afford; AlexNet and ResNet-20 on
CIFAR-10 for a few steps; ResNet-110 and ResNet-50 for times and bytes. With it: the whole grid of AlexNet and
ResNet-110 on every number of nodes, and ResNet-50. A tenth of the training data is held out; all accuracies are of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import validation_split
from result_table import ResultTable, Row
from table_runs import Cell, Found, Strategy, cells, columns, row_difference, rows, run, table
from tables import Claim, Difference, Document, Options, main, number

from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.report.comparison_table import seeds_text
from weightgrad.lab.report.runs import Run

BITS = (2, 4, 8)
PLAIN = "fp32"
PARTIAL = True
NAMES = {
    "lenet": "LeNet",
    "alexnet32": "AlexNet",
    "resnet20": "ResNet-20",
    "resnet110": "ResNet-110",
    "resnet50": "ResNet-50",
}
# Seconds of one node's pass over the whole batch in the simulated world: assumed, a small GPU's.
SECONDS = {"lenet": 0.01, "alexnet32": 0.03, "resnet20": 0.05, "resnet110": 0.25, "resnet50": 0.3}
RATES = {"lenet": 0.05, "alexnet32": 0.02, "resnet20": 0.1, "resnet110": 0.1, "resnet50": 0.05}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The length of the runs and the number of nodes.

    Attributes:
        models: The networks, in the order in which they are run.
        gridded: Those with every row on every number of nodes. Of the others, LeNet has every row on the most nodes
            and QSGD as published on fewer; AlexNet and ResNet-20 have six rows and the rest four, on half the nodes.
        timed: Those that are run for times and bytes only.
    """

    steps: int = number(200, "steps of LeNet")
    seeds: int = number(3, "seeds of each row of LeNet")
    cifar_seeds: int = number(3, "the same, AlexNet and ResNet-20")
    alexnet_steps: int = number(60, "steps of AlexNet")
    resnet_steps: int = number(30, "steps of ResNet-20")
    resnet110_steps: int = number(3, "steps of ResNet-110")
    resnet50_steps: int = number(3, "steps of ResNet-50")
    batch: int = number(128, "images a step over all nodes")
    deep_batch: int = number(8, "the same, ResNet-110")
    resnet50_batch: int = number(8, "the same, ResNet-50")
    evaluate_on: int = number(6000, "held-out images, LeNet")
    cifar_evaluate_on: int = number(1000, "the same, AlexNet and ResNet-20")
    deep_evaluate_on: int = number(20, "the same, ResNet-110 and ResNet-50")
    most_nodes: int = number(8, "nodes of the grid; half, a quarter ... of them for the rest")
    models: tuple[str, ...] = ("resnet20", "alexnet32", "resnet50", "resnet110", "lenet")
    gridded: tuple[str, ...] = ()
    timed: tuple[str, ...] = ("resnet50", "resnet110")

    def length(self, model: str) -> int:
        """The number of steps of a network."""
        return {
            "lenet": self.steps,
            "alexnet32": self.alexnet_steps,
            "resnet20": self.resnet_steps,
            "resnet110": self.resnet110_steps,
            "resnet50": self.resnet50_steps,
        }[model]

    def images(self, model: str) -> int:
        """The number of images of a step."""
        return {"resnet110": self.deep_batch, "resnet50": self.resnet50_batch}.get(model, self.batch)

    def tested(self, model: str) -> int:
        """The number of images that the accuracy is of."""
        deep = dict.fromkeys(("resnet110", "resnet50"), self.deep_evaluate_on)
        return {"lenet": self.evaluate_on, **deep}.get(model, self.cifar_evaluate_on)

    def seeds_of(self, model: str) -> int:
        """The number of seeds of a network; one for those that take hours."""
        return {"lenet": self.seeds, "resnet110": 1, "resnet50": 1}.get(model, self.cifar_seeds)


QUICK = Plan(
    steps=4,
    seeds=1,
    cifar_seeds=1,
    alexnet_steps=1,
    resnet_steps=1,
    resnet110_steps=1,
    batch=8,
    deep_batch=2,
    evaluate_on=100,
    cifar_evaluate_on=10,
    most_nodes=2,
    models=("resnet20", "alexnet32", "resnet110", "lenet"),
    timed=("resnet110",),
)
# The report's networks. A run of AlexNet takes about five minutes of one core, of ResNet-110 two hours (3.1 s a step),
# of ResNet-50 seven minutes.
FULL = Plan(
    alexnet_steps=1500,
    resnet110_steps=2000,
    resnet50_steps=100,
    deep_batch=128,
    resnet50_batch=32,
    cifar_evaluate_on=5000,
    deep_evaluate_on=5000,
    models=("alexnet32", "lenet", "resnet50", "resnet110"),
    gridded=("alexnet32", "resnet110"),
    timed=(),
)


def recipe(model: str, plan: Plan, nodes: int) -> Recipe:
    """Nodes of one worker, with links of 1 Gbit/s to a server whose own network is unlimited."""
    length = plan.length(model)
    data = "fashion-mnist" if model == "lenet" else "cifar10"
    text = {
        "name": f"qsgd-{model}",
        "data": {"name": data},
        "model": {"name": model},
        "training": {
            "steps": length,
            "batch": plan.images(model),
            "optimizer": {"name": "sgd", "lr": RATES[model], "momentum": 0.9},
            "schedule": "cosine",
            "warmup": length // 10,
            "evaluate_every": max(1, length // 5) if length >= 500 else length + 1,  # the last is made anyway
        },
        "server": {"name": "hub"},
        "sites": [{"name": "node-{}", "count": nodes, "workers": 1}],
        "links": [{"between": ["hub", "node-{}"], "bandwidth": "1 Gbit/s", "delay": "0.1 ms"}],
        "compute": {"seconds_per_step": SECONDS[model] / nodes},
    }
    settings = validation_split.settings(data, plan.tested(model))
    return Recipe.parse(json.dumps(text), f"{model}.yaml").with_settings(settings)


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
    return f"{NAMES[model]}, {nodes} node{'s' if nodes > 1 else ''}"


def parts(plan: Plan) -> Iterator[tuple[str, int, dict[str, Strategy]]]:
    """Network, nodes and rows of each part; of a network, the usual number of nodes first."""
    most = plan.most_nodes
    fewer = [nodes for nodes in (most // 4, most // 8) if nodes]
    for model in plan.models:
        if model in plan.gridded:
            yield from ((model, nodes, grid()) for nodes in dict.fromkeys([most // 2, most, *fewer]))
        elif model == "lenet":
            yield model, most, grid()
            yield from ((model, nodes, few()) for nodes in dict.fromkeys([most // 2, *fewer]))
        elif model in ("alexnet32", "resnet20"):
            yield model, most // 2, few() | coded(4, "nearest") | coded(4, "nearest", feedback=True)
        else:
            yield model, most // 2, few()


def wanted(plan: Plan) -> list[Cell]:
    """All runs: the first seed of every part before the second of any."""
    found: list[Cell] = []
    for model, nodes, chosen in parts(plan):
        own = recipe(model, plan, nodes)
        found += cells(part_name(model, nodes), own, chosen, plan.seeds_of(model), held_out=True)
    return sorted(found, key=lambda cell: cell.key.seed)  # stable


def tables(found: Found, plan: Plan) -> list[ResultTable]:
    """A table for each network and number of nodes, with a verdict on each row."""
    shown = columns("accuracy", "spread", "loss", "step_ms", "speedup", first="")
    sent = [("kB a node, step and way", "kb", "{:.4g}"), ("fewer bytes", "ratio", "{:.3g}")]
    verdicts = [("Δ points ± s.e.", "far", "{}"), ("verdict", "verdict", "{}")]
    made = []
    for part, runs in found.parts.items():
        first = next(iter(runs.values()))[0]
        training, nodes = first.recipe["training"], len(first.header["sites"])
        about = f"{first.summary['parameters']:,} parameters, {training['steps']} steps of {training['batch']} images"
        about += f", {training['evaluate_on']} held-out images, {seeds_text(len(next(iter(runs.values()))))}."
        timing = _is_timing(part, plan)
        if timing:
            about += " For times and bytes: accuracies mean nothing after so few steps."
        made.append(table(part, about, [*shown, *sent, *([] if timing else verdicts)], runs))
        for row in made[-1].rows:
            row["kb"] = None if row["diverged"] else 1000 * row["wan_mb"] / nodes / training["steps"] / 2
            far = row_difference(runs, row["name"], PLAIN, _tested(runs))
            if row["name"] != PLAIN and far is not None:
                row["far"], row["verdict"] = f"{far.points:+.2f} ± {far.twice / 2:.2f}", verdict(far)
    return made


def verdict(far: Difference) -> str:
    """What a difference to fp32 says: an interval of two standard errors to either side."""
    low, high = far.interval
    if high < 0:
        return f"loses {-high:.2f} to {-low:.2f}"
    if low > 0:
        return f"gains {low:.2f} to {high:.2f}"
    return f"between {low:+.2f} and {high:+.2f}"


def _is_timing(part: str, plan: Plan) -> bool:
    return part.startswith(tuple(f"{NAMES[model]}," for model in plan.timed))


def by_nodes(found: Found) -> list[ResultTable]:
    """For each network with several numbers of nodes: its accuracy by nodes and rows."""
    made = []
    for name in NAMES.values():
        parts = {part: rows(runs) for part, runs in found.parts.items() if part.startswith(f"{name},")}
        order = sorted(parts, key=lambda part: int(part.split()[1]))
        if len(order) < 2:
            continue
        headings = [("", "row", "{}"), *((part.removeprefix(f"{name}, "), part, "{}") for part in order)]
        about = "Accuracy %, ± over the seeds where there are several; speedup over fp32 in brackets."
        made.append(ResultTable(f"{name} by nodes", f"{name} by nodes", about, headings))
        several = [row["name"] for part in order for row in parts[part]]
        for row_name in [row for row in grid() if several.count(row) > 1]:
            cells_: Row = {"row": row_name}
            for part in order:
                row = next((r for r in parts[part] if r["name"] == row_name), None)
                if row is not None and row["accuracy"] is not None:
                    spread = "" if row["spread"] is None else f" ± {row['spread']:.2f}"
                    cells_[part] = f"{row['accuracy']:.2f}{spread} ({row['speedup']:.2f})"
            made[-1].rows.append(cells_)
    return made


def claims(found: Found, plan: Plan) -> list[Claim]:
    """The two claims of the report, and what rounding and error feedback should do."""
    made = []
    for part, runs in found.parts.items():
        if _is_timing(part, plan):
            continue
        tested = _tested(runs)
        for bits, word, limit in ((8, "4 times fewer bytes are free", 0.5), (4, "8 times fewer nearly free", 1.0)):
            far = row_difference(runs, f"{bits} bits, stochastic", PLAIN, tested)
            if far is not None:
                what = f"{part}: {word}: {bits} bits lose at most {limit} points."
                made.append(Claim(what, far.above(-limit), f"{far.text()}.", undecided=_within(far)))
    gridded = [part for part, runs in found.parts.items() if f"{BITS[0]} bits, nearest" in runs]
    return made + [claim for part in gridded for claim in _grid_claims(part, found.parts[part])]


def _within(far: Difference) -> str:
    """A verdict where the limit is inside of the interval."""
    return "Between {:+.2f} and {:+.2f} points".format(*far.interval)


def _tested(runs: Mapping[str, Sequence[Run]]) -> int:
    """The number of images that the accuracies are measured on."""
    return int(next(iter(runs.values()))[0].recipe["training"]["evaluate_on"])


def _grid_claims(part: str, runs: Mapping[str, Sequence[Run]]) -> list[Claim]:
    made = []
    for bits in BITS:
        for better, worse, why in (
            ("stochastic", "nearest", "rounding at random is better than to the nearest"),
            ("stochastic, error feedback", "stochastic", "error feedback helps stochastic rounding"),
            ("nearest, error feedback", "nearest", "error feedback helps rounding to the nearest"),
        ):
            far = row_difference(runs, f"{bits} bits, {better}", f"{bits} bits, {worse}", _tested(runs))
            if far is not None:
                what = f"{part}, {bits} bits: {why}."
                made.append(Claim(what, far.above(0.0), f"{far.text()}.", undecided=_within(far)))
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
    found = run(wanted(plan), options)
    lengths = [
        f"{NAMES[model]} {plan.length(model)} steps of {plan.images(model)} images, {seeds_text(plan.seeds_of(model))}"
        + (", for times and bytes" if model in plan.timed else "")
        for model in plan.models
    ]
    return Document(
        title="QSGD: bits, rounding, error feedback and nodes",
        rests_on=[
            f"Here: {'; '.join(lengths)}. LeNet on Fashion-MNIST, the others on CIFAR-10; SGD with momentum 0.9 and "
            "cosine; 10 % of the training data held out for validation.",
            "The report: AlexNet, ResNet-50 and ResNet-110 on CIFAR-10, 1, 2, 4 and 8 nodes, 10 % held out; it found 4 "
            "times fewer bytes free and 8 times nearly free. Our notes have neither its epochs nor its number of runs.",
            "A verdict is the interval of two standard errors around the difference to fp32, seed by seed: the error "
            "over the seeds or that of the held-out images, whichever is larger. With one seed it does not say what "
            "another would do.",
            *found.facts(),
        ],
        tables=[*by_nodes(found), *tables(found, plan)],
        claims=claims(found, plan),
        measured=MEASURED,
        failures=found.failures,
    )


if __name__ == "__main__":
    main(Plan(), QUICK, __doc__ or "", make, full=FULL)
