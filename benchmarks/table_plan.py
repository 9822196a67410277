"""What `weightgrad plan` predicts beside what the simulator finds, for every strategy.

python benchmarks/table_plan.py                                  # recipes/laptop.yaml, 120 steps; ten minutes
python benchmarks/table_plan.py recipes/gpt.yaml --steps 60      # a recipe that had no part in making the plan
python benchmarks/table_plan.py --strategies baseline,auto
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rich.console import Console

from weightgrad.core import strategies
from weightgrad.lab.plan.prediction import predict
from weightgrad.lab.plan.scenario import of_recipe
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.simulation import simulate
from weightgrad.lab.run.task import Training

ROOT = Path(__file__).parents[1]
HEAD = (
    "| strategy | time s, planned / simulated | error % | WAN MB, planned / simulated | error % |\n"
    "|---|---|---:|---|---:|"
)


def row(recipe: Recipe, name: str) -> str:
    """One strategy as a row of the table."""
    own = recipe.with_settings([f"strategy={name}"])
    planned = predict(of_recipe(own, Training(own).layout, {}), strategies.find(name))
    with tempfile.TemporaryDirectory() as directory:
        found = simulate(own, Path(directory))
    seconds, nbytes = float(found["virtual_seconds"]), float(found["wan_bytes"])
    return (
        f"| {name} | {planned.seconds:.2f} / {seconds:.2f} | {100 * (planned.seconds / seconds - 1):+.1f} "
        f"| {planned.wan_bytes / 1e6:.3f} / {nbytes / 1e6:.3f} | {100 * (planned.wan_bytes / nbytes - 1):+.1f} |"
    )


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", type=Path, default=ROOT / "recipes" / "laptop.yaml")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--strategies", default=",".join(strategies.PRESETS))
    options = parser.parse_args()
    recipe = Recipe.load(options.recipe)
    recipe = recipe.with_settings([f"training.steps={options.steps}", f"training.evaluate_every={10**6}"])
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(HEAD)
    for name in options.strategies.split(","):
        console.print(row(recipe, name))


if __name__ == "__main__":
    main()
