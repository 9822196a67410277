"""The inner loops of the codecs: a native library in C, and reference implementations in torch with equal results.

Each file holds one family of kernels: a docstring that says what they compute, the call into C, and the
reference implementation, which also runs on CUDA. Beside the C sources in `csrc/` are Triton kernels of the same names
in `gpu/`. `status()` and `gpu_status()` say which are in use and why.
"""

from weightgrad.kernels.gpu import status as gpu_status
from weightgrad.kernels.native import BACKENDS, NativeStatus, status, use
from weightgrad.kernels.noise import MAX_ELEMENTS, derive, mix
from weightgrad.kernels.threads import get_threads, set_threads

__all__ = [
    "BACKENDS",
    "MAX_ELEMENTS",
    "NativeStatus",
    "derive",
    "get_threads",
    "gpu_status",
    "mix",
    "set_threads",
    "status",
    "use",
]
