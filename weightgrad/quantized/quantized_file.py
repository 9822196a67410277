"""The file of a quantized model: safetensors with metadata, read as if a stranger had written it.

The metadata `tensors` says of each tensor that is not stored under its own name and in its own dtype how it is stored:

    {"layout": "pack-quantized", "bits": 2, "shape": [64, 32, 3, 3], "dtype": "float32"}
        NAME_packed int32, NAME_scale float32, NAME_shape int64
    {"layout": "weightgrad", "format": "codebook", "bits": 4, "group": 0, "shape": [...], "dtype": "float32"}
        NAME_codes uint8, NAME_scales float32
    {"layout": "half", "dtype": "float32"}
        NAME float16 or bfloat16

Every number is compared with the tensors that are there before anything is allocated from it, and every tensor of the
file must be accounted for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weightgrad.errors import ModelFileError
from weightgrad.quantized.packed_tensor import FORMATS, PACK_QUANTIZED, WEIGHTGRAD, WIDTHS, PackedTensor
from weightgrad.quantized.safetensors_file import save_file

VERSION = 1
"""Changes when the meaning of the metadata does. `docs/export.md`."""

VERSION_KEY = "weightgrad_quantized"
"""The metadata by which a quantized model is known."""

_HALF = "half"
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_MOST_DIMENSIONS = 16
_MOST_ELEMENTS = 2**40
_KEYS = {
    PACK_QUANTIZED: {"layout", "bits", "shape", "dtype"},
    WEIGHTGRAD: {"layout", "format", "bits", "group", "shape", "dtype"},
    _HALF: {"layout", "dtype"},
}


# -- writing --------------------------------------------------------------------------------------


def write(
    path: Path,
    *,
    packed: Sequence[PackedTensor],
    halves: Mapping[str, tuple[Tensor, torch.dtype]],
    kept: Mapping[str, Tensor],
    facts: Mapping[str, str],
) -> int:
    """Write a quantized model; the arguments are those of `to_tensors`.

    Returns:
        The size of the file.

    Raises:
        ModelFileError: The file cannot be written, or two tensors of it would have one name.
    """
    tensors, metadata = to_tensors(packed=packed, halves=halves, kept=kept, facts=facts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata)
    except (OSError, SafetensorError) as error:
        raise ModelFileError(f"cannot write {path}: {error}") from error
    return path.stat().st_size


def to_tensors(
    *,
    packed: Sequence[PackedTensor],
    halves: Mapping[str, tuple[Tensor, torch.dtype]],
    kept: Mapping[str, Tensor],
    facts: Mapping[str, str],
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file.

    Args:
        packed: The quantized tensors.
        halves: Tensors in half precision, and the dtypes that readers get.
        kept: Tensors as they are.
        facts: Further metadata; `order` names all tensors in their order.

    Raises:
        ModelFileError: Two tensors of the file would have one name.
    """
    tensors: dict[str, Tensor] = {}
    entries: dict[str, dict[str, Any]] = {}
    for one in packed:
        _add(tensors, _stored(one))
        entries[one.name] = {"layout": one.layout, "bits": one.bits, "shape": list(one.shape)}
        entries[one.name] |= {"dtype": _name_of(one.dtype)}
        if one.layout == WEIGHTGRAD:
            entries[one.name] |= {"format": one.format, "group": one.group}
    for name, (tensor, dtype) in halves.items():
        _add(tensors, {name: tensor})
        entries[name] = {"layout": _HALF, "dtype": _name_of(dtype)}
    _add(tensors, kept)
    return tensors, {"format": "pt", VERSION_KEY: str(VERSION), "tensors": json.dumps(entries), **facts}


def _stored(one: PackedTensor) -> dict[str, Tensor]:
    """The tensors of a packed one, by their names in the file."""
    if one.layout == PACK_QUANTIZED:
        shape = torch.tensor([one.rows, one.columns], dtype=torch.int64)
        return {f"{one.name}_packed": one.codes, f"{one.name}_scale": one.scales, f"{one.name}_shape": shape}
    return {f"{one.name}_codes": one.codes, f"{one.name}_scales": one.scales}


