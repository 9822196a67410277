"""Dryden et al. (2016), training: three dense layers of 4096 with Adam on MNIST, 4 replicas, a quantized allreduce.

    python benchmarks/table_mlp.py --quick
    python benchmarks/table_mlp.py --jobs 1                    # about 30 minutes of a core; 4 GB of memory
    python benchmarks/run_all.py --resume --only mlp           # all of MNIST, five epochs: about two hours of a core

One site of four workers in the simulator: real gradients, the real `QuantizedAllreduce` at every step, Adam on the
mean. After each epoch a round over the WAN, in fp32 and for nothing, hands the model over to be evaluated. Times of a
mini-batch are put together here, part by part.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

from allreduce.cost import add_seconds, rank_cost, vector_bytes
from result_table import MeasurementCache, ResultTable, Row
from table_runs import Cell, Found, Strategy, cells, row_difference, rows, run
from tables import Claim, Document, Options, main, number

from weightgrad.errors import RecipeError
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.report.comparison_table import seeds_text
from weightgrad.lab.sim.local_network import LocalNetwork

WORKERS, DELAY = 4, 2e-5
COMPUTE = 0.1  # seconds of a replica's pass, assumed
PLAIN = "fp32"
CODECS = ("onebit()", "adaptive(pi=64)", "qsgd(bits=4)", "qsgd(bits=8)")
TRAINED = ("adaptive(pi=64)", "onebit()")  # Dryden's; qsgd would take as long again, and has times and bytes only
PAPER_SPEEDUP = 1.39
PAPER_ACCURACY = {PLAIN: 98.31, "adaptive(pi=64)": 98.32}
MNIST = 60_000  # training images
PARTIAL = True


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The size and length of the runs: whole epochs of the first images of the training set."""

    images: int = number(4000, "training images, the first of the set; a multiple of the batch")
    epochs: int = number(20, "times that each of them is seen")
    batch: int = number(200, "images of a mini-batch, over all replicas")
    width: int = number(4096, "units of each of the three hidden layers")
    seeds: int = number(1, "seeds of each row")
    evaluate_on: int = number(10_000, "test images")
    repeats: int = number(2, "repeats of the codecs' measurement, of which the best counts")
    networks_gbit_s: tuple[int, ...] = (1, 10, 40)
    data: str = "mnist"

    def __post_init__(self) -> None:
        if self.images % self.batch:
            below = self.images - self.images % self.batch
            near = f"{below} or {below + self.batch}" if below else f"{self.batch}"
            wanted = f"epochs are whole with a multiple of batch={self.batch}; nearest: {near}"
            raise RecipeError(f"images={self.images}: {wanted}")
        if self.images > MNIST:
            raise RecipeError(f"images={self.images}: MNIST has {MNIST}; give at most that")

    @property
    def epoch_steps(self) -> int:
        """The number of mini-batches of an epoch."""
        return self.images // self.batch

    @property
    def steps(self) -> int:
        """The number of mini-batches."""
        return self.epochs * self.epoch_steps

    @property
    def length(self) -> str:
        """The length as text."""
        return f"{self.epochs} epochs of {self.images:,} images: {self.steps} mini-batches of {self.batch}"


QUICK = Plan(images=128, epochs=3, batch=64, width=128, evaluate_on=500, repeats=1)
FULL = Plan(images=MNIST, epochs=5)


def recipe(plan: Plan) -> Recipe:
    """One site, with a link that costs no time: its rounds are there for the evaluations."""
    text = {
        "name": "mlp",
        "data": {"name": plan.data, "limit": plan.images},
        "model": {"name": "mlp", "options": {"width": plan.width, "depth": 3}},
        "training": {
            "steps": plan.steps,
            "batch": plan.batch,
            "optimizer": {"name": "adam", "lr": 0.0003},
            "schedule": "cosine",
            "evaluate_every": plan.epoch_steps,
            "evaluate_on": plan.evaluate_on,
        },
        "server": {"name": "hub"},
        "sites": [{"name": "rack", "workers": WORKERS}],
        "lan": {"bandwidth": "10 Gbit/s", "delay": "20 us"},
        "links": [{"between": ["hub", "rack"], "bandwidth": "1 Tbit/s", "delay": "0 s"}],
        "compute": {"seconds_per_step": COMPUTE},
    }
    return Recipe.parse(json.dumps(text), "mlp.yaml")


def strategy(codec: str, plan: Plan) -> Strategy:
    """Adam within the site, on the mean of an allreduce with this codec, and one round, in fp32, after each epoch."""
    return {"name": "baseline", "shares": "updates", "gradients": codec, "trigger": f"every({plan.epoch_steps})"}


