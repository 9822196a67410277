"""Snapshots of a process's state on disk, written in parts while the process works.

A snapshot is a directory NAME-000000000012 with `part-00000.safetensors`, ... and `index.json`, which says what is
where and has a digest of each part. Large tensors are cut over several parts, so writing needs memory for one part. The
directory gets its name when all of it is on the disk. The two newest are kept: if the newest is damaged, the one before
it is read, and the reader says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from weightgrad.errors import CheckpointError
from weightgrad.runtime.checkpoints.durable_files import cannot_write, sync_directory

PART_BYTES = 8 << 20
_KEPT = 2
_INDEX = "index.json"


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that was read.

    Attributes:
        number: its number.
        tensors: the tensors by name.
        facts: what was written beside the tensors.
        damaged: what is wrong with newer snapshots, one line each.
    """

    number: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    damaged: tuple[str, ...] = ()


def write(directory: Path, name: str, number: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write a snapshot and remove the one before last. It is on the disk when this returns.

    The tensors may not change meanwhile, but they are not copied as a whole.

    Args:
        directory: where; made if it is not there.
        name: which of the snapshots in this directory.
        number: the number of the snapshot; larger is newer.
        tensors: what to write.
        facts: what else to write, as JSON.

    Raises:
        CheckpointError: it could not be written; the snapshots before it are still there.
    """
    target = directory / f"{name}-{number:012d}"
    temporary = directory / f".{target.name}.{os.getpid()}"
    size = sum(tensor.nbytes for tensor in tensors.values())
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for partial in directory.glob(f".{name}-*"):
            shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed while it wrote
        temporary.mkdir(mode=0o700)
        _write_parts(temporary, tensors, facts)
        if target.exists():
            shutil.rmtree(target)
        os.replace(temporary, target)
        sync_directory(directory)
    except (OSError, SafetensorError) as error:
        failure = cannot_write(target, error, size)
        shutil.rmtree(temporary, ignore_errors=True)
        raise failure from error
    for old in _all(directory, name)[:-_KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def newest(directory: Path, name: str) -> Snapshot | None:
    """Read the newest snapshot that is not damaged.

    Returns:
        The snapshot; None if there is none at all.

    Raises:
        CheckpointError: there are snapshots, and all of them are damaged.
    """
    damaged: list[str] = []
    for path in reversed(_all(directory, name)):
        try:
            tensors, facts = _read(path)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        return Snapshot(int(path.name.rsplit("-", 1)[1]), tensors, facts, tuple(damaged))
    if damaged:
        raise CheckpointError(
            f"no snapshot in {directory} can be read: {'; '.join(damaged)}. Restore one from a backup, or remove the "
            "directory to start from the beginning"
        )
    return None


def oldest_kept(directory: Path, name: str, fact: str) -> int | None:
    """The value of a fact in the oldest snapshot that is kept; None if there is none."""
    for path in _all(directory, name):
        with contextlib.suppress(OSError, ValueError, KeyError):
            return int(json.loads((path / _INDEX).read_text())["facts"][fact])
    return None


def _all(directory: Path, name: str) -> list[Path]:
    pattern = re.compile(re.escape(name) + r"-\d{12}")
    return sorted(path for path in directory.glob(f"{name}-*") if pattern.fullmatch(path.name) and path.is_dir())


def _write_parts(directory: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    parts: list[str] = []
    places: list[tuple[int, str, int, int]] = []  # part, tensor, start and stop of the elements
    for number, group in enumerate(_grouped(tensors)):
        plain = {
            f"{name}@{start}": tensors[name].detach().reshape(-1)[start:stop].cpu().contiguous()
            for name, start, stop in group
        }
        path = directory / f"part-{number:05d}.safetensors"
        save_file(plain, str(path))
        _sync_file(path)
        parts.append(_digest(plain))
        places += [(number, *one) for one in group]
    about = {name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()}
    index = {"facts": dict(facts), "tensors": about, "parts": parts, "places": places}
    text = json.dumps(index, sort_keys=True)
    path = directory / _INDEX
    path.write_text(json.dumps({**index, "digest": xxhash.xxh3_64_hexdigest(text.encode())}, sort_keys=True))
    _sync_file(path)
    sync_directory(directory)


def _grouped(tensors: Mapping[str, Tensor]) -> Iterator[list[tuple[str, int, int]]]:
    """Pieces of tensors in groups of about PART_BYTES."""
    group: list[tuple[str, int, int]] = []
    room = PART_BYTES
    for name, tensor in tensors.items():
        start = 0
        while True:
            stop = min(tensor.numel(), start + max(1, room // tensor.element_size()))
            group.append((name, start, stop))
            room -= (stop - start) * tensor.element_size()
            if room < 8:
                yield group
                group, room = [], PART_BYTES
            start = stop
            if start >= tensor.numel():
                break
    if group:
        yield group


def _read(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        index = json.loads((directory / _INDEX).read_text())
        said = index.pop("digest")
        if xxhash.xxh3_64_hexdigest(json.dumps(index, sort_keys=True).encode()) != said:
            raise CheckpointError(f"{directory.name} is damaged: its index is not the one that was written")
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in index["tensors"].items()
        }
        for number, digest in enumerate(index["parts"]):
            path = directory / f"part-{number:05d}.safetensors"
            with safe_open(str(path), framework="pt") as file:
                part = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            if _digest(part) != digest:
                raise CheckpointError(f"{directory.name}/{path.name} is damaged: its bytes are not those written")
            for _, name, start, stop in (place for place in index["places"] if place[0] == number):
                tensors[name].view(-1)[start:stop] = part[f"{name}@{start}"]
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{directory.name} is damaged or not a snapshot ({error})") from error
    return tensors, index["facts"]


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = xxhash.xxh3_64()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype}\n".encode())
        if tensors[name].numel():
            digest.update(tensors[name].flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
