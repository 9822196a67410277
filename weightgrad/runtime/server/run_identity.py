"""What makes two runs the same run, so that a state is only continued by the run that wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightgrad.errors import CheckpointError
from weightgrad.runtime.run_config import RunConfig
from weightgrad.runtime.server.process import facts_text
from weightgrad.runtime.strategy_difference import strategy_difference


@dataclass(frozen=True)
class RunIdentity:
    """The facts that a snapshot and the run that continues it must have in common.

    Attributes:
        run_config: what is trained.
        processes: how many processes the server has.
    """

    run_config: RunConfig
    processes: int

    def facts(self, numel: int) -> dict[str, Any]:
        """The facts, for a model of so many parameters."""
        return {
            "strategy": self.run_config.fit(numel).to_dict(),
            "seed": self.run_config.seed,
            "sites": list(self.run_config.sites),
            "processes": self.processes,
        }

    def check(self, found: dict[str, Any], numel: int, state: Path | None) -> None:
        """Compare the facts of a snapshot.

        Args:
            found: the facts of the snapshot.
            numel: the parameters of its model.
            state: where it was found, for the error.

        Raises:
            CheckpointError: it is of another run.
        """
        for name, value in self.facts(numel).items():
            if facts_text(found[name]) != facts_text(value):
                what = f"{name} is {found[name]}, here it is {value}"
                if name == "strategy":
                    what = f"strategy is another, {strategy_difference(value, found[name]) or 'the overlap'}"
                raise CheckpointError(
                    f"{state} is of another run: its {what}; give --state another directory, or the recipe of that run"
                )
