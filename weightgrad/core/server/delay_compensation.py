"""Delay compensation for stale pushes under `async_` (DC-ASGD, Zheng et al., 2017).

For a gradient g that was computed on the old model w_seen, the compensated gradient is g + lambda g g (w - w_seen).
An update is a negative gradient, so for an update the sign of lambda changes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weightgrad.codecs import Fp32
from weightgrad.core.global_model import GlobalModel
from weightgrad.core.local_model import gather
from weightgrad.kernels import fixed
from weightgrad.wire.messages import Segment


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

    def compensate(self, segments: tuple[Segment, ...], seen: int) -> tuple[Segment, ...]:
        """The segments of a push, corrected.

        Args:
            segments: what was pushed.
            seen: the version that the push was computed on; for one older than the oldest kept, that one is taken.

        Returns:
            Exact segments of the same elements, or the segments as they are if there is nothing to correct.
        """
        if self._strength == 0 or not segments:
            return segments
        model = self._global_model
        strength = self._strength if model.takes_gradients else -self._strength
        then = self._past_models[max(seen, min(self._past_models))]
        found = []
        for segment in segments:
            own = segment.intervals & model.held
            update = torch.zeros(own.numel, dtype=torch.float32)
            segment.into(update, fixed.STORE, own)
            moved = gather(model.vector, model.held, own, torch.empty(own.numel, dtype=torch.float32)) - gather(
                then, model.held, own, torch.empty(own.numel, dtype=torch.float32)
            )
            update += (update * update).mul_(moved).mul_(strength)
            found.append(Segment.at(own, Fp32().encode(update, {}, 0)[0]))
        return tuple(found)
