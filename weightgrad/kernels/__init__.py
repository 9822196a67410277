"""The hot loops: a native library and plain-torch twins with equal results.

Each file holds one family: what it computes, the call into C, and the twin, which also runs
on CUDA. `native.status()` says which is in force.
"""

from weightgrad.kernels.native import BACKENDS, NativeStatus, status, use
from weightgrad.kernels.noise import MAX_ELEMENTS, derive, mix
from weightgrad.kernels.threads import get_threads, set_threads

__all__ = [
    "BACKENDS",
    "MAX_ELEMENTS",
    "NativeStatus",
    "derive",
    "get_threads",
    "mix",
    "set_threads",
    "status",
    "use",
]
