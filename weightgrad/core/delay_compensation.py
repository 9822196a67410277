"""Delay compensation for stale pushes under `async_` (DC-ASGD, Zheng et al., 2017).

For a gradient g that was computed on the old model w_seen, the compensated gradient is g + lambda g g (w - w_seen).
An update is a negative gradient, so for an update the sign of lambda changes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weightgrad.codecs import Fp32
from weightgrad.core.global_model import GlobalModel
from weightgrad.kernels import fixed
from weightgrad.wire.messages import Push, Segment


class DelayCompensation:
    """Corrects stale pushes by what the global model did since the site saw it.

    Memory, in vectors of the model's size: the last global models, two for each site and one more; none if `strength`
    is 0.

    Args:
        global_model: the server's global model.
        strength: lambda; 0 leaves pushes as they are.
    """

    def __init__(self, global_model: GlobalModel, strength: float) -> None:
        self._global_model = global_model
        self._strength = strength
        self._past_models: dict[int, Tensor] = {}  # by version

    def __len__(self) -> int:
        return len(self._past_models)

    def record_model(self, sites: int) -> None:
        """Keep a copy of the present global model, and forget those that are too old.

        Args:
            sites: how many sites there are.
        """
        if self._strength:
            self._past_models[self._global_model.version] = self._global_model.vector.clone()
            while len(self._past_models) > 2 * sites + 1:
                del self._past_models[min(self._past_models)]

    def clear(self) -> None:
        """Forget all past models."""
        self._past_models = {}

    def compensate(self, push: Push) -> tuple[Segment, ...]:
        """The segments of a push, corrected.

        Args:
            push: a push that was computed on version `push.seen`, or on one older than the oldest kept.

        Returns:
            One exact segment of the whole vector, or the push's own segments if there is nothing to correct.
        """
        if self._strength == 0 or not push.segments:
            return push.segments
        strength = self._strength if self._global_model.takes_gradients else -self._strength
        seen = self._past_models[max(push.seen, min(self._past_models))]
        update = torch.zeros_like(self._global_model.vector)
        for segment in push.segments:
            segment.into(update, fixed.STORE)
        update += strength * update * update * (self._global_model.vector - seen)
        return (Segment(start=0, payload=Fp32().encode(update, {}, 0)[0]),)
