"""Where a rank keeps the global model and the residual: in memory of the host, or on the device of the model.

The core works wherever the vectors are, and its pieces are encoded there. Encoded bytes are the only thing that has to
be on the host, because they are sent, received, and written to checkpoints. `HostMemory` is the usual place;
`runtime/model/device_state.py` keeps vectors on an accelerator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from weightgrad.wire.messages import RoundResult, Segment


class StateMemory(Protocol):
    """Where the vectors of a shard are, and how encoded bytes come there and leave."""

    @property
    def device(self) -> torch.device:
        """Where vectors are."""

    def leave(self, segments: Iterable[Segment]) -> Iterator[tuple[Segment, Segment]]:
        """Bring what was encoded here to the host, while the next is encoded.

        Yields:
            Each segment as it is here, and with its bytes on the host.
        """

    def arrive(self, segments: Sequence[Segment]) -> tuple[Segment, ...]:
        """The same segments with their bytes here, where vectors are."""


class HostMemory:
    """Vectors in memory of the host: encoded bytes are there already."""

    device = torch.device("cpu")

    def leave(self, segments: Iterable[Segment]) -> Iterator[tuple[Segment, Segment]]:
        """Each segment as it is."""
        for segment in segments:
            yield segment, segment

    def arrive(self, segments: Sequence[Segment]) -> tuple[Segment, ...]:
        """The segments as they are."""
        return tuple(segments)


def result_in(memory: StateMemory, result: RoundResult) -> RoundResult:
    """A round result with its bytes where the vectors are."""
    relayed = [
        push if push.segments is None else replace(push, segments=memory.arrive(push.segments))
        for push in result.relayed
    ]
    return replace(result, segments=memory.arrive(result.segments), relayed=tuple(relayed))
