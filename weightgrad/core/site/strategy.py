"""A site's parts of a strategy."""

from __future__ import annotations

from dataclasses import dataclass

from weightgrad.codecs import Codec
from weightgrad.core.parts.consistency import Consistency
from weightgrad.core.parts.resume import Resume
from weightgrad.core.parts.selectors import Selector
from weightgrad.core.parts.triggers import Significance, Trigger
from weightgrad.core.site.shard import ShardPlan
from weightgrad.wire.sync_schedule import SyncSchedule


@dataclass(frozen=True, kw_only=True)
class SiteStrategy:
    """A site's parts of a strategy."""

    shares_gradients: bool
    trigger: Trigger
    selector: Selector
    up: Codec
    per_tensor: bool
    keep_loss: bool
    consistency: Consistency
    overlap: int
    resume: Resume
    flush: Codec | None
    flush_local: bool = False  # of the residual only what the local model contains is sent at the end
    t: float | None = None  # seconds without a message after which the site waits for the oldest result
    t_adapts: bool = False  # whether `t` is only the least, and grows with the length of rounds
    schedule: SyncSchedule | None = None  # the first sync schedule, where the server sets it

    @property
    def for_shard(self) -> ShardPlan:
        """The parts that work on what a rank holds."""
        return ShardPlan(
            selector=self.selector,
            up=self.up,
            per_tensor=self.per_tensor,
            keep_loss=self.keep_loss,
            resume=self.resume,
            flush=self.flush,
            flush_local=self.flush_local,
            measures=isinstance(self.trigger, Significance),
        )
