"""What `weightgrad plan` predicts beside what the simulator, or the emulator, finds, for every strategy.

The first prediction is that of a stand-in with random gradients; the second, that of `--measure`, plays the first steps
of the real model through.

python benchmarks/table_plan.py                                  # recipes/laptop.yaml, 120 steps; ten minutes
python benchmarks/table_plan.py recipes/gpt.yaml --steps 60      # a recipe that had no part in making the plan
python benchmarks/table_plan.py --strategies baseline,auto --world emulator    # real processes, a modelled network
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rich.console import Console

from weightgrad import event_log
from weightgrad.core import strategies
from weightgrad.lab.plan.prediction import predict
from weightgrad.lab.plan.scenario import of_recipe
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run import emulation
from weightgrad.lab.run.simulation import simulate
from weightgrad.lab.run.task import Training
from weightgrad.lab.run.validation import measure_timing

ROOT = Path(__file__).parents[1]
HEAD = (
    "| strategy | time s: {world} | plan | % | --measure | % | WAN MB: {world} | plan | % | --measure | % |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def found_in(world: str, recipe: Recipe) -> tuple[float, float]:
    """Seconds and WAN bytes of the run itself; in the emulator the first steps, in which caches fill, do not count."""
    with tempfile.TemporaryDirectory() as directory:
        if world == "simulator":
            found = simulate(recipe, Path(directory))
            return float(found["virtual_seconds"]), float(found["wan_bytes"])
        with emulation.network(recipe, kind="modelled") as wan:
            emulation.emulate(recipe, Path(directory) / "run", wan, emulate_compute=True)
        timing = measure_timing(Path(directory) / "run", [site.name for site in recipe.site_list])
        log = event_log.read(Path(directory) / "run" / "events.jsonl")
        ends = [line for line in log if line["kind"] == "site"]
        moved = sum(float(line["up_bytes"]) + float(line["down_bytes"]) for line in ends)
        return timing.step_s * recipe.training.steps, moved


def row(recipe: Recipe, name: str, world: str) -> str:
    """One strategy as a row of the table."""
    own = recipe.with_settings([f"strategy={name}"])
    task = Training(own)
    scenario, strategy = of_recipe(own, task.layout, {}), strategies.find(name)
    planned, measured = predict(scenario, strategy), predict(scenario, strategy, task=task)
    seconds, nbytes = found_in(world, own)
    cells = [f"{seconds:.2f}"]
    for one in (planned, measured):
        cells += [f"{one.seconds:.2f}", f"{100 * (one.seconds / seconds - 1):+.1f}"]
    cells.append(f"{nbytes / 1e6:.3f}")
    for one in (planned, measured):
        cells += [f"{one.wan_bytes / 1e6:.3f}", f"{100 * (one.wan_bytes / nbytes - 1):+.1f}"]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", type=Path, default=ROOT / "recipes" / "laptop.yaml")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--strategies", default=",".join(strategies.PRESETS))
    parser.add_argument("--world", choices=("simulator", "emulator"), default="simulator")
    options = parser.parse_args()
    recipe = Recipe.load(options.recipe)
    recipe = recipe.with_settings([f"training.steps={options.steps}", f"training.evaluate_every={10**6}"])
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(HEAD.format(world=options.world))
    for name in options.strategies.split(","):
        console.print(row(recipe, name, options.world))


if __name__ == "__main__":
    main()
