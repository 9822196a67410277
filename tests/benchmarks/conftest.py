"""The benchmarks are scripts, which import each other by their names in the directory `benchmarks`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
