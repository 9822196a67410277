"""What `pyproject.toml` says about the package: its version, entry points, dependencies and files."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import weightgrad

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="Python 3.10 has no tomllib")

ROOT = Path(__file__).parents[2]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
COMMANDS: dict[str, str] = PROJECT["entry-points"]["weightgrad.commands"]
EXCEPT = {"torch"}  # constraints-oldest.txt says why
NOT_INSTALLED = {"mypy", "pytest-cov", "ruff", "types-pyyaml"}  # scripts/test-oldest checks neither style nor coverage
NOT_INSTALLED |= {"accelerate", "lightning", "peft", "transformers", "triton"}  # nor integrations, nor GPUs


def pins(name: str) -> dict[str, str]:
    """The versions of a constraints file, by the normalized name of the package."""
    lines = (ROOT / name).read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normalized(package): version for package, version in pairs}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def bounds(requirements: list[str]) -> dict[str, str]:
    """The lower bound of each requirement."""
    bare = [requirement.split(";")[0] for requirement in requirements]
    found = [re.fullmatch(r"([\w.-]+)>=([\w.]+)", requirement) for requirement in bare]
    assert all(found), requirements
    return {normalized(match[1]): match[2] for match in found if match}


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without zeros at the end: 6 and 6.0 are the same."""
    return tuple(int(number) for number in re.sub(r"(\.0)+$", "", version).split("."))


def test_the_version_is_written_once() -> None:
    assert weightgrad.__version__ == importlib.metadata.version("weightgrad")
    files = ROOT.glob("weightgrad/**/*.py")
    assert not [path for path in files if f'"{PROJECT["version"]}"' in path.read_text()]


def test_the_version_of_the_documents_is_that_of_the_package() -> None:
    tags = re.findall(r"weightgrad:(\d[\w.]*)", (ROOT / "deploy" / "Dockerfile").read_text())
    assert set(tags) == {PROJECT["version"]}
    citation = ROOT / "CITATION.cff"
    if citation.exists():
        assert re.findall(r"^version: *\"?([\w.]+)", citation.read_text(), flags=re.M) == [PROJECT["version"]]


def test_the_package_says_who_made_it_and_where_it_is() -> None:
    assert PROJECT["authors"]
    assert {"Homepage", "Documentation", "Repository", "Changelog", "Issues"} == PROJECT["urls"].keys()
    assert all(url.startswith("https://") for url in PROJECT["urls"].values())
    assert (ROOT / PROJECT["readme"]).exists()
    assert all((ROOT / name).exists() for name in PROJECT["license-files"])


@pytest.mark.parametrize("target", [*PROJECT["scripts"].values(), *COMMANDS.values()])
def test_every_entry_point_loads(target: str) -> None:
    assert callable(importlib.metadata.EntryPoint("name", target, "group").load())


def test_commands_are_sorted() -> None:
    assert list(COMMANDS) == sorted(COMMANDS)


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    oldest = pins("constraints-oldest.txt")
    wanted = {**bounds(PROJECT["dependencies"]), **bounds(PROJECT["optional-dependencies"]["dev"])}
    for name, version in wanted.items():
        if name not in EXCEPT | NOT_INSTALLED:
            assert release(oldest[name]) == release(version), name


def test_what_the_scripts_install_is_pinned_and_allowed() -> None:
    pinned = pins("constraints.txt")
    extras = PROJECT["optional-dependencies"]
    wanted = {**bounds(PROJECT["dependencies"]), **bounds(extras["dev"]), **bounds(extras["demo"])}
    for name, version in wanted.items():
        assert release(pinned[name]) >= release(version), name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, built without a network."""
    pytest.importorskip("setuptools", minversion="77", reason="building a wheel without a network needs setuptools")
    out, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "recipes", source / "recipes")
    shutil.copytree(ROOT / "weightgrad", source / "weightgrad", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--wheel-dir", str(out), str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_a_wheel_has_every_file_that_the_code_reads(wheel: Path) -> None:
    names = {re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", name) for name in zipfile.ZipFile(wheel).namelist()}
    tracked = subprocess.run(["git", "ls-files", "weightgrad"], cwd=ROOT, capture_output=True, text=True, check=False)
    files = tracked.stdout.split() or [
        str(path.relative_to(ROOT))
        for path in ROOT.glob("weightgrad/**/*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    ]
    assert sorted(set(files) - names) == []
    recipes = {f"weightgrad/lab/recipes/shipped/{path.name}" for path in ROOT.glob("recipes/*.yaml")}
    assert recipes
    assert {name for name in names if name.endswith(".yaml")} == recipes, "each recipe once"
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]
