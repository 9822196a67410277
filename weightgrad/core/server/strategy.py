"""The global server's parts of a strategy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weightgrad.codecs import Codec
from weightgrad.core.controller.gradient_controller import Gradients
from weightgrad.core.controller.update_controller import Auto
from weightgrad.core.parts.aggregators import Aggregator
from weightgrad.core.parts.consistency import Consistency
from weightgrad.core.parts.selectors import Selector
from weightgrad.core.server.shard import ServerShardPlan

LIVES = 4
"""A site that was restarted without its state may push so often for as many rounds as it may be ahead."""


@dataclass(frozen=True, kw_only=True)
class ServerStrategy:
    """The server's parts of a strategy."""

    aggregator: Aggregator
    consistency: Consistency
    down: Codec
    down_selector: Selector
    per_tensor: bool
    keep_loss: bool
    flush: Codec | None
    calls: bool  # the server requests a push of every site when a round opens
    t_local: float | None = None
    t_global: float | None = None
    adapts: bool = False  # t_global is the least timeout, and grows with the length of rounds
    auto: Auto | Gradients | None = None  # the server sets the sync schedule
    relay: int = 0  # with so many sites or fewer, pushes are relayed as they came
    rounds_ahead: int = 1  # a site may push for so many rounds after the last closed one
    steps_a_round: float = math.inf  # a site does at most so many steps from one round to the next

    @property
    def for_shard(self) -> ServerShardPlan:
        """The parts that work on what a process serves."""
        return ServerShardPlan(
            aggregator=self.aggregator,
            down=self.down,
            down_selector=self.down_selector,
            per_tensor=self.per_tensor,
            keep_loss=self.keep_loss,
            flush=self.flush,
            compensation=self.consistency.compensation,
            most_waiting=self.most_waiting,
        )

    @property
    def most_waiting(self) -> int:
        """How many pushes of a site may wait for their rounds to close, those of its former lives too."""
        return LIVES * (2 if self.consistency.alone else self.rounds_ahead)
