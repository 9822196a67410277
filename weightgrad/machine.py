"""What a measurement was taken on."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import torch


def processor() -> str:
    """Model and number of the processors."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} cores"


def measured_on() -> str:
    """Machine, software and date, for the foot of a table."""
    today = datetime.date.today().isoformat()
    return f"{processor()}; Python {platform.python_version()}, torch {torch.__version__}; {today}"
