"""How long a worker takes for each layer and phase of a step.

What computes is known by its device (then times follow from counted operations and bytes), by a measurement of each
phase on this machine, or only by the time that a recipe gives for forward and backward together. In the last two cases
a layer has the share of the time that it would have on a device of the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weightgrad.lab.plan.devices import DEVICES, Device
from weightgrad.lab.plan.model_cost import Layer, ModelCost
from weightgrad.lab.plan.operations import PHASES

PASS = PHASES[:2]
MEASURED = "measured on this machine"


@dataclass(frozen=True)
class StepTimes:
    """A step of a worker.

    Attributes:
        phases: seconds of each phase that is known.
        source: where they are from, for a reader: a device, a recipe or this machine.
        device: by which time is shared among layers.
        counted: what each phase would take there.
    """

    phases: Mapping[str, float]
    source: str
    device: Device
    counted: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return sum(self.phases.values())

    def of_layer(self, cost: ModelCost, layer: Layer) -> dict[str, float]:
        """Seconds of one layer, by phase."""
        own = cost.layer_seconds(self.device, layer)
        return {phase: time * own[phase] / (self.counted[phase] or 1.0) for phase, time in self.phases.items()}


def of_device(cost: ModelCost, name: str, device: Device, shards: int) -> StepTimes:
    """A step on a device of the table that optimizes one of so many shards."""
    found = cost.seconds(device)
    return StepTimes(
        {**found, "optimizer": found["optimizer"] / shards}, f"{name} of the table of devices", device, found
    )


def of_recipe(cost: ModelCost, seconds: float, source: str) -> StepTimes:
    """A step whose forward and backward take so long together."""
    usual = DEVICES["CPU"]
    counted = cost.seconds(usual)
    whole = sum(counted[phase] for phase in PASS)
    shares = {phase: counted[phase] / whole if whole else 1 / len(PASS) for phase in PASS}
    return StepTimes({phase: seconds * share for phase, share in shares.items()}, source, usual, counted)


def measured(cost: ModelCost, phases: Mapping[str, float]) -> StepTimes:
    """A step whose phases were timed on this machine."""
    usual = DEVICES["CPU"]
    return StepTimes(phases, MEASURED, usual, cost.seconds(usual))
