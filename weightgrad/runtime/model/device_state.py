"""Where a site keeps its state, as users choose it: `prepare(..., state_on="host")` or `"device"`.

- "host": global model and residual are in memory of the host. A round copies the rank's weights there, and the C
  kernels encode them.
- "device": they are where the parameters are, 8 bytes a parameter, and are encoded there. Only encoded bytes cross:
  those of a push to the host, those of a result to the device. The work is on the user's stream, behind the step, and
  copies are on the stream of `runtime/model/device_copies.py`: the bytes of one piece leave while the next is encoded.

Both give the same bits, so a strategy whose bits depend on where it is computed is refused on an accelerator: sums that
BLAS or the device's own reductions make, and ties that its own sort breaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace

import torch

from weightgrad import codecs
from weightgrad.codecs import Codec, LossAware, PowerSgd
from weightgrad.core.parts.selectors import Largest, Selector, Significant
from weightgrad.core.site.state_memory import HostMemory, StateMemory
from weightgrad.core.strategies import Strategy
from weightgrad.errors import StrategyError
from weightgrad.runtime.model.device_copies import DeviceCopies, Download
from weightgrad.runtime.model.module_weights import ModuleWeights
from weightgrad.wire.messages import Segment

PLACES = ("host", "device")

SAME_ON_DEVICES: tuple[type[Codec], ...] = (
    codecs.Adaptive, codecs.Bf16, codecs.Clip, codecs.Codebook, codecs.Dgc, codecs.Elias, codecs.ErrorFeedback,
    codecs.Fp16, codecs.Fp32, codecs.OneBit, codecs.Qsgd, codecs.Sign, codecs.TernGrad, codecs.Threshold, codecs.TopK,
    codecs.WarmUp,
)  # fmt: skip
"""Codecs with the same bytes everywhere: rounding is exact, and sums follow fixed trees or are of integers."""

OTHER_ON_DEVICES: dict[type[Codec], str] = {
    PowerSgd: "multiplies matrices with BLAS",
    LossAware: "adds up in the order of the device",
}
"""Codecs that are not, and why."""
_SELECTORS: dict[type[Selector], str] = {
    Largest: "breaks ties as the device sorts; the codec topk(...) chooses the same entries and can",
    Significant: "compares norms, which every device adds up in an order of its own",
}


class DeviceMemory:
    """Vectors on an accelerator.

    Args:
        device: where they are.
        copies: crosses between it and the host.
    """

    def __init__(self, device: torch.device, copies: DeviceCopies) -> None:
        self.device = device
        self._copies, self._staging = copies, copies.staging_buffers()

    def leave(self, segments: Iterable[Segment]) -> Iterator[tuple[Segment, Segment]]:
        """Copy the bytes of a segment to the host while the next one is encoded."""
        before: tuple[Segment, Download] | None = None
        for segment in segments:
            after = (segment, self._copies.download([segment.payload.body], self._staging))
            if before is not None:
                yield _left(*before)
            before = after
        if before is not None:
            yield _left(*before)

    def arrive(self, segments: Sequence[Segment]) -> tuple[Segment, ...]:
        """Copy the bytes of those segments to the device that are not there."""
        return tuple(self._arrived(segment) for segment in segments)

    def _arrived(self, segment: Segment) -> Segment:
        body = segment.payload.body
        if body.device == self.device or not body.numel():
            return segment if body.numel() else _with_body(segment, torch.empty_like(body, device=self.device))
        return _with_body(segment, self._copies.upload(body))


def _left(segment: Segment, download: Download) -> tuple[Segment, Segment]:
    (body,) = download.wait()
    return segment, _with_body(segment, body.clone())


def _with_body(segment: Segment, body: torch.Tensor) -> Segment:
    return replace(segment, payload=replace(segment.payload, body=body))


def check_place(state_on: str) -> None:
    """Check the argument.

    Raises:
        StrategyError: it is neither "host" nor "device".
    """
    if state_on not in PLACES:
        raise StrategyError(f'state_on = {state_on!r}; it is "host" or "device"')


def memory_for(state_on: str, weights: ModuleWeights, strategy: Strategy) -> StateMemory:
    """Where this rank keeps its vectors.

    Args:
        state_on: what the user chose, "host" or "device".
        weights: the rank's parameters.
        strategy: the strategy of the run.

    Raises:
        StrategyError: "device" was asked for, and the parameters are on several devices, or the strategy would have
            other bits there.
    """
    devices = {one.parameter.device for one in weights.parameters}
    if state_on == "host" or devices == {torch.device("cpu")}:
        return HostMemory()
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise StrategyError(f'state_on="device" and parameters on {names}: put them on one, or take state_on="host"')
    if (why := _refused(strategy)) is not None:
        raise StrategyError(
            f'state_on="device": {why}, so its bits would not be those of sites that work on the host; '
            'take state_on="host"'
        )
    (device,) = devices
    return DeviceMemory(device, weights.copies_of(device))


def check_local_server(memory: StateMemory, strategy: Strategy) -> None:
    """Refuse vectors on a device beside a local server.

    Raises:
        StrategyError: they are.
    """
    if memory.device.type != "cpu":
        raise StrategyError(
            f"{strategy.name} has a local server in this site, whose master weights are on the host, so "
            'state_on="device" is of no use; take state_on="host", or wrap the model in DistributedDataParallel'
        )


def _refused(strategy: Strategy) -> str | None:
    """Why a strategy cannot be computed on a device, if it cannot."""
    plan = strategy.for_site().for_shard
    for kind, why in _SELECTORS.items():
        if isinstance(plan.selector, kind):
            return f"the selector {strategy.selector} {why}"
    for codec in (plan.up, plan.flush):
        for one in _within(codec):
            if not isinstance(one, SAME_ON_DEVICES):
                return f"the codec {one} {OTHER_ON_DEVICES.get(type(one), 'is not known to have the same bytes there')}"
    return None


def _within(codec: Codec | None) -> Iterator[Codec]:
    """A codec, and all that it consists of."""
    if codec is None:
        return
    yield codec
    for field in fields(codec):  # type: ignore[arg-type]
        inner = getattr(codec, field.name)
        if isinstance(inner, Codec):
            yield from _within(inner)
