"""How long `import weightgrad` takes beside torch's own import: python benchmarks/import_time.py [--repeat 5]

Every figure is the least of several fresh interpreters, after one that warms the disk cache. torch is imported before
the clock starts. `join` is what a training script uses next, and loads gRPC, certificates and the rest of a site.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from weightgrad.machine import measured_on

_TORCH = "import time; began = time.perf_counter(); import torch; print(time.perf_counter() - began)"
_OURS = "import torch, time; began = time.perf_counter(); {}; print(time.perf_counter() - began)"
CASES = {
    "import torch": _TORCH,
    "import weightgrad, after torch": _OURS.format("import weightgrad"),
    "import weightgrad; weightgrad.join, after torch": _OURS.format("import weightgrad; weightgrad.join"),
}


def least_seconds(code: str, repeat: int) -> float:
    """The least of the times that a piece of code prints, in interpreters of its own."""
    command = [sys.executable, "-c", code]
    found = [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(repeat)]
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="interpreters for each figure")
    repeat = parser.parse_args().repeat
    least_seconds(CASES["import weightgrad; weightgrad.join, after torch"], 1)
    for name, code in CASES.items():
        print(f"{name:50}{least_seconds(code, repeat):8.3f} s")
    print(measured_on())


if __name__ == "__main__":
    main()
