"""Where a site's local model goes: which of its own updates the model contains besides the global model.

The local model is always

    model  = anchor + fresh update
    anchor = global model + share of the pushes in flight + share of the residual

The fresh update is what the local steps did since the last push. `core/resume.py` says how large the shares are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weightgrad.core.global_model import GlobalModel
from weightgrad.core.in_flight import InFlightPushes
from weightgrad.core.residual import Residual
from weightgrad.core.resume import Resume
from weightgrad.wire.messages import Segment


class ModelPlacement:
    """The local model of a site and the anchor it is measured from.

    Memory, in vectors of the model's size: `model`, `anchor`, and one for fresh updates, made when it is first
    needed. Where the sites share gradients, `model` and `anchor` are the global model's own vector: no extra memory.
    """

    def __init__(
        self,
        global_model: GlobalModel,
        residual: Residual,
        in_flight: InFlightPushes,
        resume: Resume,
        *,
        shares_gradients: bool,
    ) -> None:
        self.is_global_model = shares_gradients
        self.model = global_model.vector if shares_gradients else global_model.vector.clone()
        self.anchor = global_model.vector if shares_gradients else global_model.vector.clone()
        self._global_model = global_model
        self._residual = residual
        self._in_flight = in_flight
        self._resume = resume
        self._fresh: Tensor | None = None

    def fresh_update(self) -> Tensor:
        """What the local steps did since the last push, in memory that the next call uses again."""
        if self._fresh is None:
            self._fresh = torch.empty_like(self.model)
        return torch.sub(self.model, self.anchor, out=self._fresh)

    def take_fresh_update(self, *, move_anchor: bool) -> Tensor:
        """The fresh update, to be pushed or put into the residual; zeros where gradients are shared.

        Args:
            move_anchor: whether the update counts as pushed from now on; otherwise the caller places the model anew.

        Returns:
            The update, in memory that the next call uses again.
        """
        if self.is_global_model:
            return torch.zeros_like(self.model)
        fresh = self.fresh_update()
        if move_anchor:
            self.forget_fresh_update()
        return fresh

    def forget_fresh_update(self) -> None:
        """Count everything that is in the model now as pushed."""
        if not self.is_global_model:
            self.anchor.copy_(self.model)

    def place(self, fresh: Tensor, segments: Sequence[Segment] | None, *, rounds_under_way: int) -> None:
        """Move the model after the global model has moved; the fresh update stays in the model.

        Args:
            fresh: the fresh update, from before the global model moved.
            segments: the intervals that the round result moved, or None after a download of the whole model.
            rounds_under_way: how many rounds the sync schedule has under way at a time.
        """
        own_share = self._resume.own_share
        if own_share and segments is not None:
            for segment in segments:
                here = slice(segment.start, segment.start + segment.payload.numel)
                self.model[here].mul_(own_share).add_(self._global_model.vector[here], alpha=1 - own_share)
            torch.sub(self.model, fresh, out=self.anchor)
        else:
            self._move_anchor(rounds_under_way)
            torch.add(self.anchor, fresh, out=self.model)

    def place_without_fresh_update(self, *, rounds_under_way: int) -> None:
        """Move the model to the anchor: what a push held back leaves the model with the push."""
        self._move_anchor(rounds_under_way)
        self.model.copy_(self.anchor)

    def _move_anchor(self, rounds_under_way: int) -> None:
        in_flight_share = self._resume.in_flight_share(rounds_under_way)
        residual_share = self._resume.residual_share
        if in_flight_share < 1:  # scaled as one sum: as many passes over memory as without a share
            torch.mul(self._residual.vector, residual_share / in_flight_share, out=self.anchor)
            self._in_flight.add_to(self.anchor)
            torch.add(self._global_model.vector, self.anchor, alpha=in_flight_share, out=self.anchor)
            return
        self.anchor.copy_(self._global_model.vector)
        self._in_flight.add_to(self.anchor)
        if residual_share:
            self.anchor.add_(self._residual.vector, alpha=residual_share)

    def state(self) -> dict[str, Tensor]:
        """Copies of the model and the anchor for a checkpoint; nothing where they are the global model."""
        return {} if self.is_global_model else {"model": self.model.clone(), "anchor": self.anchor.clone()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        if not self.is_global_model:
            self.model.copy_(state["model"])
            self.anchor.copy_(state["anchor"])
