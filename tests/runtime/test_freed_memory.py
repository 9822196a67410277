"""Whether memory that is not used any more goes back to the system."""

from __future__ import annotations

import ctypes
import platform
from itertools import pairwise
from pathlib import Path

import pytest

from weightgrad.runtime import freed_memory
from weightgrad.runtime.freed_memory import FreedMemory, return_freed_memory


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has malloc_trim")
def test_pages_between_live_pieces_go_back() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    large, small = [], []
    for _ in range(1000):  # below the size from which on pieces are mapped on their own
        large.append(libc.malloc(64 << 10))
        small.append(libc.malloc(4 << 10))
        ctypes.memset(large[-1], 1, 64 << 10)
    for piece in large:
        libc.free(piece)
    before = resident_pages()
    assert return_freed_memory()
    assert resident_pages() < before - 8000, "32 of the 64 MB at least"
    for piece in small:
        libc.free(piece)


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not return_freed_memory()


def test_a_server_gives_memory_back_while_it_closes_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only at the end of a replay: until then the peak would grow with the log."""
    calls: list[int] = []
    memory = FreedMemory()
    for number in range(1, 2001):
        monkeypatch.setattr(freed_memory, "return_freed_memory", lambda number=number: calls.append(number))
        memory.round_closed()
    assert len(calls) > 20
    assert max(after - before for before, after in pairwise([0, *calls])) <= 100
