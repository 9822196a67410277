"""Model files of runs, and of strangers, read back: in one file or several, quantized or not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from weightgrad.errors import ModelFileError
from weightgrad.quantized.quantized_file import VERSION_KEY, load_quantized


@dataclass(frozen=True)
class ModelFile:
    """A model that was read.

    Attributes:
        tensors: All tensors by name; in the order of the model if that is known.
        buffers: The names of those that are buffers, as far as the file says so.
        ordered: Whether the order is that of the model. safetensors sorts tensors; our files name the order.
    """

    tensors: dict[str, Tensor]
    buffers: frozenset[str]
    ordered: bool


def read(path: Path, stem: str = "model") -> ModelFile:
    """Read a model.

    Args:
        path: A safetensors file, or a directory that has STEM.safetensors or STEM.safetensors.index.json.
        stem: "model" or "master".

    Returns:
        The model; a quantized one is decoded.

    Raises:
        ModelFileError: There is none, or it is damaged.
    """
    found = [_read_one(file) for file in _files(path, stem)]
    return ModelFile(
        {name: tensor for one in found for name, tensor in one.tensors.items()},
        frozenset(name for one in found for name in one.buffers),
        all(one.ordered for one in found),
    )


def read_global_model(run: Path) -> dict[str, Tensor]:
    """The global model that a run ended with, in full precision and without buffers.

    Raises:
        ModelFileError: There is none, or it is damaged.
    """
    stem = "master" if any(run.glob("master*.safetensors")) else "model"
    found = read(run, stem)
    return {name: tensor for name, tensor in found.tensors.items() if name not in found.buffers}


def _files(path: Path, stem: str) -> list[Path]:
    if not path.is_dir():
        return [path]
    index = path / f"{stem}.safetensors.index.json"
    if not index.is_file():
        return [path / f"{stem}.safetensors"]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(f"{index} is no index of a model: {error}") from error
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ModelFileError(f"{index} names files outside {path}")
    return [path / name for name in names]


def _read_one(file: Path) -> ModelFile:
    if not file.is_file():
        raise ModelFileError(f"{file} is not there; give a safetensors file, or the directory of a run that has ended")
    try:
        with safe_open(str(file), framework="pt") as opened:
            metadata = opened.metadata() or {}
            if VERSION_KEY in metadata:
                return ModelFile(load_quantized(file), frozenset(), ordered=True)
            names = list(opened.keys())
            tensors = {name: opened.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise ModelFileError(f"{file} is no safetensors file, or is damaged: {error}") from error
    order, buffers = _names(metadata, "order"), _names(metadata, "buffers")
    if set(order) != tensors.keys():
        return ModelFile(tensors, frozenset(buffers), ordered=False)
    return ModelFile({name: tensors[name] for name in order}, frozenset(buffers), ordered=True)


def _names(metadata: dict[str, str], key: str) -> list[str]:
    """A list of names in the metadata; anything else counts as none."""
    try:
        found = json.loads(metadata.get(key, "[]"))
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) and all(isinstance(name, str) for name in found) else []
