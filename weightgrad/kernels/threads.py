"""Splits large buffers over threads. Python threads are enough, because the kernels release the GIL.

The pieces are cut where no result can depend on the cut, so the number of threads never
changes a byte. Below LARGE elements one thread is faster than starting two.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

LARGE = 1 << 21

_Result = TypeVar("_Result")
_threads: int | None = None
_pool: ThreadPoolExecutor | None = None


def set_threads(count: int | None) -> None:
    """Set the threads for large buffers; None follows `torch.get_num_threads()`."""
    global _threads, _pool
    if count is not None and count < 1:
        raise ValueError(f"threads must be at least 1, got {count}")
    _threads = count
    if _pool is not None:
        _pool.shutdown(wait=False)
        _pool = None


def get_threads() -> int:
    """Return the number of threads used for large buffers."""
    return torch.get_num_threads() if _threads is None else _threads


def run_split(n: int, multiple: int, work: Callable[[int, int], _Result]) -> list[_Result]:
    """Run work(start, stop) on pieces of range(n), in threads where n is large.

    Args:
        n: Elements in all.
        multiple: Pieces start at multiples of it.
        work: What is called for each piece.

    Returns:
        What the calls returned, in order.
    """
    global _pool
    count = get_threads()
    if count == 1 or n < LARGE:
        return [work(0, n)]
    step = -(-n // count)
    step = -(-step // multiple) * multiple
    pieces = [(start, min(n, start + step)) for start in range(0, n, step)]
    if _pool is None:
        _pool = ThreadPoolExecutor(max_workers=count, thread_name_prefix="weightgrad")
    return list(_pool.map(lambda piece: work(*piece), pieces))
