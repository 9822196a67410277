"""What the processes of a run cost on this machine, besides computing and the network.

A plan knows how long a pass computes. Where the server and all sites are processes of one busy machine, a step takes
longer than that: connections, encryption, telemetry, and processes that wait for a core. The recipe is emulated for a
moment with each strategy and as many processes as it has, over links so fast that they do not matter; what a step takes
longer than simulated is the overhead. `weightgrad validate` gives it to the simulator in the same way.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from weightgrad.errors import PlanError
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.report.choices import safe_name
from weightgrad.lab.run.validation import Validation

_STEPS = 20  # of each of the emulations


def overheads(
    recipes: Sequence[tuple[str, Recipe]], say: Callable[[str], None], *, kind: str = "auto"
) -> Mapping[str, float]:
    """Seconds of a step that are neither compute nor codec nor network, by the label of a strategy.

    Args:
        recipes: labels, and a recipe with each strategy; its data must be here.
        say: called with what is found.
        kind: of the emulated network, as `weightgrad emulate` takes it.

    Raises:
        PlanError: a recipe has no time of a step, which processes could keep.
    """
    found = {}
    with tempfile.TemporaryDirectory() as place:
        for label, recipe in recipes:
            if any(site.compute.seconds_per_step == "calibrate" for site in recipe.site_list):
                raise PlanError(
                    "--processes: wanted a time of a step that processes keep, e.g. 0.1 s, and not calibrate"
                )
            steps = min(recipe.training.steps, _STEPS)
            short = recipe.with_settings([f"training.steps={steps}", f"training.evaluate_every={steps}"])
            fitted = Validation(short, Path(place), kind, say=say).fit(short, safe_name(label))
            found[label] = fitted.compute.step_overhead_seconds
    return found
