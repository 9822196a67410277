"""The memory of a worker and of the global server, for the sharding and the strategy given.

On the device: the peak of a training step, which `model_cost` found. With FSDP2 over n workers, parameters, gradients
and optimizer are an n-th each, and the largest layer is there whole twice, one in use and one on its way.

On the host, what WeightGrad adds, over all ranks of a site (docs/design.md has the same in words), in bytes:

    kept  = 4 a parameter for the global model   (strategies that share updates)
          + 4 for the residual                   (where a codec or a selector leaves something behind)
          + 4 for a mixture                      (`resume: mix`)
    peak  = kept + encoded pushes under way + one result + ten pieces
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from weightgrad.codecs import ErrorFeedback, Fp32
from weightgrad.core import parts, pieces
from weightgrad.core.parts.aggregators import Outer
from weightgrad.core.parts.resume import Mix
from weightgrad.core.strategies import Strategy
from weightgrad.lab.plan.devices import Device
from weightgrad.lab.plan.model_cost import ModelCost
from weightgrad.lab.plan.prediction import Prediction
from weightgrad.lab.plan.scenario import Scenario
from weightgrad.lab.sim.plan import SiteSpec

_PIECES = 10  # in memory at a time
_VECTOR = 4  # bytes a parameter


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes of one worker of a site.

    Attributes:
        site: the site.
        parameters: of the device.
        gradients: of the device.
        optimizer: of the device.
        activations: of the device, with what is gathered of a sharded model.
        device_peak: the most at any time, on the device.
        host_kept: what WeightGrad keeps on the host, this worker's part.
        host_peak: the most that it has at any time.
        fits: whether the device has as much; None where it is not known.
    """

    site: str
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    device_peak: float
    host_kept: float
    host_peak: float
    fits: bool | None

    @property
    def total_peak(self) -> float:
        """Device and host together: what a worker without an accelerator needs."""
        return self.device_peak + self.host_peak


def added_bytes(
    scenario: Scenario, strategy: Strategy, *, up: float, down: float, in_flight: float = 1.0
) -> tuple[float, float]:
    """What WeightGrad keeps at a site, and the most that it has, over all ranks.

    Args:
        scenario: the model.
        strategy: the strategy.
        up: bytes of an encoded push.
        down: bytes of an encoded result.
        in_flight: pushes under way at a time.
    """
    numel = scenario.layout.numel
    kept = 0.0
    if strategy.shares == "updates":
        kept += _VECTOR * numel
        if isinstance(parts.parse("resume", strategy.resume), Mix):
            kept += _VECTOR * numel
    if _leaves_something(strategy, "up", "selector"):
        kept += _VECTOR * numel
    passing = _PIECES * _VECTOR * min(numel, pieces.limit_of(scenario.layout))
    return kept, kept + max(1.0, in_flight) * up + down + passing


def server_bytes(scenario: Scenario, strategy: Strategy, prediction: Prediction) -> tuple[float, float]:
    """What the global server keeps, and the most that it has, over all its processes."""
    numel, vectors = scenario.layout.numel, 1.0
    if strategy.shares == "gradients":
        vectors += 1 + _optimizer_vectors(scenario.optimizer[0], scenario.optimizer[1])
    elif isinstance(parts.parse("aggregator", strategy.aggregator), Outer):
        vectors += 1
    relays = len(scenario.sites) <= strategy.relay
    if not relays and _leaves_something(strategy, "down", "down_selector"):
        vectors += 1
    kept = vectors * _VECTOR * numel
    pushes = sum(link.up_round for link in prediction.links)
    result = max(link.down_round for link in prediction.links)
    passing = _PIECES * _VECTOR * min(numel, pieces.limit_of(scenario.layout))
    return kept, kept + pushes + result + passing


def _leaves_something(strategy: Strategy, way: str, selector: str) -> bool:
    """Whether something stays in the residual of this way."""
    codec = strategy.wan_codec(way)
    inner = codec.inner if isinstance(codec, ErrorFeedback) else codec
    lossless = isinstance(inner, Fp32)
    chooses = getattr(strategy, selector) not in ("all", "nonzero") and not getattr(strategy, selector).startswith(
        "fragment"
    )
    return chooses or (not lossless and (strategy.keep_loss or codec.carries_error))


def _optimizer_vectors(name: str, options: Mapping[str, object]) -> int:
    if name in ("adam", "adamw", "adadelta"):
        return 2
    return 1 if name == "adagrad" or options.get("momentum") else 0


def worker_memory(
    scenario: Scenario, cost: ModelCost, prediction: Prediction, site: SiteSpec, device: Device | None
) -> WorkerMemory:
    """The memory of one worker of a site.

    Args:
        scenario: what is planned.
        cost: of one worker's step.
        prediction: of the strategy.
        site: the site.
        device: what the worker computes on, or None if that is not known.
    """
    strategy, shards = prediction.strategy, site.workers if site.sharded else 1
    link = next(own for own in prediction.links if own.site == site.name)
    rounds = link.transfer_seconds / max(1e-9, prediction.round_steps * prediction.step_seconds)
    kept, peak = added_bytes(
        scenario, strategy, up=link.up_round, down=link.down_round, in_flight=max(1, math.ceil(rounds - 1e-6))
    )
    activations, device_peak = float(cost.activation_bytes), float(cost.peak_bytes)
    if shards > 1:
        gathered = 2 * cost.largest_layer_bytes
        whole = cost.parameter_bytes + cost.gradient_bytes + cost.optimizer_bytes
        activations += gathered
        device_peak = max(device_peak - whole * (1 - 1 / shards) + gathered, whole / shards + activations)
    fits = None if device is None else device_peak <= 1e9 * (device.memory_gb - device.reserved_gb)
    return WorkerMemory(
        site=site.name,
        parameters=cost.parameter_bytes / shards,
        gradients=cost.gradient_bytes / shards,
        optimizer=cost.optimizer_bytes / shards,
        activations=activations,
        device_peak=device_peak,
        host_kept=kept / site.workers,
        host_peak=peak / site.workers,
        fits=fits,
    )
