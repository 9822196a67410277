"""`./scripts/test-gpu` without a GPU. `tests/accelerator/` has the same checks on a pretend accelerator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from weightgrad.lab.bench import gpu_check
from weightgrad.lab.bench.gpu_check import Check, Plan
from weightgrad.lab.bench.gpu_steps import Steps

ROOT = Path(__file__).parents[3]
TINY = Plan(size="tiny", batch=2, steps=8, every=4, megabytes=0.1, timeout=300)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends_with_its_own_code(tmp_path: Path) -> None:
    out = tmp_path / "gpu-check.md"
    done = subprocess.run(
        [str(ROOT / "scripts" / "test-gpu"), "--out", str(out)],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == gpu_check.NO_GPU, done.stderr
    assert "No GPU" in done.stderr
    assert not out.exists()


def test_a_site_under_fsdp2_as_processes() -> None:
    """The processes that are started on GPUs, on the CPU with a tiny model."""
    found = gpu_check.run_sites({"east": "cpu"}, TINY, ranks=2, shards=True)
    (one,) = found.values()
    assert one.ranks == 2
    assert min(one.plain, one.between, one.rounds) > 0
    lines = gpu_check.step_checks("one site, FSDP2", found)
    assert all(line.good for line in lines)


def test_a_site_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match="east on nowhere ended with 1"):
        gpu_check.run_sites({"east": "nowhere"}, TINY)


def test_a_report_names_what_is_wrong() -> None:
    text = gpu_check.report({"Kernels": [Check("`qsgd`", "differs for [17]", False)]}, "two")
    assert "| `qsgd` | differs for [17] | WRONG |" in text


def test_sites_that_differ_are_wrong() -> None:
    one = Steps(parameters=1, ranks=1, plain=1.0, between=1.0, rounds=1.0, digest="a")
    other = Steps(parameters=1, ranks=1, plain=1.0, between=1.0, rounds=1.0, digest="b")
    assert not gpu_check.step_checks("two", {"east": one, "west": other})[-1].good
