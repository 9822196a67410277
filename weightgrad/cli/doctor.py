"""`weightgrad doctor`: what this machine gives us."""

from __future__ import annotations

import platform

import torch
from rich.console import Console

import weightgrad
from weightgrad import kernels
from weightgrad.report.machine import processor


def doctor() -> None:
    """Say which kernels are active and why, and what else matters for a bug report."""
    console = Console(highlight=False, soft_wrap=True)
    cuda = f"{torch.cuda.device_count()} device(s)" if torch.cuda.is_available() else "none"
    for name, value in (
        ("weightgrad", weightgrad.__version__),
        ("kernels", kernels.status()),
        ("threads", f"{kernels.get_threads()} for large buffers"),
        ("processor", processor()),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("cuda", cuda),
    ):
        console.print(f"{name:12}{value}")
