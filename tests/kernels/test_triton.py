"""The kernels for GPUs give the bytes of the C kernels and of the reference implementations.

There is no GPU here: Triton interprets the kernels on the CPU, in a process of its own (`triton_cases.py`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from weightgrad import kernels
from weightgrad.errors import NativeError

SCRIPT = Path(__file__).parent / "triton_cases.py"
FAMILIES = ("quantize", "not_finite", "ternary", "select", "gaps", "onebit", "codecs")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@cache
def results() -> dict[str, dict[str, Any]]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {found["family"]: found for found in map(json.loads, done.stdout.splitlines())}


@needs_triton
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bytes(family: str) -> None:
    found = results()[family]
    assert not found["error"], found["error"]
    assert found["compared"] >= 10


def test_the_backend_says_what_it_is() -> None:
    found = kernels.gpu_status()
    assert found.startswith(("triton", "reference (torch): "))
    assert kernels.native.forced() is None


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets kernels here")
def test_cpu_tensors_need_the_interpreter() -> None:
    with pytest.raises(NativeError, match="TRITON_INTERPRET"), kernels.use("triton"):
        pass


def test_without_triton_everything_is_imported_and_says_so() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'triton' else real(name, *more)\n"
        "from weightgrad import kernels; print(kernels.gpu_status())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "triton is not installed" in done.stdout
