"""The bytes of tensors that are alive, and the most at any time, while some code runs.

Every operation's results are seen by a dispatch mode; a storage counts from when it is first seen until it is freed.
It works on the meta device and on fake tensors as on real ones, because these are freed alike: so the peak of a
training step is found without its memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts storages while it is entered.

    Attributes:
        now: bytes that are alive.
        peak: the most that were alive at any time since `reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._seen: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        found = func(*args, **(kwargs or {}))
        self.add(leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor))
        return found

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made before this mode was entered."""
        for storage in storages(tensors):
            key = storage._cdata
            known = self._seen.get(key)
            if known is not None and known[0]() is storage:
                if (grown := storage.nbytes() - known[1]) != 0:  # resized
                    self._seen[key] = (known[0], storage.nbytes())
                    self._change(grown)
                continue
            self._seen[key] = (weakref.ref(storage, self._freed(key)), storage.nbytes())
            self._change(storage.nbytes())

    def _freed(self, key: int) -> Callable[[object], None]:
        def forget(gone: object) -> None:
            known = self._seen.get(key)
            if known is not None and known[0] is gone:
                del self._seen[key]
                self.now -= known[1]

        return forget

    def _change(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def reset_peak(self) -> None:
        """Begin to look for the peak anew."""
        self.peak = self.now


def storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Where tensors lie; a sparse gradient has places and values."""
    for tensor in tensors:
        parts = (tensor._indices(), tensor._values()) if tensor.layout == torch.sparse_coo else (tensor,)
        for part in parts:
            yield part.untyped_storage()


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of tensors, each storage once."""
    return sum({storage._cdata: storage.nbytes() for storage in storages(tensors)}.values())


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors of an optimizer's state."""
    return [leaf for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, Tensor)]
