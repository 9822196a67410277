"""How the native library is found, compiled and done without."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from weightgrad import kernels
from weightgrad.errors import NativeError
from weightgrad.kernels import build, native

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler on this machine")

REPORT = "from weightgrad import kernels; print(kernels.status())"


def report_in(cache: Path, path: str) -> str:
    """What a fresh process says of its kernels."""
    environment = {"XDG_CACHE_HOME": str(cache), "HOME": str(cache), "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", REPORT], capture_output=True, text=True, env=environment, check=True)
    return done.stdout.strip()


@needs_compiler
def test_compiled_once_into_the_cache_by_many_processes_at_once(tmp_path: Path) -> None:
    path = str(Path(str(shutil.which("cc"))).parent)
    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(lambda _: report_in(tmp_path, path), range(4)))
    assert all(line.startswith("native") and "compiled on this machine" in line for line in said)
    files = [p.name for p in (tmp_path / "weightgrad").iterdir() if not p.name.startswith(".lock")]
    assert files == [f"kernels-{build.source_hash()}-{build.library_name()}"]


def test_without_a_compiler_the_reference_works_and_say_why(tmp_path: Path) -> None:
    said = report_in(tmp_path, str(tmp_path))
    assert said.startswith("reference (torch): no native library: no C compiler")


@needs_compiler
def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "weightgrad").write_text("a file where the folder should be")
    said = report_in(tmp_path, str(Path(str(shutil.which("cc"))).parent))
    assert said.startswith("reference (torch): no native library")


@needs_compiler
def test_the_library_in_the_wheel_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "kernels"
    package.mkdir()
    built, _ = native._find()  # compiling once more would show nothing that the test above does not
    assert built is not None
    shutil.copy(built._name, package / build.library_name())
    monkeypatch.setattr(native, "__file__", str(package / "native.py"))
    library, found = native._find()
    assert library is not None
    assert found.origin == "wheel"


def test_a_failing_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "cc"
    script.write_text("#!/bin/sh\necho 'this compiler is broken' >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(build, "find_compiler", lambda: str(script))
    with pytest.raises(build.BuildError, match="this compiler is broken"):
        build.compile_library(tmp_path / "lib.so")
    assert not (tmp_path / "lib.so").exists()


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(NativeError, match="there are native, avx2, portable, reference"), kernels.use("gpu"):
        pass


def test_flags_keep_results_equal_everywhere() -> None:
    assert "-ffp-contract=off" in build.FLAGS
    assert not [flag for flag in (*build.FLAGS, *build.AVX2_FLAGS) if "march" in flag or "fast-math" in flag]
