"""Compiles the C sources in `csrc/` into one shared library.

Standard library only: `setup.py` runs this file while a wheel is built, and `native.py`
uses it on a machine that got no compiled wheel. Flags are chosen for equal results on
every machine: no `-march=native`, no contraction of a*b+c into a fused multiply-add.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
)
AVX2_FLAGS = ("-mavx2", "-mf16c")
AVX512_FLAGS = (*AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_UNIT_FLAGS = {"avx2": AVX2_FLAGS, "avx512": AVX512_FLAGS}
X86 = ("x86_64", "AMD64", "amd64")
ARM = ("aarch64", "arm64", "ARM64")


class BuildError(Exception):
    """The library could not be compiled; the message is the compiler's."""


def library_name() -> str:
    """Return the file name of the library on this platform."""
    return "libwgkernels.dylib" if sys.platform == "darwin" else "libwgkernels.so"


def source_hash() -> str:
    """Hash what would be compiled: sources, flags and machine."""
    digest = hashlib.sha256(repr((FLAGS, _UNIT_FLAGS, platform.machine(), sys.platform)).encode())
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def find_compiler() -> str:
    """Return the path of a C compiler: `cc`, or gcc or clang under their own names."""
    for name in ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path:
            return path
    raise BuildError("no C compiler: looked for cc, gcc and clang on PATH")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}")


def is_open_to_others(path: Path) -> bool:
    """Whether anybody but this user and root could have written a file, or put one into a directory."""
    found = path.stat()
    strangers = {found.st_uid, path.lstat().st_uid} - {0, os.getuid()}
    return bool(strangers) or bool(found.st_mode & 0o022)


def compile_library(target: Path) -> None:
    """Compile and link into `target`, which appears whole or not at all."""
    compiler = find_compiler()
    on_x86 = platform.machine() in X86
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as folder:

        def compile_unit(source: Path) -> str:
            extra = _UNIT_FLAGS.get(source.stem.rpartition("_")[2], ()) if on_x86 else ()
            unit = str(Path(folder) / f"{source.stem}.o")
            _run([compiler, *FLAGS, *extra, "-c", str(source), "-o", unit])
            return unit

        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
            units = list(pool.map(compile_unit, sorted(SOURCES.glob("*.c"))))
        linked = Path(folder) / library_name()
        _run([compiler, "-shared", *units, "-lm", "-o", str(linked)])
        os.replace(linked, target)
