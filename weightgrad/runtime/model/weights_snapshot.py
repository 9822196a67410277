"""The weights of one moment, on their way from a device to the host, while the next passes compute on them.

A push that leaves the local model as it is (`core/site/update_shard.py`) can be encoded beside the next forward and
backward pass: those read parameters, and only the optimizer's next step writes to them. So the copies of all pieces are
started at once, on the stream of `device_copies.py`; that step waits for them, by an event, and for nothing else.

What else writes to parameters in place between two steps, such as clipping of weights, must not do so before the copies
are complete; `docs/gpus.md` says when that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weightgrad.runtime.model.device_copies import DeviceCopies, Download
from weightgrad.runtime.model.module_weights import ModuleWeights
from weightgrad.wire.intervals import Intervals


class WeightsSnapshot:
    """Copies of a rank's weights in pinned memory of the host, piece by piece.

    Memory: all that the largest push reads, in the dtype of the parameters, kept from one push to the next: pinning
    memory takes longer than copying to it.

    Args:
        weights: the parameters, all on one device.
    """

    def __init__(self, weights: ModuleWeights) -> None:
        self._weights = weights
        self._copies: DeviceCopies = weights.copies_of(weights.device)
        self._staging: list[Any] = []
        self._coming: dict[Intervals, Download] = {}
        self._waited = True  # whether the user's stream waits for the copies

    @staticmethod
    def possible(weights: ModuleWeights) -> bool:
        """Whether the weights are on one accelerator, in the form in which rounds work on them."""
        devices = {one.parameter.device for one in weights.parameters}
        return len(devices) == 1 and weights.device.type != "cpu" and not weights.redistributes

    def take(self, upcoming: Sequence[Intervals]) -> None:
        """Start to copy the weights of these pieces, as they are now. Earlier copies are forgotten."""
        while len(self._staging) < len(upcoming):
            self._staging.append(self._copies.staging_buffer())
        self._coming = {
            intervals: self._copies.download(self._weights.parts(intervals), [buffer])
            for intervals, buffer in zip(upcoming, self._staging, strict=False)
        }
        self._waited = False

    def before_writing(self) -> None:
        """Parameters are about to be written: what the user's stream is given from now on waits for the copies."""
        if not self._waited:
            self._copies.hold()
            self._waited = True

    def expect(self, upcoming: Sequence[Intervals]) -> None:
        """Nothing: all of it is on its way."""

    def views(self, intervals: Intervals) -> None:
        """Nothing: parameters are on a device."""

    def read(self, intervals: Intervals, out: Tensor) -> Tensor:
        """The weights of a piece, as they were; waits for their copy."""
        parts = self._coming[intervals].wait()
        if len(parts) == 1 and parts[0].dtype == torch.float32:
            return parts[0]
        out, start = out[: intervals.numel], 0
        for part in parts:
            out[start : start + part.numel()].copy_(part)
            start += part.numel()
        return out
