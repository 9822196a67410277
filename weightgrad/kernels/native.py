"""Finds, loads and describes the native library.

Looked for in this order: built into the wheel, beside this file; compiled once with the
system's C compiler into the user's cache, under a name that holds the hash of the
sources; otherwise there is none and the reference implementations in torch do the work.
`status()` says which and why.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from weightgrad.errors import NativeError
from weightgrad.kernels import build

BACKENDS = ("native", "avx2", "portable", "reference")
# By what wg_isa() says.
_ISAS = ("portable", "neon") if platform.machine() in build.ARM else ("portable", "avx2", "avx512")
INTERPRETED = "triton"  # the kernels for GPUs on tensors of the CPU, where Triton interprets them: for tests


@dataclass(frozen=True)
class NativeStatus:
    """Which kernels are in use, and why."""

    backend: str  # "native" or "reference"; "triton" if it is forced
    isa: str  # "avx512", "avx2", "neon", "portable" or "torch"
    origin: str  # "wheel", "cache" or "none"
    reason: str

    def __str__(self) -> str:
        return f"{self.backend} ({self.isa}): {self.reason}"


class Quantizer(ctypes.Structure):
    """`wg_quantizer` of wg.h."""

    _fields_ = (
        ("bucket", ctypes.c_uint64),
        ("bits", ctypes.c_int32),
        ("levels", ctypes.c_int32),
        ("norm", ctypes.c_int32),
        ("stochastic", ctypes.c_int32),
        ("key", ctypes.c_uint64),
        ("first", ctypes.c_uint64),
        ("limit", ctypes.c_float),
    )


class Selection(ctypes.Structure):
    """`wg_selection` of wg.h."""

    _fields_ = (
        ("above", ctypes.c_float),
        ("below", ctypes.c_float),
        ("momentum", ctypes.c_float),
        ("clear", ctypes.c_int32),
        ("capacity", ctypes.c_uint64),
    )


class Sent(ctypes.Structure):
    """`wg_sent` of wg.h."""

    _fields_ = (
        ("above", ctypes.c_float),
        ("below", ctypes.c_float),
        ("rows", ctypes.c_uint64),
        ("cols", ctypes.c_uint64),
        ("tile", ctypes.c_uint64),
        ("means", ctypes.c_void_p),
    )


class GapStreams(ctypes.Structure):
    """`wg_gap_streams` of wg.h."""

    _fields_ = (
        ("low", ctypes.c_void_p),
        ("unary", ctypes.c_void_p),
        ("unary_bytes", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("numel", ctypes.c_uint64),
        ("width", ctypes.c_int32),
        ("rice", ctypes.c_int32),
    )


class EntryValues(ctypes.Structure):
    """`wg_entry_values` of wg.h."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("signs", ctypes.c_void_p),
        ("size", ctypes.c_float),
        ("share", ctypes.c_float),
    )


class Entries(ctypes.Structure):
    """`wg_entries` of wg.h."""

    _fields_ = (("streams", GapStreams), ("values", EntryValues), ("first", ctypes.c_uint64))


class Area(ctypes.Structure):
    """`wg_area` of wg.h."""

    _fields_ = (("first", ctypes.c_uint64), ("last", ctypes.c_uint64), ("out", ctypes.c_void_p))