def wanted(plan: Plan) -> list[Cell]:
    """All runs."""
    return cells("MLP", recipe(plan), {codec: strategy(codec, plan) for codec in (PLAIN, *TRAINED)}, plan.seeds)


def times(plan: Plan, numel: int, cache: MeasurementCache) -> list[Row]:
    """Times of one mini-batch: the assumed compute, the codec measured at this size, and a formula for the network."""
    made: list[Row] = []
    for codec in (PLAIN, *CODECS):
        name = f"{codec} {numel} {plan.repeats}"
        if codec == PLAIN:
            added = cache.get(name, functools.partial(_add, numel, plan.repeats))["seconds"]
            row: Row = {"codec": codec, "seconds": added * (WORKERS - 1) / WORKERS, "bytes": 4 * numel}
        else:
            found = cache.get(name, functools.partial(rank_cost, codec, numel, WORKERS, plan.repeats))
            row = {"codec": codec, **found, "bytes": vector_bytes(found, WORKERS)}
        for speed in plan.networks_gbit_s:
            row[f"exchange_{speed}"] = row["seconds"] + LocalNetwork(speed * 1e9, DELAY).allreduce(
                WORKERS, row["bytes"]
            )
        made.append(row)
    for row in made:
        row["mb"], row["ratio"], row["codec_ms"] = row["bytes"] / 1e6, 4 * numel / row["bytes"], 1000 * row["seconds"]
        for speed in plan.networks_gbit_s:
            row[f"batch_ms_{speed}"] = 1000 * (COMPUTE + row[f"exchange_{speed}"])
            row[f"speedup_{speed}"] = made[0][f"batch_ms_{speed}"] / row[f"batch_ms_{speed}"]
    return made


def _add(numel: int, repeats: int) -> Row:
    return {"seconds": add_seconds(numel, repeats)}


def break_even(row: Row, plain: Row, speed: int) -> float | None:
    """Seconds of compute that would give the published speedup; None if none would."""
    gain = plain[f"exchange_{speed}"] - PAPER_SPEEDUP * row[f"exchange_{speed}"]
    return float(gain / (PAPER_SPEEDUP - 1)) if gain > 0 else None


def tables(plan: Plan, found: Found, cost: list[Row]) -> list[ResultTable]:
    """The accuracies, and the times and bytes of a mini-batch."""
    learnt = ResultTable(
        "accuracy",
        "Test accuracy",
        f"After {plan.length}. Bytes are those that the training really sent, of an average vector on its way there.",
        [
            *(("", "row", "{}"), ("accuracy %", "accuracy", "{:.2f}"), ("±", "spread", "{:.2f}")),
            *(("Δ points", "points", "{:+.2f}"), ("loss", "loss", "{:.3f}"), ("MB a vector", "mb", "{:.4g}")),
            ("the paper %", "paper", "{:.2f}"),
        ],
    )
    for row in rows(found.parts.get("MLP", {})):
        numel = found.parts["MLP"][row["name"]][0].summary["parameters"]
        learnt.rows.append(
            {**row, "mb": vector_mb(plan, numel, row["lan_mb"]), "paper": PAPER_ACCURACY.get(row["name"])}
        )
    batch = ResultTable(
        "mini-batch",
        "Time and bytes of a mini-batch",
        f"{WORKERS} replicas; {1000 * COMPUTE:.0f} ms of compute are assumed for each. “Times” is over fp32's ring.",
        [
            *(("", "codec", "{}"), ("MB a vector", "mb", "{:.4g}"), ("fewer bytes", "ratio", "{:.3g}")),
            ("codec ms", "codec_ms", "{:.3g}"),
        ],
        cost,
    )
    epochs = by_epoch(plan, found)
    for speed in plan.networks_gbit_s:
        batch.columns += [
            (f"ms at {speed} Gbit/s", f"batch_ms_{speed}", "{:.4g}"),
            ("times", f"speedup_{speed}", "{:.2f}"),
        ]
    for speed in plan.networks_gbit_s:
        needed = {row["codec"]: break_even(row, cost[0], speed) for row in cost[1:]}
        said = ", ".join(f"{c} {'never' if s is None else f'{1000 * s:.0f} ms'}" for c, s in needed.items())
        batch.notes.append(f"At {speed} Gbit/s the published {PAPER_SPEEDUP} times come out with this compute: {said}.")
    return [learnt, epochs, batch]


def vector_mb(plan: Plan, numel: int, lan_mb: float) -> float:
    """MB of an average vector: the simulator counts 2 (n-1) a step in the site's LAN.

    The model that comes back from the round after an epoch is handed to the other replicas in fp32, and twice more at
    the end, after the last push and after the last result; that is for the evaluation, and is taken off.
    """
    handed_on = (plan.epochs + 2) * (WORKERS - 1) * 4 * numel / 1e6
    return (lan_mb - handed_on) / (2 * (WORKERS - 1) * plan.steps)


