"""The checkpoint of a site, sharded: every rank writes what it has, by torch.distributed.checkpoint.

A checkpoint is a directory checkpoint-000000000050 of all ranks together. A site can come back with another number of
ranks, or sharded in another way: vectors of the index space, parameters and optimizer states are loaded by whoever
holds them now. Files are written while the training waits, from the memory in which they are, so nothing is copied.
They are made durable beside the next steps, and the directory gets its name when they are. The two newest are kept.
Every rank writes digests of its files, which are compared when a checkpoint is read.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from weightgrad.core.site.coordinator import SiteCoordinator
from weightgrad.errors import CheckpointError
from weightgrad.runtime.checkpoints import distributed_checkpoint
from weightgrad.runtime.checkpoints.checkpoint_files import (
    all_checkpoints,
    damaged_file,
    has_facts,
    path_of,
    read_facts,
    write_digests,
    write_facts,
)
from weightgrad.runtime.checkpoints.durable_files import BackgroundWriter, cannot_write, sync_directory
from weightgrad.runtime.checkpoints.named_state import NamedState
from weightgrad.runtime.process_group import SiteGroup

log = logging.getLogger("weightgrad")

_KEPT = 2


class SiteCheckpoint:
    """Writes and reads the checkpoints of a site, together with all of its ranks.

    Args:
        directory: where.
        site: the name of the site.
        group: the ranks of the site.
        state: what this rank has to keep, by name.

    Attributes:
        state: the same.
    """

    def __init__(self, directory: Path, site: str, group: SiteGroup, state: NamedState) -> None:
        self._directory, self._site, self._group, self.state = directory, site, group, state
        self.writer = BackgroundWriter()

    # -- writing ---------------------------------------------------------------------------------

    def write(self, steps: int, coordinator: SiteCoordinator | None) -> None:
        """Write a checkpoint; called on every rank.

        Args:
            steps: the steps done.
            coordinator: the coordinator of the site, on rank 0.

        Raises:
            CheckpointError: it, or the one before, could not be written.
        """
        self.wait()
        target = path_of(self._directory, steps)
        temporary = self._directory / f".{target.name}"
        state = self.state.collect(coordinator)
        try:
            if self._group.first:
                self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(mode=0o700)
                version = coordinator.version if coordinator else -1
                write_facts(temporary, {**self.state.identity(), "step": steps, "version": version})
            self._group.barrier()
            if not has_facts(temporary):
                raise CheckpointError(
                    f"rank {self._group.rank} of {self._site} does not see {temporary}, which rank 0 has made; give "
                    "`state` a directory that all ranks of the site share"
                )
            distributed_checkpoint.save(state, temporary, self._group)
            write_digests(temporary, self._group.rank)
            self._group.barrier()
        except (OSError, RuntimeError) as error:
            raise cannot_write(target, error, sum(_size(value) for value in state.values())) from error
        self.writer.begin(lambda: self._finish(temporary, target))

    def _finish(self, temporary: Path, target: Path) -> None:
        """Make the files durable and give the directory its name, on rank 0 of every machine."""
        try:
            for path in temporary.iterdir():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            sync_directory(temporary)
        except FileNotFoundError:
            return  # another rank was sooner: it has synced all of them
        except OSError as error:
            raise cannot_write(target, error, 0) from error
        if not self._group.first:
            return
        try:
            shutil.rmtree(target, ignore_errors=True)
            os.replace(temporary, target)
            sync_directory(self._directory)
        except OSError as error:
            raise cannot_write(target, error, 0) from error
        for old in all_checkpoints(self._directory)[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    def look(self) -> None:
        """Raise what went wrong with the last checkpoint, if that is known."""
        self.writer.look()

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk, here and on the other ranks."""
        self.writer.wait()
        self._group.barrier()

    # -- reading ---------------------------------------------------------------------------------

    def restore(self, coordinator: SiteCoordinator | None) -> int | None:
        """Load the newest checkpoint; called on every rank.

        Args:
            coordinator: the coordinator of the site, on rank 0.

        Returns:
            Its step; None if there is no checkpoint.

        Raises:
            CheckpointError: every checkpoint is damaged, or it is of another run.
        """
        own = "\n".join(path.name for path in all_checkpoints(self._directory)) if self._group.first else ""
        names = self._group.bytes_from_first(own.encode()).decode().splitlines()
        if not names:
            return None
        for name in reversed(names):
            damaged, step = 0, 0
            try:
                facts = self._verify(self._directory / name)
                self.state.check(facts, self._directory)
                step = int(facts["step"])
                self._load(self._directory / name, coordinator, int(facts["ranks"]))
            except CheckpointError:
                raise
            except Exception as error:  # whatever a damaged file does to the reader
                log.error("%s: %s is damaged (%s); going on with the checkpoint before it", self._site, name, error)
                damaged = 1
            if self._group.maximum(damaged):  # on any rank: all go on from the same step
                continue
            if self._group.first:
                log.info("%s goes on from step %d", self._site, step)
            return step
        raise CheckpointError(
            f"no checkpoint in {self._directory} can be read. Restore one from a backup, or remove the directory to "
            "start from the beginning"
        )

    def _verify(self, directory: Path) -> dict[str, Any]:
        """The facts of a checkpoint; every rank compares the digests of some files, and all hear what was found.

        Raises:
            ValueError: a file is not as it was written.
        """
        damaged = ""
        try:
            facts = read_facts(directory)
            for rank in range(self._group.rank, int(facts["ranks"]), self._group.size):
                damaged = damaged_file(directory, rank) or damaged
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            damaged = str(error)
        if self._group.maximum(bool(damaged)):
            raise ValueError(f"not as it was written: {damaged or 'a file that another rank has looked at'}")
        return facts

    def _load(self, directory: Path, coordinator: SiteCoordinator | None, ranks: int) -> None:
        wanted = self.state.wanted(distributed_checkpoint.metadata(directory), ranks)
        distributed_checkpoint.restore(wanted, directory, self._group)
        self.state.put(wanted, coordinator, ranks)


def _size(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else 0