_POINTER, _SIZE, _INT, _FLOAT, _DOUBLE = (
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_int,
    ctypes.c_float,
    ctypes.c_double,
)
# name: (result, arguments), as declared in csrc/
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "wg_isa": (_INT, ()),
    "wg_force_isa": (_INT, (_INT,)),
    "wg_quantize": (_SIZE, (_POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _POINTER)),
    "wg_dequantize": (None, (_POINTER, _POINTER, _SIZE, _SIZE, _INT, _INT, _INT, _POINTER)),
    "wg_moments": (ctypes.c_uint32, (_POINTER, _POINTER, _SIZE, _INT, _POINTER)),
    "wg_ternary": (None, (_POINTER, _POINTER, _SIZE, _FLOAT, _SIZE, _SIZE, _POINTER)),
    "wg_ternary_decode": (None, (_POINTER, _SIZE, _FLOAT, _INT, _POINTER)),
    "wg_narrow": (ctypes.c_uint32, (_POINTER, _SIZE, _INT, _POINTER)),
    "wg_widen": (None, (_POINTER, _SIZE, _INT, _INT, _POINTER)),
    "wg_clear": (None, (_POINTER, _SIZE)),
    "wg_reference": (None, (_POINTER, _POINTER, _FLOAT, _SIZE, _POINTER)),
    "wg_distance": (None, (_POINTER, _POINTER, _POINTER, _FLOAT, _SIZE, _POINTER)),
    "wg_local_model": (_INT, (_POINTER, _POINTER, _FLOAT, _POINTER, _SIZE, _POINTER, _SIZE, _POINTER)),
    "wg_take_update": (
        _INT,
        (_POINTER, _POINTER, _INT, _FLOAT, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER),
    ),
    "wg_place_entries": (_INT, (_POINTER, _POINTER, _FLOAT, _POINTER, _SIZE, _POINTER, _SIZE)),
    "wg_nesterov": (None, (_POINTER, _FLOAT, _POINTER, _FLOAT, _FLOAT, _SIZE)),
    "wg_lowrank": (None, (_POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _INT, _POINTER)),
    "wg_largest": (ctypes.c_uint32, (_POINTER, _SIZE)),
    "wg_digest": (_SIZE, (_POINTER, _SIZE, _SIZE)),
    "wg_ternary_sums": (ctypes.c_uint32, (_POINTER, _POINTER, _SIZE, _FLOAT, _POINTER)),
    "wg_ternary_threshold": (None, (_POINTER, _SIZE, _FLOAT, _POINTER)),
    "wg_level_sums": (ctypes.c_uint32, (_POINTER, _POINTER, _SIZE, _FLOAT, _INT, _POINTER)),
    "wg_onebit": (_INT, (_POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _POINTER, _POINTER, _POINTER)),
    "wg_onebit_decode": (None, (_POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _INT, _POINTER)),
    "wg_signs": (None, (_POINTER, _SIZE, _POINTER)),
    "wg_scan": (_SIZE, (_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _POINTER, _POINTER)),
    "wg_scan_columns": (_SIZE, (_POINTER,) * 7),
    "wg_kth_largest": (ctypes.c_int32, (_POINTER, _SIZE, _SIZE)),
    "wg_keep_largest": (None, (_POINTER, _POINTER, _SIZE, _SIZE, ctypes.c_uint32, _POINTER, _POINTER)),
    "wg_scatter": (None, (_POINTER, _POINTER, _SIZE, _INT, _POINTER)),
    "wg_columns_of": (
        None,
        (_POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _SIZE, _DOUBLE, *[_POINTER] * 6, _SIZE, _POINTER),
    ),
    "wg_entries_of": (_INT, (_POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _SIZE, _POINTER, _POINTER)),
    "wg_pack": (None, (_POINTER, _SIZE, _INT, _POINTER)),
    "wg_unpack": (None, (_POINTER, _SIZE, _INT, _POINTER)),
    "wg_gap_costs": (_SIZE, (_POINTER, _SIZE, _INT, _POINTER)),
    "wg_pack_gaps": (_SIZE, (_POINTER, _SIZE, _INT, _POINTER, _POINTER)),
    "wg_check_gaps": (_INT, (_POINTER,)),
    "wg_unpack_gaps": (_INT, (_POINTER, _POINTER)),
    "wg_scatter_gaps": (_INT, (_POINTER, _POINTER, _INT, _POINTER, _SIZE)),
    "wg_elias": (_SIZE, (_POINTER, _SIZE, _SIZE, _INT, _POINTER, _POINTER)),
    "wg_elias_decode": (_INT, (_POINTER, _POINTER, _SIZE, _SIZE, _INT, _POINTER)),
    "wg_assign": (None, (_POINTER, _SIZE, _POINTER, _INT, _INT, _POINTER)),
    "wg_lookup": (None, (_POINTER, _SIZE, _INT, _POINTER, _INT, _POINTER)),
}


