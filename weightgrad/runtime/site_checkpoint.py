"""The checkpoint of a site: each rank writes its own file, and a checkpoint counts when every rank has written it.

Training goes on while the files are written. No rank begins a checkpoint before all ranks have finished the one before,
and each rank keeps its last two, so there is always a step of which every rank has a file.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightgrad.core.layout import Layout
from weightgrad.core.site_state import SiteState
from weightgrad.core.strategies import Strategy
from weightgrad.errors import CheckpointError
from weightgrad.runtime import checkpoint
from weightgrad.runtime.admission import strategy_difference
from weightgrad.runtime.checkpoint import BackgroundWriter
from weightgrad.runtime.flat_parameters import first_difference
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.runtime.rank_step import RankStep

log = logging.getLogger("weightgrad")


@dataclass(frozen=True)
class RunIdentity:
    """What a checkpoint must have in common with the run that loads it."""

    strategy: Strategy
    seed: int
    layout: Layout

    def facts(self) -> dict[str, Any]:
        """The identity as plain values, for the checkpoint."""
        layout = [[slot.name, list(slot.shape)] for slot in self.layout.slots]
        return {"strategy": self.strategy.to_dict(), "seed": self.seed, "layout": layout}

    def difference(self, facts: dict[str, Any]) -> str | None:
        """What differs in a checkpoint with these facts, in words; None if nothing does."""
        if (found := first_difference(self.layout, facts["layout"])) is not None:
            return f"model is another, {found}"
        if facts["seed"] != self.seed:
            return f"seed is {facts['seed']}, now it is {self.seed}"
        if facts["strategy"] != (strategy := self.strategy.to_dict()):
            return f"strategy is another, {strategy_difference(strategy, facts['strategy']) or 'the overlap'}"
        return None


@dataclass(frozen=True, eq=False)
class SiteCheckpoint:
    """Writes and reads the checkpoints of one rank. Only rank 0 has a `state`."""

    directory: Path
    site: str
    group: SiteGroup
    identity: RunIdentity
    rank_step: RankStep
    state: SiteState | None
    buffers: Sequence[Tensor]
    writer: BackgroundWriter = field(default_factory=BackgroundWriter)

    def write(self, steps: int) -> None:
        """Write a checkpoint; called on every rank. It is copied now and written to disk in the background."""
        self.writer.wait()
        self.group.barrier()
        self.write_own(steps)

    def write_own(self, steps: int) -> None:
        """Write the file of this rank alone, in the background."""
        tensors = {f"rank_step.{name}": tensor for name, tensor in self.rank_step.state().items()}
        if self.state is not None:
            tensors |= {f"state.{name}": tensor for name, tensor in self.state.state().items()}
        tensors |= {f"buffer.{place}": buffer.clone() for place, buffer in enumerate(self.buffers)}
        version = self.state.global_model.version if self.state is not None else -1
        facts = {"version": version, "step": steps, **self.identity.facts()}
        self.writer.begin(lambda: checkpoint.write(self.directory, self._name, steps, tensors, facts))

    def restore(self) -> int | None:
        """Load the newest checkpoint that every rank has; called on every rank.

        Returns:
            Its step; None if there is no checkpoint.

        Raises:
            CheckpointError: The checkpoint is of another run.
        """
        own, damaged = checkpoint.readable(self.directory, self._name)
        for line in damaged:
            log.error("%s: %s; going on with the checkpoint before it", self.site, line)
        blobs = self.group.exchange(torch.tensor(own, dtype=torch.int64).view(torch.uint8))
        common = set.intersection(*(set(blob.clone().view(torch.int64).tolist()) for blob in blobs))
        if not common:
            return None
        found = checkpoint.exact(self.directory, self._name, max(common))
        if (what := self.identity.difference(found.facts)) is not None:
            raise CheckpointError(
                f"{self.directory} is of another run: its {what}; give state another directory, or remove it"
            )
        if self.state is not None:
            self.state.load(_under("state.", found.tensors))
        self.rank_step.load(_under("rank_step.", found.tensors))
        for place, buffer in enumerate(self.buffers):
            buffer.copy_(found.tensors[f"buffer.{place}"])
        steps = int(found.facts["step"])
        if self.group.first:
            log.info("%s goes on from step %d", self.site, steps)
        return steps

    @property
    def _name(self) -> str:
        return f"rank-{self.group.rank}"


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
