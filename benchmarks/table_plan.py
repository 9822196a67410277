"""What `weightgrad plan` predicts beside what the simulator, or the emulator, finds, for every strategy.

The first prediction is that of a stand-in with random gradients, with its range where the data decide how much is sent;
the second, that of `--measure`, plays the first steps of the real model through. Below the table is what misses: time
by more than 10 %, bytes by more than 2 %, or a range that the run is not in.

python benchmarks/table_plan.py                                  # recipes/laptop.yaml, 120 steps; ten minutes
python benchmarks/table_plan.py recipes/gpt.yaml --steps 60      # a recipe that had no part in making the plan
python benchmarks/table_plan.py recipes/gpt-3m.yaml --steps 24 --strategies baseline,auto --set training.batch=4
python benchmarks/table_plan.py --world emulator --steps 40 --set compute.seconds_per_step=0.5 --without-measure
                                                                 # real processes in network namespaces
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from weightgrad import event_log
from weightgrad.core import strategies
from weightgrad.lab.plan import process_cost
from weightgrad.lab.plan.data_range import DataRange, range_of
from weightgrad.lab.plan.prediction import Prediction, predict
from weightgrad.lab.plan.scenario import of_recipe
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.report.choices import Choice, parse_choices
from weightgrad.lab.run import emulation
from weightgrad.lab.run.simulation import chosen_strategy, simulate
from weightgrad.lab.run.task import Training
from weightgrad.lab.run.validation import measure_timing

ROOT = Path(__file__).parents[1]
SECONDS, BYTES = 0.10, 0.02
HEAD = (
    "| strategy | time s: {world} | plan | % | --measure | % | WAN MB: {world} | plan | % | --measure | % |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)


@dataclass(frozen=True)
class Comparison:
    """A run beside its predictions.

    Attributes:
        name: of the strategy.
        seconds: of the run.
        wan_bytes: of the run.
        planned: by a stand-in.
        within: the range of that; None where the data decide nothing.
        measured: with the real model's first steps; None: left out.
        doubt: why the emulator does not trust the times of the run; empty if it does.
    """

    name: str
    seconds: float
    wan_bytes: float
    planned: Prediction
    within: DataRange | None
    measured: Prediction | None
    doubt: str = ""

    def row(self) -> str:
        """The comparison as a row of the table."""
        seconds, within = self.seconds, self.within
        cells = [f"{seconds:.2f}", _cell(self.planned.seconds, "{:.2f}", within.seconds if within else None, 1)]
        cells += [_error(self.planned.seconds, seconds), *_measured(self.measured, "seconds", seconds, "{:.2f}", 1)]
        cells += [f"{self.wan_bytes / 1e6:.3f}"]
        cells += [_cell(self.planned.wan_bytes, "{:.3f}", within.wan_bytes if within else None, 1e6)]
        cells += [_error(self.planned.wan_bytes, self.wan_bytes)]
        cells += _measured(self.measured, "wan_bytes", self.wan_bytes, "{:.3f}", 1e6)
        return f"| {self.name}{'*' if within else ''} | {' | '.join(cells)} |"

    def misses(self) -> list[str]:
        """What is further off than it should be."""
        found = []
        if self.within is None:
            found += _misses("plan", self.planned, self.seconds, self.wan_bytes)
        else:
            if not self.within.seconds[0] <= self.seconds <= self.within.seconds[1]:
                found.append("the time is not in its range")
            if not self.within.wan_bytes[0] <= self.wan_bytes <= self.within.wan_bytes[1]:
                found.append("the bytes are not in their range")
        if self.measured is not None:
            found += _misses("--measure", self.measured, self.seconds, self.wan_bytes)
        return found


def _cell(value: float, form: str, within: tuple[float, float] | None, unit: float) -> str:
    found = form.format(value / unit)
    return found if within is None else f"{found} ({' to '.join(form.format(end / unit) for end in within)})"


def _measured(measured: Prediction | None, what: str, found: float, form: str, unit: float) -> list[str]:
    if measured is None:
        return ["", ""]
    value = getattr(measured, what)
    return [form.format(value / unit), _error(value, found)]


def _error(planned: float, found: float) -> str:
    return f"{100 * (planned / found - 1):+.1f}"


def _misses(name: str, planned: Prediction, seconds: float, wan_bytes: float) -> list[str]:
    found = []
    if abs(planned.seconds / seconds - 1) > SECONDS:
        found.append(f"time of {name} {_error(planned.seconds, seconds)} %")
    if abs(planned.wan_bytes / wan_bytes - 1) > BYTES:
        found.append(f"bytes of {name} {_error(planned.wan_bytes, wan_bytes)} %")
    return found


def found_in(world: str, recipe: Recipe, kind: str = "auto") -> tuple[float, float, str]:
    """Seconds and WAN bytes of the run itself, and why its times are not to be trusted, if they are not.

    In the emulator the first steps, in which caches fill, count as much as later ones, and the model with which the
    first site begins the run does not: it is sent once, as float32, and neither simulator nor plan knows of it. What
    follows the last step, in which the rest of the residual is sent, counts as the slowest site's.
    """
    with tempfile.TemporaryDirectory() as directory:
        if world == "simulator":
            found = simulate(recipe, Path(directory))
            return float(found["virtual_seconds"]), float(found["wan_bytes"]), ""
        with emulation.network(recipe, kind=kind) as wan:
            summary = emulation.emulate(recipe, Path(directory) / "run", wan, emulate_compute=True)
        run = Path(directory) / "run"
        timing = measure_timing(run, [site.name for site in recipe.site_list])
        flush_s = max(_after_last_step(run / "state" / site.name / "events.jsonl") for site in recipe.site_list)
        log = event_log.read(run / "events.jsonl")
        ends = [line for line in log if line["kind"] == "site"]
        moved = sum(float(line["up_bytes"]) + float(line["down_bytes"]) for line in ends)
        emulated = summary["emulated"]
        doubt = "" if emulated["trusted"] else str(emulated["verdict"])
        seconds = timing.step_s * recipe.training.steps + flush_s
        return seconds, moved - 4 * Training(recipe).layout.numel, doubt


def _after_last_step(path: Path) -> float:
    """Seconds from the end of a site's last step to the end of its run."""
    times = {str(line["kind"]): float(line["t"]) for line in event_log.read(path) if line["kind"] in ("step", "site")}
    return times["site"] - times["step"]