def cache_folder() -> Path:
    """Return where a library compiled on this machine is kept, by the platform's convention."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "weightgrad"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weightgrad"


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process compile while the others wait for it. Where there is no flock, all compile."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compiled_in_cache(folder: Path) -> Path:
    """Return the path of the library in `folder`; compile it now if it is not there yet.

    A library that somebody else could have written is not loaded: where the folder, or the library in it, belongs to
    another user or may be written by others, it is compiled anew in a directory of this process alone.
    """
    path = folder / f"kernels-{build.source_hash()}-{build.library_name()}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if build.is_open_to_others(folder) or (path.exists() and build.is_open_to_others(path)):
        return _compiled_apart()
    if not path.exists():
        with _locked(folder / ".lock"):
            if not path.exists():
                build.compile_library(path)
    return path


def _compiled_apart() -> Path:
    own = Path(tempfile.mkdtemp(prefix="weightgrad-kernels-"))
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    path = own / build.library_name()
    build.compile_library(path)
    return path


def _find() -> tuple[ctypes.CDLL | None, NativeStatus]:
    bundled = Path(__file__).parent / build.library_name()
    try:
        if bundled.exists():
            library, origin, reason = _load(bundled), "wheel", "built into the wheel"
        else:
            path = compiled_in_cache(cache_folder())
            library, origin, reason = _load(path), "cache", f"compiled on this machine, {path.name}"
    except (build.BuildError, NativeError, OSError, AttributeError) as error:
        first = str(error).splitlines()[0]
        return None, NativeStatus("reference", "torch", "none", f"no native library: {first}")
    isa = _ISAS[library.wg_isa()]
    return library, NativeStatus("native", isa, origin, reason)


_found: tuple[ctypes.CDLL | None, NativeStatus] | None = None
_forced: str | None = None


def _library() -> tuple[ctypes.CDLL | None, NativeStatus]:
    global _found
    if _found is None:
        _found = _find()
    return _found


def status() -> NativeStatus:
    """Which kernels do the work now, and why.

    Returns:
        Backend, instruction set, where the library came from, and the reason for that choice.
    """
    library, found = _library()
    if library is None or _forced is None:
        return found
    if _forced in ("reference", INTERPRETED):
        return NativeStatus(_forced, "torch" if _forced == "reference" else "interpreted", found.origin, "forced")
    return NativeStatus("native", _ISAS[library.wg_isa()], found.origin, "forced")


def _isa_of(backend: str | None) -> int:
    """What a backend allows, for wg_force_isa; -1 is all that there is."""
    return _ISAS.index(backend) if backend in _ISAS else -1


@contextlib.contextmanager
def use(backend: str) -> Iterator[None]:
    """Force a backend for the whole process while the block runs, for tests and benchmarks.

    Args:
        backend: One of BACKENDS: "native", "avx2" (native without AVX-512), "portable" (without any vector unit) or
            "reference" (torch). Or "triton": the kernels for GPUs, interpreted in Python, if TRITON_INTERPRET=1 was set
            when this process began.

    Raises:
        NativeError: The name is unknown, or there is no native library here.
    """
    global _forced
    if backend not in (*BACKENDS, INTERPRETED):
        raise NativeError(f"backend {backend!r} is unknown; there are {', '.join((*BACKENDS, INTERPRETED))}")
    if backend == INTERPRETED and os.environ.get("TRITON_INTERPRET") != "1":
        raise NativeError("backend 'triton' works on CPU tensors only if TRITON_INTERPRET=1 is set before the start")
    library, found = _library()
    if backend in ("native", *_ISAS) and library is None:
        raise NativeError(f"backend {backend!r} is not available here: {found.reason}")
    before = _forced
    _forced = backend
    if library is not None:
        library.wg_force_isa(_isa_of(backend))
    try:
        yield
    finally:
        _forced = before
        if library is not None:
            library.wg_force_isa(_isa_of(before))


def library_for(tensor: Tensor) -> ctypes.CDLL | None:
    """Return the native library when it can work on this tensor's memory, else None."""
    if _forced in ("reference", INTERPRETED) or tensor.device.type != "cpu":
        return None
    return _library()[0]


def forced() -> str | None:
    """The backend that `use` has forced, if any."""
    return _forced


def pointer(tensor: Tensor | None) -> int | None:
    """Return the address of a contiguous tensor's first element; None for None."""
    return None if tensor is None else tensor.data_ptr()
