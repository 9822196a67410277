"""A site's state on disk: each rank writes its own part, and a step counts when all have.

Steps go on while the disk is written to. No rank begins a step's part before all have ended that of the step before,
and each keeps its last two, so there is always a step that every rank has.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightgrad.errors import SavedStateError
from weightgrad.runtime import saved
from weightgrad.runtime.admission import row_difference
from weightgrad.runtime.bridge import first_difference
from weightgrad.runtime.crew import Crew
from weightgrad.runtime.lan import Lan
from weightgrad.runtime.saved_beside import Beside
from weightgrad.site.layout import Layout
from weightgrad.wan.site_end import SiteEnd
from weightgrad.wan.strategies import Strategy

log = logging.getLogger("weightgrad")


@dataclass(frozen=True)
class RunKeys:
    """What makes a saved state one of this run."""

    strategy: Strategy
    seed: int
    layout: Layout

    def facts(self) -> dict[str, Any]:
        """To be saved."""
        layout = [[slot.name, list(slot.shape)] for slot in self.layout.slots]
        return {"row": self.strategy.row(), "seed": self.seed, "layout": layout}

    def difference(self, facts: dict[str, Any]) -> str | None:
        """What is another in a saved state."""
        if (found := first_difference(self.layout, facts["layout"])) is not None:
            return f"model is another, {found}"
        if facts["seed"] != self.seed:
            return f"seed is {facts['seed']}, now it is {self.seed}"
        if facts["row"] != (row := self.strategy.row()):
            return f"strategy is another, {row_difference(row, facts['row']) or 'the overlap'}"
        return None


@dataclass(frozen=True, eq=False)
class SiteKeeper:
    """One a rank; `end` is the local server's."""

    directory: Path
    site: str
    lan: Lan
    keys: RunKeys
    crew: Crew
    end: SiteEnd | None
    buffers: Sequence[Tensor]
    beside: Beside = field(default_factory=Beside)

    def write(self, steps: int) -> None:
        """All ranks, each its part, as it is now; when this returns it is on its way to the disk."""
        self.beside.wait()
        self.lan.barrier()
        self.write_own(steps)

    def write_own(self, steps: int) -> None:
        """This rank's part alone."""
        tensors = {f"crew.{name}": tensor for name, tensor in self.crew.state().items()}
        if self.end is not None:
            tensors |= {f"end.{name}": tensor for name, tensor in self.end.state().items()}
        tensors |= {f"buffer.{place}": buffer.clone() for place, buffer in enumerate(self.buffers)}
        version = self.end.base.version if self.end is not None else -1
        facts = {"version": version, "step": steps, **self.keys.facts()}
        self.beside.begin(lambda: saved.write(self.directory, self._name, steps, tensors, facts))

    def restore(self) -> int | None:
        """Take back the newest step that every rank has written, and say which; None: there is none."""
        own, damaged = saved.readable(self.directory, self._name)
        for line in damaged:
            log.error("%s: %s; going on with the checkpoint before it", self.site, line)
        blobs = self.lan.exchange(torch.tensor(own, dtype=torch.int64).view(torch.uint8))
        common = set.intersection(*(set(blob.clone().view(torch.int64).tolist()) for blob in blobs))
        if not common:
            return None
        found = saved.exact(self.directory, self._name, max(common))
        if (what := self.keys.difference(found.facts)) is not None:
            raise SavedStateError(
                f"{self.directory} is of another run: its {what}; give state another directory, or remove it"
            )
        if self.end is not None:
            self.end.load(_under("end.", found.tensors))
        self.crew.load(_under("crew.", found.tensors))
        for place, buffer in enumerate(self.buffers):
            buffer.copy_(found.tensors[f"buffer.{place}"])
        steps = int(found.facts["step"])
        if self.lan.first:
            log.info("%s goes on from step %d", self.site, steps)
        return steps

    @property
    def _name(self) -> str:
        return f"rank-{self.lan.rank}"


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
