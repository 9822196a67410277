"""Does one thing on the pretend accelerator: `run_case.py CASE [ARGUMENTS]`, of `cases.py` or `odd_models.py`."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    importlib.import_module("tests.accelerator.odd_models")  # its cases are found by their names, too
    importlib.import_module("tests.accelerator.cases").main(*sys.argv[1:])
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)  # autograd has a thread for the device, which an interpreter that ends cannot join
