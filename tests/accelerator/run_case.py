"""Does one thing on the pretend accelerator: `run_case.py CASE [ARGUMENTS]`, a function of `cases.py`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    importlib.import_module("tests.accelerator.cases").main(*sys.argv[1:])
