"""What the processes of a run cost on this machine, besides computing and the network.

A plan knows how long a pass computes. On a machine that is as busy as a run makes it, with the server and all sites as
processes of their own, a step takes longer than that: connections, telemetry, and processes that wait for a core. The
recipe is emulated for a moment with as many processes as it has, over links so fast that they do not matter; what its
steps take longer than simulated is the overhead.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.validation import Validation

_STEPS = 20  # of each of the emulations


def measured(recipe: Recipe, say: Callable[[str], None], *, kind: str = "auto") -> Recipe:
    """The recipe with the overhead of a step and of a message on this machine, and with passes that it can keep.

    Args:
        recipe: the recipe; its data must be here.
        say: called with what is found.
        kind: of the emulated network, as `weightgrad emulate` takes it.

    Raises:
        RunError: this machine is too slow for so many processes.
    """
    steps = recipe.training.steps
    short = recipe.with_settings([f"training.steps={min(steps, _STEPS)}", f"training.evaluate_every={steps}"])
    with tempfile.TemporaryDirectory() as place:
        found = Validation(short, Path(place), kind, say=say).calibrate().compute
    return recipe.with_settings(
        [
            f"compute.seconds_per_step={found.seconds_per_step}",
            f"compute.step_overhead={found.step_overhead_seconds:.6f}",
            f"compute.message_overhead={found.message_overhead_seconds:.6f}",
        ]
    )
