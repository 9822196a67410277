"""The directories in which a site's checkpoints lie: their names, their facts, and the digests of their files."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from weightgrad.core.layout import Layout
from weightgrad.runtime.checkpoints import distributed_checkpoint

_PREFIX = "checkpoint-"
_FACTS = "facts.json"
_DIGESTS = "digests-"
_PIECE_BYTES = 8 << 20


def path_of(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return directory / f"{_PREFIX}{step:012d}"


def all_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in a directory, the newest last."""
    with contextlib.suppress(OSError):
        return sorted(path for path in directory.iterdir() if path.name.startswith(_PREFIX) and path.is_dir())
    return []


# -- facts ---------------------------------------------------------------------------------------


def write_facts(checkpoint: Path, facts: dict[str, Any]) -> None:
    """Write down of which run and step a checkpoint is."""
    (checkpoint / _FACTS).write_text(json.dumps(facts))


def has_facts(checkpoint: Path) -> bool:
    """Whether `write_facts` has written them, as far as this rank sees."""
    return (checkpoint / _FACTS).exists()


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """What `write_facts` has written.

    Raises:
        OSError, ValueError: there is none, or something else.
    """
    found: dict[str, Any] = json.loads((checkpoint / _FACTS).read_text())
    return found


def newest_version(directory: Path | None) -> int:
    """The version of the global model in the newest checkpoint; -1 without one."""
    found = None if directory is None else _newest_fact(directory, "version")
    return -1 if found is None else found


def newest_step(directory: Path) -> int | None:
    """The step of the newest checkpoint; None without one."""
    return _newest_fact(directory, "step")


def _newest_fact(directory: Path, name: str) -> int | None:
    for path in reversed(all_checkpoints(directory)):
        with contextlib.suppress(OSError, ValueError, KeyError):
            return int(read_facts(path)[name])
    return None


def newest_global_model(directory: Path) -> tuple[int, Tensor] | None:
    """The version of the global model in the newest checkpoint and its weights, read by one process.

    Where sites share gradients, the global model is the trained one.

    Args:
        directory: the directory of the site's checkpoints.

    Returns:
        Version and flat vector; None if there is no checkpoint.
    """
    for path in all_checkpoints(directory)[-1:]:
        facts, metadata = read_facts(path), distributed_checkpoint.metadata(path)
        layout = Layout.of_shapes((name, tuple(shape)) for name, shape in facts["layout"])
        vector, whole = torch.empty(layout.numel, dtype=torch.float32), "vector.global_model"
        wanted = {f"model.{slot.name}": slot.of(vector) for slot in layout.slots}
        distributed_checkpoint.restore({whole: vector} if whole in metadata else wanted, path, None)
        return int(facts["version"]), vector
    return None


# -- digests -------------------------------------------------------------------------------------


def write_digests(checkpoint: Path, rank: int) -> None:
    """Write down the digests of the files of a rank: torch.distributed.checkpoint notices no damage."""
    own = [path for path in checkpoint.iterdir() if path.name.startswith(f"__{rank}_")]
    own += [checkpoint / ".metadata", checkpoint / _FACTS] if rank == 0 else []
    found = {path.name: file_digest(path) for path in own}
    (checkpoint / f"{_DIGESTS}{rank}.json").write_text(json.dumps(found))


def damaged_file(checkpoint: Path, rank: int) -> str | None:
    """The name of a file that is not as a rank has written it; None if all are.

    Raises:
        OSError, ValueError, TypeError, AttributeError: the digests cannot be read.
    """
    digests = json.loads((checkpoint / f"{_DIGESTS}{rank}.json").read_text())
    return next((name for name in digests if file_digest(checkpoint / name) != digests[name]), None)


def file_digest(path: Path) -> str:
    """The digest of a plain file's bytes; a link may lead anywhere, and who opens a FIFO may wait for ever.

    Raises:
        OSError: it cannot be read, or is something else.
    """
    digest = xxhash.xxh3_64()
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path.name} is not a plain file")
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
