"""What a process says about itself, so that the other side can compare it with its own."""

from __future__ import annotations

import platform
import time
from typing import Any

import torch

import weightgrad
from weightgrad import kernels
from weightgrad.wire.versions import HANDSHAKE_VERSION, MESSAGE_VERSION, TRANSPORT_VERSION


def about_this_process() -> dict[str, Any]:
    """The versions of what runs here and the time, for the other side to compare with its own."""
    return {
        "weightgrad": weightgrad.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernels": str(kernels.status()),
        "transport": TRANSPORT_VERSION,
        "messages": MESSAGE_VERSION,
        "admission": HANDSHAKE_VERSION,
        "time": time.time(),
    }
