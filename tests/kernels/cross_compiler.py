"""A compiler for ARM and an emulator for what it makes: those on the PATH, or Debian's, given to a CI machine."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
_PACKAGES = ("gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross", "qemu-user")
_APT = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=2")
_ONE_AT_A_TIME = Path(tempfile.gettempdir()) / "weightgrad-tests-cross-compiler.lock"
_SECONDS = 300


@cache
def arm_tools() -> tuple[str, str]:
    """Compiler and emulator; skips the test without. Nothing is installed but where CI=true and root say it may be."""
    with _ONE_AT_A_TIME.open("w") as lock:  # tests run in several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        why = _installed() if _missing() else ""
    if missing := _missing():
        pytest.skip(f"no {' and no '.join(missing)} on the PATH to try the NEON kernels with; {why}")
    return COMPILER, EMULATOR


def _missing() -> list[str]:
    return [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]


def _installed() -> str:
    """Try to, and say why not."""
    if os.environ.get("CI") != "true" or os.geteuid() != 0:
        return f"install {' '.join(_PACKAGES)}, or run as root with CI=true"
    if shutil.which("apt-get") is None:
        return "there is no apt-get to install them with"
    for order in (("update",), ("install", "-y", "--no-install-recommends", *_PACKAGES)):
        try:
            subprocess.run([*_APT, *order], check=True, capture_output=True, text=True, timeout=_SECONDS)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            return f"apt-get {order[0]} failed: {(error.stderr or str(error)).strip().splitlines()[-1:]}"
    return "apt-get put none there"
