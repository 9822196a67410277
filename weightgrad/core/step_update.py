"""The update of a site's last local step, for triggers and selectors that compare the residual with it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from weightgrad.core.triggers import DynamicThreshold, Significance, Trigger


class StepUpdateTracker:
    """Follows the local model step by step, where the strategy needs it.

    Memory, in vectors of the model's size: the model before the last step and the last step's update; where gradients
    are shared and the trigger is `significance`, also the gradients accumulated since the last push. Nothing at all if
    neither the trigger nor the selector looks at the last step.

    Args:
        model: the local model, which the driver moves in place.
        trigger: the strategy's trigger.
        selector_needs_step: whether the strategy's selector looks at the last step.
    """

    def __init__(self, model: Tensor, trigger: Trigger, *, selector_needs_step: bool) -> None:
        significance = trigger if isinstance(trigger, Significance) else None
        self.threshold = (
            None
            if significance is None
            else DynamicThreshold(significance.threshold, significance.low, significance.high)
        )
        self.last: Tensor | None = None  # the update, or the shared gradient, of the last step
        self._model = model
        self._previous = model.clone() if significance is not None or selector_needs_step else None
        self._accumulated: Tensor | None = None

    @property
    def threshold_value(self) -> float:
        """The significance threshold G now, or 0 without one."""
        return self.threshold.value if self.threshold else 0.0

    def after_step(self, gradient: Tensor | None) -> None:
        """Take note of a local step.

        Args:
            gradient: the step's gradient where gradients are shared; None if the step moved the model.
        """
        if self._previous is None:
            return
        if gradient is not None:
            self.last = gradient
        elif self.last is None:
            self.last = self._model - self._previous
        else:
            torch.sub(self._model, self._previous, out=self.last)
        self._previous.copy_(self._model)
        if gradient is not None and self.threshold is not None:
            self._accumulated = gradient.clone() if self._accumulated is None else self._accumulated.add_(gradient)

    def model_was_moved(self) -> None:
        """Something other than a local step has moved the model: the next step is measured from here."""
        if self._previous is not None:
            self._previous.copy_(self._model)

    def pushed(self) -> None:
        """A push has taken what was accumulated."""
        self._accumulated = None

    def ratio(self, fresh: Tensor | None) -> float:
        """How many times larger the update since the last push is than that of the last step, by norms.

        Args:
            fresh: the update since the last push; None where gradients are shared.

        Returns:
            The ratio of the norms, or 0 if the last step changed nothing.
        """
        since_push = self._accumulated if fresh is None else fresh
        assert self.last is not None
        assert since_push is not None
        one = float(self.last.norm())
        return float(since_push.norm()) / one if one > 0 else 0.0

    def new_epoch(self, rate: float) -> None:
        """An epoch has ended with this learning rate: the dynamic threshold moves."""
        if self.threshold is not None and self.last is not None and rate > 0:
            self.threshold.epoch(rate, float(self.last.norm()) / rate)

    def state(self) -> dict[str, Tensor]:
        """Copies of the tracked vectors and the threshold for a checkpoint."""
        vectors = {"previous": self._previous, "step_update": self.last, "accumulated": self._accumulated}
        found = {name: vector.clone() for name, vector in vectors.items() if vector is not None}
        if self.threshold is not None:
            found["threshold"] = self.threshold.state()
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; other names in `state` are ignored."""
        if self._previous is not None:
            self._previous.copy_(state["previous"])
        self.last = state["step_update"].clone() if "step_update" in state else None
        self._accumulated = state["accumulated"].clone() if "accumulated" in state else None
        if self.threshold is not None:
            self.threshold.load(state["threshold"])
