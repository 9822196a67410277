"""locked.txt and locked-docs.txt: everything that the scripts install has a hash, and pip takes nothing else."""

from __future__ import annotations

import importlib.util
import platform
import re
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
ENTRY = re.compile(r"(\S+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n")


@pytest.fixture(name="lock", scope="module")
def fixture_lock() -> ModuleType:
    found = importlib.util.spec_from_file_location("lock", ROOT / "scripts" / "lock.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def entries(name: str) -> dict[str, str]:
    """The version of each package of a locked file, which must have nothing else but comments."""
    text = re.sub(r"^#.*\n", "", (ROOT / name).read_text(), flags=re.MULTILINE)
    assert ENTRY.sub("", text) == ""
    found = [(normalized(match[1]), match[2]) for match in ENTRY.finditer(text)]
    assert len(dict(found)) == len(found)
    return dict(found)


def pinned(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    found = [(normalized(line.split("==")[0]), line.split("==")[1]) for line in lines]
    assert len(dict(found)) == len(found), "a package is pinned twice"
    return dict(found)


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-docs.txt"])
def test_the_locked_versions_are_those_that_are_pinned(name: str, lock: ModuleType) -> None:
    wanted = {package: version for package, version in pinned(name).items() if package != "torch"}
    assert entries(lock.FILES[name]) == wanted, "run scripts/lock.py"


def test_only_the_docs_have_packages_beside_the_others() -> None:
    assert not entries("locked.txt").keys() & entries("locked-docs.txt").keys()


def needed(*extras: str) -> set[str]:
    """What weightgrad and its requirements require in this environment, where it is installed."""
    found: set[str] = set()
    waiting = [("weightgrad", extra) for extra in extras]
    seen = set(waiting)
    while waiting:
        name, extra = waiting.pop()
        try:
            wanted = [Requirement(one) for one in requires(name) or ()]
        except PackageNotFoundError:
            continue
        for one in wanted:
            if one.marker is None or one.marker.evaluate({"extra": extra}):
                found.add(normalized(one.name))
                more = {(normalized(one.name), each) for each in ("", *one.extras)} - seen
                seen |= more
                waiting += more
    return found


def test_whatever_the_extra_dev_brings_is_locked(lock: ModuleType) -> None:
    """The scripts install locked.txt and nothing that it lacks, but torch and the libraries of its build."""
    if not lock.covers():
        pytest.skip("locked.txt is for another Python or machine")
    builds = {name for name in needed("", "dev") if name.startswith(("nvidia-", "cuda-"))}
    assert needed("", "dev") - builds - {"torch"} <= entries("locked.txt").keys()
    assert len(needed("", "dev")) > 90


def test_editable_installs_find_a_locked_setuptools() -> None:
    """`--no-build-isolation` builds with what is there; an isolated build would fetch one without a hash."""
    wanted = Requirement(
        next(line for line in (ROOT / "pyproject.toml").read_text().split('"') if "setuptools>" in line)
    )
    assert wanted.specifier.contains(entries("locked.txt")["setuptools"])


class _Sys(NamedTuple):
    """What `covers` reads of sys."""

    version_info: object = SimpleNamespace(major=3, minor=11)
    abiflags: str = ""
    implementation: object = SimpleNamespace(name="cpython")


@pytest.mark.parametrize(
    ("python", "machine", "system", "libc", "wanted"),
    [
        (_Sys(version_info=SimpleNamespace(major=3, minor=10)), "x86_64", "Linux", ("glibc", "2.36"), False),
        (_Sys(abiflags="t"), "x86_64", "Linux", ("glibc", "2.36"), False),
        (_Sys(implementation=SimpleNamespace(name="pypy")), "x86_64", "Linux", ("glibc", "2.36"), False),
        (_Sys(), "ppc64le", "Linux", ("glibc", "2.36"), False),
        (_Sys(), "x86_64", "Darwin", ("", ""), False),
        (_Sys(), "x86_64", "Linux", ("musl", "1.2.4"), False),
        (_Sys(), "x86_64", "Linux", ("glibc", "2.17"), False),
        (_Sys(), "aarch64", "Linux", ("glibc", "2.36"), True),
    ],
    ids=["3.10", "free-threaded", "pypy", "ppc64le", "macos", "musl", "old", "covered"],
)
def test_which_machines_are_covered(
    python: _Sys,
    machine: str,
    system: str,
    libc: tuple[str, str],
    wanted: bool,
    lock: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lock, "sys", python)
    for name, value in (("machine", machine), ("system", system), ("libc_ver", libc)):
        monkeypatch.setattr(platform, name, lambda value=value: value)
    assert lock.covers() is wanted


def test_pip_refuses_a_file_with_another_hash(tmp_path: Path) -> None:
    """With the options of scripts/_environment, and an entry of locked.txt as it stands there."""
    script = (ROOT / "scripts" / "_environment").read_text()
    (options,) = re.findall(r'^ *"\$\{install\[@\]\}" (.*locked\.txt)$', script, re.MULTILINE)
    match = next(one for one in ENTRY.finditer((ROOT / "locked.txt").read_text()) if one[1] == "absl-py")
    (tmp_path / "locked.txt").write_text(match[0])
    name = f"absl_py-{match[2]}"
    with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: absl-py\nVersion: {match[2]}\n")
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    offline = ["--isolated", "install", "--dry-run", "--ignore-installed", "--no-index", "--find-links", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *offline, *options.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