def compare(
    recipe: Recipe, choice: Choice, world: str, *, measure: bool = True, kind: str = "auto", processes: bool = False
) -> Comparison:
    """Plan a strategy, and run it."""
    own = recipe.with_settings([choice.setting])
    task = Training(own)
    scenario, strategy = of_recipe(own, task.layout, {}), chosen_strategy(own)
    if processes:
        cost = process_cost.overheads([(choice.label, own)], lambda line: print(line, file=sys.stderr), kind=kind)
        scenario = replace(scenario, step_overhead=cost[choice.label])
    planned = predict(scenario, strategy)
    within = range_of(scenario, strategy, planned)
    measured = predict(scenario, strategy, task=task) if measure else None
    seconds, nbytes, doubt = found_in(world, own, kind)
    return Comparison(choice.label, seconds, nbytes, planned, within, measured, doubt)


def main() -> None:
    """Print the table, row by row, and what misses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", type=Path, default=ROOT / "recipes" / "laptop.yaml")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument("--strategies", default=",".join(strategies.PRESETS))
    parser.add_argument("--world", choices=("simulator", "emulator"), default="simulator")
    parser.add_argument("--kind", default="auto", help="of the emulator's network, as `weightgrad emulate` takes it")
    parser.add_argument(
        "--processes", action="store_true", help="count what the processes cost on this machine, as `weightgrad plan`"
    )
    parser.add_argument("--without-measure", action="store_true", help="leave the real first steps out: large models")
    options = parser.parse_args()
    recipe = Recipe.load(options.recipe)
    recipe = recipe.with_settings([f"training.steps={options.steps}", f"training.evaluate_every={10**6}"])
    recipe = recipe.with_settings(options.settings)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(HEAD.format(world=options.world))
    missed: list[str] = []
    doubted: list[str] = []
    for choice in parse_choices(options.strategies):
        found = compare(
            recipe,
            choice,
            options.world,
            measure=not options.without_measure,
            kind=options.kind,
            processes=options.processes,
        )
        console.print(found.row())
        sys.stdout.flush()
        missed += [f"- {found.name}: {', '.join(found.misses())}"] if found.misses() else []
        doubted += [f"- {found.name}: {found.doubt}"] if found.doubt else []
    console.print("\n".join(["", f"{len(missed)} rows miss:" if missed else "No row misses.", *missed]))
    if doubted:
        console.print("\n".join(["The emulator does not trust the times of:", *doubted]))


if __name__ == "__main__":
    main()
