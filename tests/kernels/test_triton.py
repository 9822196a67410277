"""The kernels for GPUs give the bytes of the C kernels and of the reference implementations.

There is no GPU here: Triton interprets the kernels on the CPU, in a process of its own (`triton_cases.py`). In another
one it compiles every launch of these cases for GPUs, which needs none (`triton_launches.py`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weightgrad import kernels
from weightgrad.errors import NativeError
from weightgrad.kernels import gpu

CASES, LAUNCHES = (Path(__file__).parent / name for name in ("triton_cases.py", "triton_launches.py"))
FAMILIES = ("quantize", "not_finite", "ternary", "select", "gaps", "onebit", "codecs")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton") / "launches.jsonl"


@pytest.fixture(scope="module")
def results(launches: Path) -> dict[str, dict[str, Any]]:
    return {found["family"]: found for found in said_by(CASES, launches, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")}


def said_by(script: Path, file: Path, **variables: str) -> list[dict[str, Any]]:
    """What a script writes about a file of launches, line by line."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    done = subprocess.run(
        [sys.executable, str(script), str(file)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs_triton
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bytes(family: str, results: dict[str, dict[str, Any]]) -> None:
    found = results[family]
    assert not found["error"], found["error"]
    assert found["compared"] >= 10


@needs_triton
def test_every_launch_compiles_and_rounds_each_product(
    results: dict[str, dict[str, Any]], launches: Path, tmp_path: Path
) -> None:
    """Machine code for three GPUs comes out; no product and sum are rounded as one in it, and nothing is spilled."""
    assert set(results) == set(FAMILIES)
    options = [json.loads(line)["options"] for line in launches.read_text().splitlines()]
    assert all(one == {"enable_fp_fusion": False} for one in options), "Triton's default changes, and it warns of that"
    found = said_by(LAUNCHES, launches, TRITON_CACHE_DIR=str(tmp_path))
    for name in sorted({one["kernel"] for one in found}):
        print(name, "registers a thread:", max(one["registers"] for one in found if one["kernel"] == name))
    wrong = [one for one in found if one["error"] or one["fused"] or one["spilled"] or not one["bytes"]]
    assert not wrong, wrong[:3]
    sources = Path(gpu.__file__).parent.glob("*.py")
    kernels_here = {f"weightgrad.kernels.gpu.{file.stem}:{name}" for file in sources for name in launched(file)}
    assert {one["kernel"] for one in found} == kernels_here


def launched(file: Path) -> set[str]:
    """The kernels of a file that it launches."""
    return set(re.findall(r"(_[a-z]+)\[.+\]\(", file.read_text()))


def test_the_backend_says_what_it_is() -> None:
    found = kernels.gpu_status()
    assert found.startswith(("triton", "reference (torch): "))
    assert kernels.native.forced() is None


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets kernels here")
def test_cpu_tensors_need_the_interpreter() -> None:
    with pytest.raises(NativeError, match="TRITON_INTERPRET"), kernels.use("triton"):
        pass


@pytest.mark.parametrize(
    ("failure", "wanted"),
    [
        ("ModuleNotFoundError('hidden', name=name)", "reference (torch): triton is not installed (pip install"),
        (
            "ImportError('libtriton.so: no such symbol')",
            "reference (torch): triton cannot be imported: libtriton.so: no",
        ),
    ],
)
def test_without_triton_everything_is_imported_and_says_so(failure: str, wanted: str) -> None:
    code = (
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] == 'triton': raise {failure}\n"
        "sys.meta_path.insert(0, Finder())\n"
        "import weightgrad, torch\n"
        "from weightgrad import kernels\n"
        "from weightgrad.codecs import decode, parse\n"
        "decode(parse('qsgd(bits=4)').encode(torch.ones(5), {}, 0)[0])\n"
        "print(kernels.gpu_status())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert wanted in done.stdout
