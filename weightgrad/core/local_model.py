"""The weights that a site trains on, as the core sees them: read and written piece by piece, wherever they live.

In the simulator the weights are one flat vector (`FlatModel`). In a deployment they are the parameters of the user's
module (`runtime/model/module_weights.py`), which may be sharded, in bfloat16, or on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from weightgrad.kernels import fixed
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.messages import Segment

_HOST = torch.device("cpu")


class Readable(Protocol):
    """Weights, or gradients, that a push is made of."""

    def expect(self, upcoming: Sequence[Intervals]) -> None:
        """Say what will be read next, in this order, so that it can come from a device while the last is worked on."""

    def read(self, intervals: Intervals, out: Tensor) -> Tensor:
        """The weights as float32.

        Args:
            intervals: some of the held elements.
            out: memory for the result, which may be used or not.

        Returns:
            The weights; not to be written to, and if they were expected, not to be used after the next read.
        """

    def views(self, intervals: Intervals) -> Sequence[tuple[int, Tensor]] | None:
        """The weights in their own memory, to read and to write.

        Args:
            intervals: some of the held elements.

        Returns:
            For each stretch its place within the intervals, and its weights, flat; None unless all of them are
            contiguous float32 on the CPU.
        """


class LocalModel(Readable, Protocol):
    """The weights of the elements that a rank holds."""

    @property
    def held(self) -> Intervals:
        """The elements that can be read and written."""

    @property
    def exact(self) -> bool:
        """Whether weights are float32; otherwise `write` rounds, and `round_` tells to what."""

    @property
    def device(self) -> torch.device:
        """Where samples are."""

    def sample(self, interval: Intervals, distance: int) -> Tensor:
        """The weights at equal distances in one interval, as float32, where they are."""

    def write(self, intervals: Intervals, values: Tensor) -> None:
        """Replace weights; `values` are float32 and are not kept."""

    def add(self, intervals: Intervals, values: Tensor) -> None:
        """Add float32 values to weights."""

    def add_segment(self, segment: Segment, mode: int, *, share: float = 1.0) -> None:
        """Add (`fixed.ADD`) or subtract (`fixed.SUBTRACT`) a share of what a segment decodes to, where it is held."""

    def round_(self, values: Tensor, intervals: Intervals) -> Tensor:
        """Round float32 values in place to what the weights of these elements can hold."""


class FlatModel:
    """Weights in one float32 vector.

    Args:
        vector: the weights; read and written in place.
        stored: which elements the vector has.
        held: which of them this rank holds; None: all.
    """

    exact = True

    def __init__(self, vector: Tensor, stored: Intervals, held: Intervals | None = None) -> None:
        self.vector = vector
        self.held = stored if held is None else held
        self._stored = stored

    @property
    def device(self) -> torch.device:
        """Where the vector is."""
        return self.vector.device

    def expect(self, upcoming: Sequence[Intervals]) -> None:
        """Nothing: all of it is here."""

    def read(self, intervals: Intervals, out: Tensor) -> Tensor:
        """A view of the weights where they lie in one stretch; otherwise copies in `out`."""
        return gather(self.vector, self._stored, intervals, out)

    def sample(self, interval: Intervals, distance: int) -> Tensor:
        """A view of the weights at these distances."""
        place = self._stored.slice_of(interval)
        assert place is not None
        return self.vector[place][::distance]

    def write(self, intervals: Intervals, values: Tensor) -> None:
        """Copy values into the vector."""
        scatter(self.vector, self._stored, intervals, values)

    def add(self, intervals: Intervals, values: Tensor) -> None:
        """Add values to the vector."""
        for run in self._stored.runs(intervals):
            self.vector[run.mine : run.mine + run.count] += values[run.theirs : run.theirs + run.count]

    def views(self, intervals: Intervals) -> Sequence[tuple[int, Tensor]] | None:
        """Views of the vector, unless it is on a device."""
        if self.vector.device.type != "cpu":
            return None
        return [(run.theirs, self.vector[run.mine : run.mine + run.count]) for run in self._stored.runs(intervals)]

    def add_segment(self, segment: Segment, mode: int, *, share: float = 1.0) -> None:
        """Decode a segment into the vector."""
        if self.held is self._stored:
            segment.into(self.vector, mode, self._stored, share=share)
            return
        own = segment.intervals & self.held  # another rank's part of the vector is not this one's to move
        if not own:
            return
        values = torch.zeros(own.numel, dtype=torch.float32)
        segment.into(values, mode, own, share=share)
        self.add(own, values)

    def round_(self, values: Tensor, intervals: Intervals) -> Tensor:
        """The values as they are."""
        del intervals
        return values


def gather(vector: Tensor, held: Intervals, intervals: Intervals, out: Tensor) -> Tensor:
    """Some elements of a holder's vector.

    Args:
        vector: what is stored.
        held: which elements the vector stores.
        intervals: the wanted elements, all of them held.
        out: memory for a copy.

    Returns:
        A view of the vector where the elements lie in one stretch, else a copy in `out`.
    """
    if (place := held.slice_of(intervals)) is not None:
        return vector[place]
    out = out[: intervals.numel]
    for run in held.runs(intervals):
        out[run.theirs : run.theirs + run.count].copy_(vector[run.mine : run.mine + run.count])
    return out


def scatter(vector: Tensor, held: Intervals, intervals: Intervals, values: Tensor) -> None:
    """Put values into a holder's vector; those that are not held are left out.

    Args:
        vector: what is stored.
        held: which elements the vector stores.
        intervals: the elements of `values`.
        values: the new values; nothing happens if they are a view of the same memory.
    """
    flat = values.view(-1)
    for run in held.runs(intervals):
        target, source = vector[run.mine : run.mine + run.count], flat[run.theirs : run.theirs + run.count]
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)


class Scratch:
    """Vectors that are used again and again for one piece at a time, by name. They grow to the largest piece.

    Args:
        device: where they are.
    """

    def __init__(self, device: torch.device = _HOST) -> None:
        self.device = device
        self._vectors: dict[str, Tensor] = {}

    def of(self, name: str, numel: int) -> Tensor:
        """Memory for `numel` elements, with whatever was in it."""
        found = self._vectors.get(name)
        if found is None or found.numel() < numel:
            found = self._vectors[name] = torch.empty(numel, device=self.device, dtype=torch.float32)
        return found[:numel]

    def gather(self, name: str, vector: Tensor, held: Intervals, intervals: Intervals) -> Tensor:
        """Some elements of a holder's vector, as `gather` gives them; takes memory only if they must be copied."""
        if (place := held.slice_of(intervals)) is not None:
            return vector[place]
        return gather(vector, held, intervals, self.of(name, intervals.numel))

    def clear(self) -> None:
        """Give all memory back."""
        self._vectors.clear()

    @property
    def nbytes(self) -> int:
        """The memory in use."""
        return sum(vector.nbytes for vector in self._vectors.values())


def add_into(vector: Tensor, segments: Sequence[Segment], held: Intervals, mode: int = fixed.ADD) -> None:
    """Decode segments into the vector of a holder."""
    for segment in segments:
        segment.into(vector, mode, held)
