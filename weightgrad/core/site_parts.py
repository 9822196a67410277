"""What a site holds: the parts of its state, and the checkpoint that puts them together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from weightgrad.core.global_model import GlobalModel
from weightgrad.core.in_flight import InFlightPushes
from weightgrad.core.model_placement import ModelPlacement
from weightgrad.core.residual import Residual
from weightgrad.core.site_progress import SiteProgress
from weightgrad.core.site_schedule import SiteSchedule
from weightgrad.core.step_update import StepUpdateTracker
from weightgrad.core.vector_checks import with_prefix, without_prefix
from weightgrad.wire.messages import RoundResult


@dataclass(frozen=True, kw_only=True)
class SiteParts:
    """The parts of one site's state, which `SiteState`, `PushBuilder` and `SiteMembership` work on together.

    Memory, in vectors of the model's size: `global_model` (with its optimizer's state where gradients are shared),
    `residual`, `placement` (local model, anchor, fresh update), and `steps` where the strategy measures significance.
    `in_flight` and `inbox` hold encoded messages.
    """

    global_model: GlobalModel
    residual: Residual
    in_flight: InFlightPushes
    placement: ModelPlacement
    steps: StepUpdateTracker
    schedule: SiteSchedule
    progress: SiteProgress = field(default_factory=SiteProgress)
    inbox: dict[int, RoundResult] = field(default_factory=dict)  # results not applied yet, by version

    def state(self) -> dict[str, Tensor]:
        """Copies of everything but the inbox, as named tensors for a checkpoint."""
        model = self.global_model
        return {
            **with_prefix("global_model.", model.snapshot()),
            **with_prefix("residual.", self.residual.state()),
            **with_prefix("in_flight.", self.in_flight.state()),
            **self.placement.state(),
            **self.steps.state(),
            **self.schedule.state(),
            "clock": self.progress.to_tensor(version=model.version, global_step=model.step),
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned, with an empty inbox; other names in `state` are ignored."""
        version, global_step = self.progress.load_tensor(state["clock"])
        self.global_model.restore(without_prefix("global_model.", state), version, global_step)
        self.residual.load(without_prefix("residual.", state))
        self.in_flight.load(without_prefix("in_flight.", state))
        self.placement.load(state)
        self.steps.load(state)
        self.schedule.load(state)
        self.inbox.clear()
