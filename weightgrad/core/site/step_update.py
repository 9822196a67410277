"""How large the update of a site's last step is, for triggers and selectors that compare the residual with it.

The paper's test of significance, |g_u / g| >= G, compares two norms: of what has been made since the last push, and of
the last step. Both are measured on a sample of the weights, so that no second copy of the model is kept: of each tensor
up to `SAMPLE` elements at equal distances. Tensors that are smaller are measured exactly.

Only `significant('element')` compares single elements; for it the last step's update is kept whole.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping

import torch
from torch import Tensor

from weightgrad.core.layout import Layout
from weightgrad.core.local_model import LocalModel
from weightgrad.core.pieces import Piece
from weightgrad.wire.intervals import Intervals

SAMPLE = 1 << 14
"""Elements of a tensor that are looked at, at most."""


class StepUpdate:
    """The update of the last step and what was made since the last push, on a sample of the held elements.

    Memory: four vectors of the sample's size, on the device of the weights: a step between rounds copies nothing to the
    host. With `elements`, the sample is everything that is held.

    Args:
        held: the elements that this rank holds.
        layout: where the tensors lie.
        elements: whether single elements are compared.
    """

    def __init__(self, held: Intervals, layout: Layout, *, elements: bool = False) -> None:
        self._parts: list[tuple[Intervals, int]] = []  # a stretch of one tensor, and the distance between its samples
        self._bounds = [0]
        for slot in layout.slots:
            for start, stop in (held & Intervals(((slot.start, slot.stop),) if slot.numel else ())).spans:
                # An odd distance does not fall on the same columns of a matrix again and again.
                distance = 1 if elements or stop - start <= SAMPLE else -(-(stop - start) // SAMPLE) | 1
                self._parts.append((Intervals(((start, stop),)), distance))
                self._bounds.append(self._bounds[-1] + -(-(stop - start) // distance))
        self._held = Intervals.of(span for stretch, _ in self._parts for span in stretch.spans)
        self._ends = [stretch.end for stretch, _ in self._parts]
        size = self._bounds[-1]
        self._anchor = torch.zeros(size, dtype=torch.float32)  # the weights since which everything is new
        self._previous = torch.zeros(size, dtype=torch.float32)  # the weights before the last step
        self._last = torch.zeros(size, dtype=torch.float32)
        self._made = torch.zeros(size, dtype=torch.float32)  # of shared gradients, since the last push
        self._last_here: Tensor | None = None  # `_last` on the host

    def _sample(self, local: LocalModel) -> Tensor:
        found = torch.empty(self._bounds[-1], device=local.device, dtype=torch.float32)
        for (stretch, distance), start in zip(self._parts, self._bounds, strict=False):
            values = local.sample(stretch, distance)
            found[start : start + values.numel()] = values
        return found

    def begin(self, local: LocalModel) -> None:
        """Everything that is in the weights now counts as pushed, and the next step is measured from here."""
        self._anchor = self._sample(local)
        self._previous = self._anchor.clone()

    def stepped(self, local: LocalModel) -> None:
        """A step has moved the weights."""
        now = self._sample(local)
        self._last, self._last_here = now - self._previous.to(now.device), None
        self._previous = now

    def made(self, gradient: LocalModel) -> None:
        """A step has made this gradient, where gradients are shared."""
        self._last, self._last_here = self._sample(gradient), None
        self._made = self._made.to(self._last.device) + self._last

    def moved(self, local: LocalModel) -> None:
        """Something other than a step has moved the weights: that is neither new nor part of a step."""
        now = self._sample(local)
        self._anchor = self._anchor.to(now.device) + (now - self._previous.to(now.device))
        self._previous = now

    def pushed(self, local: LocalModel | None) -> None:
        """A push has taken what was made; None where gradients are shared."""
        if local is None:
            self._made.zero_()
        else:
            self.begin(local)

    def squares(self, *, gradients: bool) -> tuple[float, float]:
        """The squared norms of what was made since the last push and of the last step, for all held elements."""
        since = self._made if gradients else self._previous - self._anchor
        return self._squares(since.cpu()), self._squares(self._on_host())

    def _on_host(self) -> Tensor:
        """The last step's sample on the host, copied there once."""
        if self._last_here is None:
            self._last_here = self._last.cpu()
        return self._last_here

    def _squares(self, sample: Tensor) -> float:
        total = 0.0
        for (stretch, _), start, stop in zip(self._parts, self._bounds, self._bounds[1:], strict=False):
            own = float(sample[start:stop].double().square().sum())
            total += own * stretch.numel / (stop - start)
        return total

    def last_norm(self, piece: Piece) -> float:
        """The norm of the last step's update in a piece, estimated from the tensor it is part of."""
        total = 0.0
        place = bisect_right(self._ends, piece.start)
        while place < len(self._parts) and self._parts[place][0].first < piece.intervals.end:
            shared = (self._parts[place][0] & piece.intervals).numel
            if shared:
                start, stop = self._bounds[place : place + 2]
                total += float(self._on_host()[start:stop].double().square().sum()) * shared / (stop - start)
            place += 1
        return math.sqrt(total)

    def last_update(self, piece: Piece) -> Tensor:
        """The elements of the last step's update in a piece, where all of them are kept."""
        found, last = torch.empty(piece.numel, dtype=torch.float32), self._on_host()
        for run in self._held.runs(piece.intervals):
            found[run.theirs : run.theirs + run.count] = last[run.mine : run.mine + run.count]
        return found

    def state(self) -> dict[str, Tensor]:
        """The samples for a checkpoint; copied only if they are on a device."""
        mine = {"anchor": self._anchor, "previous": self._previous, "last": self._last, "made": self._made}
        return {name: sample.cpu() for name, sample in mine.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; samples of another size, of a site that was sharded otherwise, are dropped."""
        if state["anchor"].numel() == self._bounds[-1]:
            self._anchor, self._previous = state["anchor"].clone(), state["previous"].clone()
            self._last, self._made = state["last"].clone(), state["made"].clone()
            self._last_here = None
