"""`weightgrad doctor`: versions, processor and kernels of this machine, and which extras are installed."""

from __future__ import annotations

import platform

import torch
from rich.console import Console

import weightgrad
from weightgrad import kernels
from weightgrad.extras import extras
from weightgrad.machine import processor


def doctor() -> None:
    """Print which kernels are in use and why, and what else belongs in a bug report."""
    console = Console(highlight=False, soft_wrap=True)
    cuda = f"{torch.cuda.device_count()} device(s)" if torch.cuda.is_available() else "none"
    for name, value in (
        ("weightgrad", weightgrad.__version__),
        ("kernels", kernels.status()),
        ("on GPUs", kernels.gpu_status()),
        ("threads", f"{kernels.get_threads()} for large buffers"),
        ("processor", processor()),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("cuda", cuda),
    ):
        console.print(f"{name:12}{value}")
    for extra in extras():
        there = f"not installed ({', '.join(extra.missing)}); pip install 'weightgrad[{extra.name}]'"
        console.print(f"[{extra.name}]: {extra.adds}: {there if extra.missing else 'installed'}", markup=False)
