"""Checkpoints on disk: the state of a process, and the log of the last round results.

A checkpoint is named tensors and a few facts, written whole or not at all, and never pickled. A generation is one
safetensors file, NAME-000000000012.safetensors. Its header carries the facts as JSON, and a digest of the facts
and of every tensor's bytes. The two newest generations are kept: if the newest is damaged, the one before it is
read, and the reader says so.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from weightgrad.errors import CheckpointError, WeightGradError
from weightgrad.wire.message_bytes import pack, unpack
from weightgrad.wire.messages import RoundResult

_KEPT = 2
_RESULT_SUFFIX = ".result"


@dataclass(frozen=True)
class Checkpoint:
    """A generation that was read.

    Attributes:
        number: the number of the generation.
        tensors: the tensors by name.
        facts: what was written beside the tensors.
        damaged: what is wrong with newer generations, one line each.
    """

    number: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    damaged: tuple[str, ...] = ()


def write(directory: Path, name: str, number: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Path:
    """Write a generation and remove the one before last. The generation is on the disk when this returns.

    Args:
        directory: where; made if it is not there.
        name: which of the checkpoints in this directory.
        number: the number of the generation; larger is newer.
        tensors: what to write.
        facts: what else to write, as JSON.

    Returns:
        The path of the file.

    Raises:
        CheckpointError: it could not be written; the generations before it are still there.
    """
    target = directory / f"{name}-{number:012d}.safetensors"
    temporary = directory / f".{target.name}.{os.getpid()}"
    plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    text = json.dumps(facts, sort_keys=True)
    metadata = {"facts": text, "digest": _digest(plain, text)}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for partial in directory.glob(f".{name}-*.safetensors.*"):
            partial.unlink(missing_ok=True)  # of a process that was killed while it wrote
        save_file(plain, str(temporary), metadata=metadata)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _sync(directory)
    except (OSError, SafetensorError) as error:
        failure = cannot_write(target, error, sum(tensor.nbytes for tensor in plain.values()))
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise failure from error
    for old in generations(directory, name)[:-_KEPT]:
        old.unlink(missing_ok=True)
    return target


def cannot_write(target: Path, error: Exception, size: int) -> CheckpointError:
    """Return the error for a file of `size` bytes that could not be written; it says what to do.

    safetensors reports a failed write without its errno, so the free space of the disk is compared with `size`.
    """
    if getattr(error, "errno", None) == errno.ENOSPC or (
        isinstance(error, SafetensorError) and _is_full(target.parent, size)
    ):
        why = "the disk is full; the previous state is kept. Free some space and run the same command again"
    else:
        why = f"{error}; the previous state is kept. Correct this and run the same command again"
    return CheckpointError(f"cannot write {target}: {why}")


def newest(directory: Path, name: str) -> Checkpoint | None:
    """Read the newest generation that is not damaged.

    Returns:
        The generation; None if there is none at all.

    Raises:
        CheckpointError: there are generations, and all of them are damaged.
    """
    damaged: list[str] = []
    for path in reversed(generations(directory, name)):
        try:
            number, tensors, facts = _read(path)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        return Checkpoint(number, tensors, facts, tuple(damaged))
    if damaged:
        raise _all_damaged(directory, damaged)
    return None


def readable(directory: Path, name: str) -> tuple[list[int], list[str]]:
    """Return the numbers of the generations that can be read, and what is wrong with the others.

    Raises:
        CheckpointError: there are generations, and all of them are damaged.
    """
    numbers: list[int] = []
    damaged: list[str] = []
    for path in generations(directory, name):
        try:
            numbers.append(_read(path)[0])
        except CheckpointError as error:
            damaged.append(str(error))
    if damaged and not numbers:
        raise _all_damaged(directory, damaged)
    return numbers, damaged


def exact(directory: Path, name: str, number: int) -> Checkpoint:
    """Read the generation of this number; CheckpointError if it cannot be read."""
    return Checkpoint(*_read(directory / f"{name}-{number:012d}.safetensors"))


def generations(directory: Path, name: str) -> list[Path]:
    """Return the files of all generations of this name, oldest first."""
    pattern = re.compile(re.escape(name) + r"-\d{12}\.safetensors")
    return sorted(path for path in directory.glob(f"{name}-*.safetensors") if pattern.fullmatch(path.name))


class BackgroundWriter:
    """Writes checkpoints in a thread of its own while training goes on.

    It does one piece of work at a time. A process that ends waits for the work to be done.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._work: Future[object] | None = None

    def begin(self, work: Callable[[], object]) -> None:
        """Wait for the work before, then start this work and return. Raises what went wrong before."""
        self.wait()
        self._work = self._thread.submit(work)

    def look(self) -> None:
        """Raise what went wrong, if the work has ended. Never waits."""
        if self._work is not None and self._work.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the work is done. Raises what went wrong."""
        work, self._work = self._work, None
        if work is not None:
            work.result()


class DiskResultLog:
    """The last round results on disk: a site that was away for hours catches up from them, even after a restart.

    There is one file for each result. The files are not synced one by one: if a power failure damages one, the
    site receives the whole global model instead.

    Args:
        directory: where the files are; made if it is not there.
        cap: how many bytes of results are kept.
        least: how many results are kept whatever their size.
    """

    def __init__(self, directory: Path, cap: int, least: int = 4) -> None:
        self._directory, self._cap, self._least = directory, cap, least
        directory.mkdir(parents=True, exist_ok=True)
        self._sizes = {
            int(p.stem): p.stat().st_size for p in sorted(directory.glob(f"*{_RESULT_SUFFIX}")) if p.stem.isdigit()
        }

    def append(self, result: RoundResult) -> None:
        """Write the newest result and remove the oldest ones beyond the cap."""
        data = pack(result)
        temporary = self._directory / f".{result.version}"
        try:
            temporary.write_bytes(data)
            os.replace(temporary, self._path(result.version))
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise cannot_write(self._path(result.version), error, len(data)) from error
        self._sizes[result.version] = len(data)
        while len(self._sizes) > self._least and sum(self._sizes.values()) > self._cap:
            self._remove(min(self._sizes))

    def since(self, version: int, now: int) -> tuple[RoundResult, ...] | None:
        """Read the results after `version` up to `now`; None if one of them is missing or damaged."""
        found = []
        for number in range(version + 1, now + 1):
            try:
                result = unpack(self._path(number).read_bytes())
            except (OSError, WeightGradError):
                return None
            if not isinstance(result, RoundResult) or result.version != number:
                return None
            found.append(result)
        return tuple(found)

    def restart(self, version: int) -> None:
        """Remove results that are newer than the restored `version`."""
        for number in [number for number in self._sizes if number > version]:
            self._remove(number)

    def _remove(self, number: int) -> None:
        del self._sizes[number]
        self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:012d}{_RESULT_SUFFIX}"


def _read(path: Path) -> tuple[int, dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        facts = json.loads(metadata["facts"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path.name} is damaged or not a checkpoint ({error})") from error
    if _digest(tensors, metadata["facts"]) != metadata.get("digest"):
        raise CheckpointError(f"{path.name} is damaged: its bytes are not the ones that were written")
    return int(path.stem.rsplit("-", 1)[1]), tensors, facts


def _all_damaged(directory: Path, damaged: list[str]) -> CheckpointError:
    return CheckpointError(
        f"no checkpoint in {directory} can be read: {'; '.join(damaged)}. Restore one from a backup, or remove "
        "the directory to start from the beginning"
    )


def _digest(tensors: Mapping[str, Tensor], facts: str) -> str:
    digest = xxhash.xxh3_64(f"{facts}\n".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        if tensor.numel():
            digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_full(directory: Path, size: int) -> bool:
    try:
        return shutil.disk_usage(directory).free < size
    except OSError:
        return False