def by_epoch(plan: Plan, found: Found) -> ResultTable:
    """The test accuracy of the first seed after each epoch."""
    runs = {row: one[0] for row, one in found.parts.get("MLP", {}).items()}
    headings = [("epoch", "epoch", "{}"), *((f"{row} %", row, "{:.2f}") for row in runs)]
    made = ResultTable("epochs", "Test accuracy after each epoch", "Seed 0.", headings)
    for epoch in range(1, plan.epochs + 1):
        row: Row = {"epoch": epoch}
        for name, one in runs.items():
            after = [line for line in one.evaluations if line["step"] == epoch * plan.epoch_steps]
            if after and after[-1]["accuracy"] is not None:
                row[name] = 100 * after[-1]["accuracy"]
        made.rows.append(row)
    return made


def claims(plan: Plan, found: Found, cost: list[Row]) -> list[Claim]:
    """The two claims of Dryden et al., for each codec."""
    made = []
    for codec in TRAINED:
        far = row_difference(found.parts.get("MLP", {}), codec, PLAIN, plan.evaluate_on)
        if far is not None:
            below = far.above(-0.1)
            what = f"{codec} is as accurate as fp32, to a tenth of a point"
            said = f"{far.text()}, {plan.epochs} epochs of {plan.images:,} images."
            within = "Between {:+.2f} and {:+.2f} points".format(*far.interval)
            paper = "(the paper, adaptive after 20 epochs: 98.32 and 98.31)"
            made.append(Claim(f"{what} {paper}.", below, said, undecided=within))
    adaptive = next(row for row in cost if row["codec"].startswith("adaptive"))
    for speed in plan.networks_gbit_s:
        times_ = adaptive[f"speedup_{speed}"]
        what = f"A mini-batch with adaptive is {PAPER_SPEEDUP} times as fast; {speed} Gbit/s, {1000 * COMPUTE:.0f} ms."
        made.append(Claim(what, times_ >= PAPER_SPEEDUP, f"{adaptive['codec']}: {times_:.2f} times."))
    return made


def rests_on(plan: Plan, numel: int) -> list[str]:
    """Length and seeds, here and in the paper."""
    some = f"the images are the first of MNIST's {MNIST:,}, the same for every row and seed"
    which = "all of MNIST" if plan.images == MNIST else some
    return [
        f"Here: {numel / 1e6:.1f} M parameters; {plan.length}; {which}; {seeds_text(plan.seeds)}; Adam 0.0003 with "
        f"cosine; {plan.evaluate_on} test images.",
        "The paper: three layers of 4096, 20 epochs of MNIST, 4 replicas: 98.31 % with fp32, 98.32 % with adaptive, "
        "1.39 times as fast a mini-batch. Our notes of it have neither its batch, its compute time, nor its number of "
        "runs.",
        (
            f"With {plan.epochs} epochs where the paper has 20, accuracies may be below its; compare rows with fp32."
            if plan.images == MNIST
            else f"With {100 * plan.images / MNIST:.2g} % of its images, accuracies are not to be compared with the "
            "paper's: rows are compared with fp32 here."
        ),
    ]


MEASURED = [
    "Measured: losses, accuracies and the bytes of the first table, from training; “codec ms”, processor time of one "
    "rank's `encode_chunks`, `reduce` and `gather` at this number of parameters, on normal noise, one thread.",
    "Modelled: the network (`LocalNetwork` of the simulator, a ring, 20 µs one way). The compute time is assumed. "
    "Nothing overlaps. The simulator's own virtual times are not used: they count encoding only.",
    "Chunks of an allreduce are vectors: one-bit and adaptive have a pair of means for each 32,768 elements, where "
    "Dryden has one for each column. One-bit and adaptive keep their error; qsgd keeps that of the way back.",
]


def make(plan: Plan, options: Options) -> Document:
    """Make the missing runs, measure the codecs at this size, and make the document."""
    found = run(wanted(plan), options)
    every = found.all()
    numel = int(every[0].summary["parameters"]) if every else 0
    cost = times(plan, numel, MeasurementCache(options.runs / options.name / "measured.json"))
    return Document(
        title="Dryden's dense network: Adam on MNIST with 4 replicas",
        rests_on=[*rests_on(plan, numel), *found.facts()],
        tables=tables(plan, found, cost),
        claims=claims(plan, found, cost),
        measured=MEASURED,
        failures=found.failures,
        numbers={"mini_batch": cost},
    )


if __name__ == "__main__":
    main(Plan(), QUICK, __doc__ or "", make, full=FULL)
