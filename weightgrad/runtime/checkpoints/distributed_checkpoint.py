"""torch.distributed.checkpoint, as a site uses it: alone or with all of its ranks, and with plain errors.

Its modules take long to import, and only a site with checkpoints needs them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weightgrad.runtime.process_group import SiteGroup


def save(state: dict[str, Any], directory: Path, group: SiteGroup) -> None:
    """Write what this rank has; called on every rank. The files are not synced."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_state

    writer = FileSystemWriter(directory, sync_files=False, overwrite=True)
    with _plain_errors():
        save_state(state, storage_writer=writer, process_group=group.group, no_dist=group.size == 1)


def restore(state: dict[str, Any], directory: Path, group: SiteGroup | None) -> None:
    """Read into the tensors of `state`; called on every rank, or by one process without a group."""
    from torch.distributed.checkpoint.state_dict_loader import load

    from weightgrad.runtime.checkpoints.checkpoint_reader import CheckpointReader

    reader = CheckpointReader(directory)
    with _plain_errors():
        if group is None or group.size == 1:
            load(state, storage_reader=reader, no_dist=True)
        else:
            load(state, storage_reader=reader, process_group=group.group)


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise what went wrong on a rank, on all ranks, and not torch's collection of it, which is no `Exception`.

    A site of one rank is no mistake, about which torch would warn.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            yield
        except CheckpointException as error:
            failure, _ = error.failures[min(error.failures)]
            raise failure from error


def metadata(directory: Path) -> Mapping[str, Any]:
    """What a checkpoint has: size and dtype of each tensor, by name."""
    from weightgrad.runtime.checkpoints.checkpoint_reader import CheckpointReader

    found: Mapping[str, Any] = CheckpointReader(directory).read_metadata().state_dict_metadata
    return found
