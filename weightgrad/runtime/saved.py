"""Checkpoints: named tensors and a few facts, written whole or not at all, never pickled.

A generation is one safetensors file, NAME-000000000012.safetensors, whose header carries the facts as
JSON, and a fingerprint of them and of every tensor's bytes. The two newest are kept: should the newest be
damaged, the one before it is there, and whoever reads says so.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from weightgrad.errors import SavedStateError

_KEPT = 2


@dataclass(frozen=True)
class Saved:
    """What was read."""

    number: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    damaged: tuple[str, ...] = ()  # newer generations that could not be read, and why


def write(directory: Path, name: str, number: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Path:
    """Write a generation; when this returns it is on the disk, and the one before last is gone."""
    target = directory / f"{name}-{number:012d}.safetensors"
    temporary = directory / f".{target.name}.{os.getpid()}"
    plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    words = json.dumps(facts, sort_keys=True)
    about = {"facts": words, "digest": _digest(plain, words)}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for torn in directory.glob(f".{name}-*.safetensors.*"):
            torn.unlink(missing_ok=True)  # of a process that was killed while it wrote
        save_file(plain, str(temporary), metadata=about)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _sync(directory)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise cannot_write(target, error) from error
    for old in generations(directory, name)[:-_KEPT]:
        old.unlink(missing_ok=True)
    return target


def cannot_write(target: Path, error: Exception) -> SavedStateError:
    """The error that says so, and what to do."""
    if getattr(error, "errno", None) == errno.ENOSPC or "No space" in str(error):
        why = "the disk is full; the state before it is kept. Make room and start the same command again"
    else:
        why = f"{error}; the state before it is kept. Put that right and start the same command again"
    return SavedStateError(f"cannot write {target}: {why}")


def newest(directory: Path, name: str) -> Saved | None:
    """The newest generation that can be read; None when there is none at all."""
    damaged: list[str] = []
    for path in reversed(generations(directory, name)):
        try:
            number, tensors, facts = _read(path)
        except SavedStateError as error:
            damaged.append(str(error))
            continue
        return Saved(number, tensors, facts, tuple(damaged))
    if damaged:
        raise _lost(directory, damaged)
    return None


def readable(directory: Path, name: str) -> tuple[list[int], list[str]]:
    """The numbers of the generations that can be read, and what is wrong with the others."""
    numbers: list[int] = []
    damaged: list[str] = []
    for path in generations(directory, name):
        try:
            numbers.append(_read(path)[0])
        except SavedStateError as error:
            damaged.append(str(error))
    if damaged and not numbers:
        raise _lost(directory, damaged)
    return numbers, damaged


def exact(directory: Path, name: str, number: int) -> Saved:
    """That generation."""
    return Saved(*_read(directory / f"{name}-{number:012d}.safetensors"))


def generations(directory: Path, name: str) -> list[Path]:
    """All files of that name, oldest first."""
    pattern = re.compile(re.escape(name) + r"-\d{12}\.safetensors")
    return sorted(path for path in directory.glob(f"{name}-*.safetensors") if pattern.fullmatch(path.name))


def _read(path: Path) -> tuple[int, dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(str(path), framework="pt") as file:
            about = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        facts = json.loads(about["facts"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise SavedStateError(f"{path.name} is damaged or no checkpoint ({error})") from error
    if _digest(tensors, about["facts"]) != about.get("digest"):
        raise SavedStateError(f"{path.name} is damaged: its bytes are not those that were written")
    return int(path.stem.rsplit("-", 1)[1]), tensors, facts


def _lost(directory: Path, damaged: list[str]) -> SavedStateError:
    return SavedStateError(
        f"no checkpoint in {directory} can be read: {'; '.join(damaged)}. Restore one from a backup, or remove "
        "the directory to start from the beginning"
    )


def _digest(tensors: Mapping[str, Tensor], facts: str) -> str:
    found = xxhash.xxh3_64(f"{facts}\n".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        if tensor.numel():
            found.update(tensor.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
