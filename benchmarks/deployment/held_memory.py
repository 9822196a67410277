"""The memory that an object holds: every tensor and buffer that can be reached from it, with the path as its name."""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from weightgrad.runtime.model.sharded_tensor import flat_local


def held_bytes(root: object, excluded: Iterable[Tensor] = (), *, least: int) -> dict[str, int]:
    """Bytes by name. Each piece of memory counts once, and the elements of a list count together.

    Args:
        root: The object.
        excluded: Tensors that are not counted.
        least: Names with fewer bytes are left out.
    """
    seen = {_place(tensor) for tensor in excluded}
    found: dict[str, int] = {}
    for name, place, size in _reach(root):
        if place not in seen:
            seen.add(place)
            plain = re.sub(r"\[[^]]*\]", "[]", name)
            found[plain] = found.get(plain, 0) + size
    return {name: size for name, size in sorted(found.items(), key=lambda one: -one[1]) if size >= least}


def _reach(root: object) -> Iterator[tuple[str, int, int]]:
    """Name, address and bytes of every piece of memory; the shortest path to a piece is its name."""
    ways: deque[tuple[str, object]] = deque([("", root)])
    met: set[int] = set()
    while ways:
        name, one = ways.popleft()
        if isinstance(one, memoryview):
            one = one.obj
        if isinstance(one, Tensor):
            one = flat_local(one)
            yield name, _place(one), one.untyped_storage().nbytes()
        elif isinstance(one, (bytes, bytearray)):
            yield name, id(one), len(one)
        elif id(one) not in met:
            met.add(id(one))
            ways += [((name + more).removeprefix("."), inside) for more, inside in _inside(one)]


def _inside(one: object) -> list[tuple[str, Any]]:
    if isinstance(one, dict):
        return [("[]" if isinstance(key, int | Tensor) else f".{key}", value) for key, value in one.items()]
    if isinstance(one, (list, tuple, set, frozenset, deque)):
        return [(f"[{place}]", inside) for place, inside in enumerate(one)]
    if isinstance(one, functools.partial):
        return [(f".{key}", value) for key, value in one.keywords.items()]
    ours = type(one).__module__.startswith("weightgrad") or isinstance(one, torch.optim.Optimizer)
    return [(f".{key}", value) for key, value in vars(one).items()] if ours and hasattr(one, "__dict__") else []


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
