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


def test_the_whole_check_as_on_two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything from the command line to the file, with all its processes, on the CPU with a tiny model."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: f"pretended {place}")
    whole = gpu_check.checks
    monkeypatch.setattr(gpu_check, "checks", lambda kind, count, plan, wait: whole("cpu", count, TINY, lambda: None))
    out = tmp_path / "gpu-check.md"
    code = gpu_check.main(["--out", str(out)])
    text = out.read_text()
    assert code == 0, text
    assert "devices: pretended 0, pretended 1" in text
    assert "WRONG" not in text
    for line in ("one site, FSDP2, east", "on 2 rank(s)", "both on one device, global models", "each on its own, west"):
        assert line in text


def test_what_fails_is_a_line_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kernel that does not compile, memory that runs out, a site that ends: the file is written all the same."""

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("PassManager::run failed\n| at line 3")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: "pretended")
    monkeypatch.setattr(gpu_check, "run_sites", broken)
    monkeypatch.setattr(gpu_check, "_bandwidth", broken)
    agrees = gpu_check._agrees
    monkeypatch.setattr(gpu_check, "_agrees", lambda spec, *more: broken() if spec == "sign()" else agrees(spec, *more))
    whole = gpu_check.checks
    monkeypatch.setattr(gpu_check, "checks", lambda kind, count, plan, wait: whole("cpu", count, TINY, lambda: None))
    assert gpu_check.main(["--out", str(tmp_path / "found.md")]) == 1
    text = (tmp_path / "found.md").read_text()
    failed = "RuntimeError: PassManager::run failed \\| at line 3 | WRONG |"
    assert f"| `sign()` | {failed}" in text
    assert f"| one site, one rank | {failed}" in text
    assert "| `onebit()` | same bytes | ok |" in text
    assert text.count("| WRONG |") == 1 + len(gpu_check.SPECS) + 2
    assert "test_gpu_check.py" in capsys.readouterr().err, "where it failed"


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
