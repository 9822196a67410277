"""The NEON units, cross-compiled and run under qemu-user, against the portable code there and on this machine."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

from weightgrad.kernels import build

from .cross_compiler import arm_tools

DRIVER = Path(__file__).with_name("neon_driver.c")
UNITS = ("bucket", "columns", "select", "isa")  # what the driver calls
ON_ARM = platform.machine() in build.ARM
FLAGS = [*(flag for flag in build.FLAGS if flag not in ("-fPIC", "-O3")), "-O2", "-Werror", f"-I{build.SOURCES}"]


def run(command: list[str]) -> str:
    """What a command prints."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def built(compiler: str, target: Path, *extra: str) -> str:
    """The path of the driver, linked with the kernels that it calls."""
    units = [str(s) for s in sorted(build.SOURCES.glob("*.c")) if s.stem.removesuffix("_neon") in UNITS]
    run([compiler, *FLAGS, *extra, str(DRIVER), *units, "-lm", "-o", str(target)])
    return str(target)


def test_neon_gives_the_bytes_of_the_portable_code(tmp_path: Path) -> None:
    if ON_ARM:
        isa, *cases = run([built(build.find_compiler(), tmp_path / "driver")]).splitlines()
    else:
        compiler, emulator = arm_tools()
        isa, *cases = run([emulator, built(compiler, tmp_path / "driver", "-static")]).splitlines()
    assert isa == "isa 1", "the NEON units were not used"
    assert len(cases) > 900
    assert {case.split()[0] for case in cases} == {"quantize", "scan", "signs"}
    different = [case for case in cases if case.split()[-1] != case.split()[-2]]
    assert not different, f"{len(different)} of {len(cases)} differ, first: {different[0]}"
    if not ON_ARM:
        here = run([built(build.find_compiler(), tmp_path / "here", "-DWG_PORTABLE_ONLY")]).splitlines()
        assert here == ["isa 0", *cases], "ARM and this machine differ"


def test_all_sources_are_right_for_arm() -> None:
    compiler = build.find_compiler() if ON_ARM else arm_tools()[0]
    run([compiler, *FLAGS, "-fsyntax-only", *map(str, sorted(build.SOURCES.glob("*.c")))])
