"""A browser to open pages with: the one that is here, or Debian's, which a CI machine is given."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_APT = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=2")
_ONE_AT_A_TIME = Path(tempfile.gettempdir()) / "weightgrad-tests-browser.lock"
_SECONDS = 300


@cache
def browser() -> str:
    """Its path; skips the test where there is none. Nothing is installed but where CI=true and root say it may be."""
    with _ONE_AT_A_TIME.open("w") as lock:  # tests run in several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        why = _installed() if _found() is None else ""
    if (found := _found()) is None:
        pytest.skip(f"no chromium or chrome on the PATH to open the report with; {why}")
    return found


def _found() -> str | None:
    return next(filter(None, map(shutil.which, _NAMES)), None)


def _installed() -> str:
    """Try to, and say why not."""
    if os.environ.get("CI") != "true" or os.geteuid() != 0:
        return "install one, or run as root with CI=true"
    if shutil.which("apt-get") is None:
        return "there is no apt-get to install one with"
    for order in (("update",), ("install", "-y", "--no-install-recommends", "chromium")):
        try:
            subprocess.run([*_APT, *order], check=True, capture_output=True, text=True, timeout=_SECONDS)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            return f"apt-get {order[0]} failed: {(error.stderr or str(error)).strip().splitlines()[-1:]}"
    return "apt-get put none there"
