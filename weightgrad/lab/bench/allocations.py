"""Counts what processes allocate: the bytes of all tensors and buffers, of all threads, whichever library asked.

    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.Popen(command, env={**os.environ, **counted(Path(directory))})
        ...
        Allocations(Path(directory), process.pid).peak

`allocations.c` is put between the process and malloc (LD_PRELOAD), and counts blocks of at least 1 KB. Resident memory
is another number: it also has what the allocator keeps for later, code, and files that are mapped.

Left out: memory that is mapped without malloc, and memory of accelerators.
"""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from weightgrad.errors import RunError
from weightgrad.kernels.build import BuildError, find_compiler

_SOURCE = Path(__file__).with_name("allocations.c")
_DIRECTORY = "WG_ALLOCATIONS"
_COUNTERS = struct.Struct("qq")


def counted(directory: Path) -> dict[str, str]:
    """The environment variables that make a process, and those it starts, count what they allocate.

    Args:
        directory: Where the counters of each process are written; it must exist.

    Raises:
        RunError: There is no C compiler here, or the counter does not compile.
    """
    return {"LD_PRELOAD": str(_library()), _DIRECTORY: str(directory)}


@cache
def _library() -> Path:
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"weightgrad-allocations-{os.getuid()}-{digest}.so"
    if not target.exists():
        temporary = target.with_suffix(f".{os.getpid()}")
        try:
            command = [find_compiler(), "-O2", "-shared", "-fPIC", "-pthread", str(_SOURCE), "-o", str(temporary)]
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (BuildError, subprocess.CalledProcessError) as error:
            raise RunError(f"allocations cannot be counted: {getattr(error, 'stderr', '') or error}") from error
        os.replace(temporary, target)
    return target


class Allocations:
    """What one process has allocated.

    Args:
        directory: What `counted` was given; None takes it from this process's own environment.
        pid: The process; None is this one.

    Raises:
        RunError: The process does not count.
    """

    def __init__(self, directory: Path | None = None, pid: int | None = None) -> None:
        found = directory or Path(os.environ.get(_DIRECTORY, "/nonexistent"))
        self._path = found / str(os.getpid() if pid is None else pid)
        if not self._path.exists():
            raise RunError(f"{self._path} is not there; start the process with the environment of counted()")

    @property
    def now(self) -> int:
        """The bytes that are allocated now."""
        return self._read()[0]

    @property
    def peak(self) -> int:
        """The most bytes that were allocated at one time since the start or since `forget_peak`."""
        return self._read()[1]

    def forget_peak(self) -> None:
        """Let the peak begin anew from what is allocated now."""
        with open(self._path, "r+b") as file:
            file.seek(8)
            file.write(struct.pack("q", self.now))

    def _read(self) -> tuple[int, int]:
        now, peak = _COUNTERS.unpack(self._path.read_bytes())
        return now, peak


def peaks(directory: Path) -> int:
    """The highest peak of all processes that count in a directory, also of those that have ended."""
    found = [_COUNTERS.unpack(path.read_bytes())[1] for path in directory.iterdir() if path.name.isdigit()]
    return max(found, default=0)
