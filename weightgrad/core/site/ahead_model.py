"""The local model of a site that shares gradients and does not wait for their mean.

    local model = global model, after an optimizer step with each of the site's own pushes in flight

The site goes on as if its own gradient were the mean of all sites. When the mean comes, the global model takes the step
with it, as everywhere; the local model goes back to the global model, and takes the steps with what is still in flight
again. So there is one optimizer for all: its moments are those of the large batch, and nobody's own gradient stays in
them. A gradient that is merely applied late is computed at weights that do not know of it yet, which costs far more
(`docs/log.md`).

The steps are those of the optimizer itself, so any optimizer will do. They are taken with the pushes as the server
decodes them, which the site keeps anyway until their results come: nothing more has to survive a crash.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from weightgrad.core.global_model import GlobalModel
from weightgrad.wire.messages import Segment


class OwnPush(NamedTuple):
    """A push in flight: what it holds, and the step and the learning rate at which it was made."""

    segments: Sequence[Segment]
    step: int
    rate: float | None


class AheadModel:
    """A copy of a global model that is ahead of it.

    Memory, in vectors of the model's size: `vector`, and the state of its optimizer.

    Args:
        global_model: the site's replica of the global model, which takes gradients.
    """

    def __init__(self, global_model: GlobalModel) -> None:
        self._global_model = global_model
        self._model = global_model.copy()

    @property
    def vector(self) -> Tensor:
        """The weights, always in the same memory."""
        return self._model.vector

    def advance(self, push: OwnPush) -> None:
        """Take a step with the site's own push."""
        if push.segments:
            self._model.step_by(push.segments, push.step, push.rate)

    def begin_again(self, in_flight: Iterable[OwnPush]) -> None:
        """Go back to the global model, and take the steps with what is in flight, the oldest first."""
        self._model.copy_from(self._global_model)
        for push in in_flight:
            self.advance(push)