def _add(tensors: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    for name, tensor in more.items():
        if name in tensors:
            raise ModelFileError(f"two tensors of the file would be called {name}; rename one of the model's tensors")
        tensors[name] = tensor


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- reading --------------------------------------------------------------------------------------


def load_quantized(path: str | Path) -> dict[str, Tensor]:
    """Read a quantized model as a state dict.

        model.load_state_dict(wg.load_quantized("model.safetensors"))

    Args:
        path: A file of `weightgrad export` or `save_quantized`.

    Returns:
        All tensors by name, decoded, in the dtypes and the order of the model. Buffers are among them.

    Raises:
        ModelFileError: The file is missing or damaged, or is no quantized model.
    """
    return QuantizedFile(Path(path)).state_dict()


def load_packed(path: str | Path) -> list[PackedTensor]:
    """Read the quantized tensors of a model as they are packed, for those who compute on codes and scales.

    Args:
        path: A file of `weightgrad export` or `save_quantized`.

    Returns:
        The packed tensors in the order of the model. Tensors that are not packed are not among them; `load_quantized`
        has those.

    Raises:
        ModelFileError: The file is missing or damaged, or is no quantized model.
    """
    file = QuantizedFile(Path(path))
    by_name = {one.name: one for one in file.packed}
    return [by_name[name] for name in file.order() if name in by_name]


class QuantizedFile:
    """What is in a file, checked.

    Args:
        path: The file.

    Attributes:
        packed: The quantized tensors.
        whole: All other tensors.
        halves: By the names of those in half precision, the dtypes that readers get.
        metadata: The metadata.

    Raises:
        ModelFileError: The file is missing or damaged, or is no quantized model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        tensors, self.metadata = _open(path)
        if (version := self.metadata.get(VERSION_KEY)) != str(VERSION):
            raise ModelFileError(
                f"{path} is no quantized model of version {VERSION}"
                + (f": it says {version[:20]!r}" if version is not None else "; make one with weightgrad export")
            )
        self.packed: list[PackedTensor] = []
        self.halves: dict[str, torch.dtype] = {}
        for name, entry in self._json("tensors", dict).items():
            self._take(name, entry, tensors)
        self.whole = tensors
        if twice := sorted({one.name for one in self.packed} & self.whole.keys()):
            raise self._wrong(twice[0], "is there twice, packed and whole")

    def _json(self, key: str, kind: type[Any]) -> Any:
        try:
            found = json.loads(self.metadata.get(key, ""))
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, kind):
            raise ModelFileError(
                f"{self.path}: its metadata {key!r} is no JSON {kind.__name__}; export the model again"
            )
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors, decoded, in the order of the model."""
        found = {name: tensor.to(self.halves.get(name, tensor.dtype)) for name, tensor in self.whole.items()}
        found |= {one.name: one.decode() for one in self.packed}
        return {name: found[name] for name in self.order()}

    def number(self, key: str) -> int:
        """A number of the metadata, from 0 to 2**32 - 1."""
        text = self.metadata.get(key, "")
        if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < 2**32):
            raise ModelFileError(f"{self.path}: its metadata {key!r} is {text[:20]!r}; wanted a number below 2**32")
        return int(text)

    def order(self) -> list[str]:
        """The names of all tensors in the order of the model."""
        found = self._json("order", list)
        known = {one.name for one in self.packed} | self.whole.keys()
        if len(found) != len(known) or any(not isinstance(name, str) for name in found) or set(found) != known:
            raise ModelFileError(f"{self.path}: its metadata 'order' does not name its tensors; export the model again")
        return list(found)

    def _wrong(self, name: str, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {name[:80]} {what}; export the model again")

    def _take(self, name: str, entry: Any, tensors: dict[str, Tensor]) -> None:
        """Move the tensors of one entry of the metadata out of `tensors`."""
        layout = entry.get("layout") if isinstance(entry, dict) else None
        if not isinstance(layout, str) or layout not in _KEYS or entry.keys() != _KEYS[layout]:
            raise self._wrong(name, f"is described by {str(entry)[:80]}; wanted a layout of {', '.join(_KEYS)}")
        dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
        if dtype is None:
            raise self._wrong(name, f"has dtype {str(entry['dtype'])[:20]!r}; wanted one of {', '.join(_DTYPES)}")
        if layout == _HALF:
            if name not in tensors or tensors[name].dtype not in (torch.float16, torch.bfloat16):
                raise self._wrong(name, "should be there in half precision and is not")
            self.halves[name] = dtype
            return
        shape = self._shape(name, entry["shape"])
        take = self._packed if layout == PACK_QUANTIZED else self._of_codec
        self.packed.append(take(name, entry, shape, dtype, tensors))

    def _shape(self, name: str, given: Any) -> tuple[int, ...]:
        good = isinstance(given, list) and 1 <= len(given) <= _MOST_DIMENSIONS
        if not good or any(type(size) is not int or not 1 <= size <= _MOST_ELEMENTS for size in given):
            raise self._wrong(name, f"has shape {str(given)[:80]}; wanted 1 to {_MOST_DIMENSIONS} sizes of at least 1")
        if math.prod(given) > _MOST_ELEMENTS:
            raise self._wrong(name, f"has shape {given}, more than {_MOST_ELEMENTS} elements")
        return tuple(given)

    def _bits(self, name: str, entry: Mapping[str, Any], allowed: Sequence[int]) -> int:
        bits = entry["bits"]
        if type(bits) is not int or bits not in allowed:
            raise self._wrong(name, f"has codes of {str(bits)[:20]} bits; wanted {', '.join(map(str, allowed))}")
        return bits

    def _part(
        self, tensors: dict[str, Tensor], name: str, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]
    ) -> Tensor:
        """Take a tensor that belongs to a packed one."""
        found = tensors.pop(name, None)
        if found is None:
            raise self._wrong(name, "is missing")
        if found.dtype != dtype or tuple(found.shape) not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise self._wrong(name, f"is {_name_of(found.dtype)}{list(found.shape)}; wanted {_name_of(dtype)} {wanted}")
        if dtype == torch.float32 and not bool(torch.isfinite(found).all()):
            raise self._wrong(name, "holds a number that is not finite")
        return found

    def _packed(
        self,
        name: str,
        entry: Mapping[str, Any],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        tensors: dict[str, Tensor],
    ) -> PackedTensor:
        bits = self._bits(name, entry, WIDTHS)
        rows, columns = shape[0], math.prod(shape[1:])
        codes = self._part(tensors, f"{name}_packed", torch.int32, [(rows, -(-columns * bits // 32))])
        stored = self._part(tensors, f"{name}_shape", torch.int64, [(2,)])
        if stored.tolist() != [rows, columns]:
            raise self._wrong(f"{name}_shape", f"is {stored.tolist()}; wanted {[rows, columns]}")
        scales = tensors.get(f"{name}_scale")
        groups = scales.shape[1] if scales is not None and scales.dim() == 2 else 0
        wanted: list[tuple[int, ...]] = [(1,), (rows, 1)]
        wanted += [(rows, groups)] if groups and columns % groups == 0 else []
        scales = self._part(tensors, f"{name}_scale", torch.float32, wanted)
        return PackedTensor(
            name=name, shape=shape, dtype=dtype, layout=PACK_QUANTIZED, bits=bits, codes=codes, scales=scales
        )

    def _of_codec(
        self,
        name: str,
        entry: Mapping[str, Any],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        tensors: dict[str, Tensor],
    ) -> PackedTensor:
        form, group, numel = entry["format"], entry["group"], math.prod(shape)
        if not isinstance(form, str) or form not in FORMATS:
            raise self._wrong(name, f"is of format {str(form)[:20]!r}; wanted one of {', '.join(FORMATS)}")
        allowed = {"sign": (1,), "ternary": (2,), "codebook": range(1, 9), "uniform": range(2, 9)}[form]
        bits = self._bits(name, entry, allowed)
        least, most = (0, 0) if form == "codebook" else (1, numel)
        if type(group) is not int or not least <= group <= most:
            raise self._wrong(name, f"has groups of {str(group)[:20]}; wanted {least} to {most}")
        count = 2**bits if form == "codebook" else -(-numel // group)
        size = -(-numel // 5) if form == "ternary" else -(-numel * bits // 8)
        return PackedTensor(
            name=name,
            shape=shape,
            dtype=dtype,
            layout=WEIGHTGRAD,
            bits=bits,
            codes=self._part(tensors, f"{name}_codes", torch.uint8, [(size,)]),
            scales=self._part(tensors, f"{name}_scales", torch.float32, [(count,)]),
            format=form,
            group=group,
        )


def _open(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors and the metadata of a safetensors file."""
    if not path.is_file():
        raise ModelFileError(f"{path} is not there, or is no file; wanted one that weightgrad export has written")
    try:
        with safe_open(str(path), framework="pt") as opened:
            names = list(opened.keys())
            return {name: opened.get_tensor(name) for name in names}, opened.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ModelFileError(f"{path} is no safetensors file, or is damaged: {error}") from error
