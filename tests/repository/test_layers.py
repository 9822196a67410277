"""A package imports from the packages above it, never from those below; the library never imports the laboratory."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "weightgrad"
LAYERS = [
    {"errors", "units", "call_syntax", "event_log", "extras", "machine"},
    {"kernels"},
    {"codecs"},
    {"wire"},
    {"core"},
    {"local"},
    {"quantized"},
    {"runtime"},
    {"integrations"},
    {"cli"},
    {"lab.data", "lab.models"},
    {"lab.sim", "lab.emulate"},
    {"lab.recipes"},
    {"lab.run"},
    {"lab.chaos"},
    {"lab.report"},
    {"lab.bench", "lab.plan", "lab.page"},
    {"lab.cli"},
]
# The two sides of the wire know each other only by messages.
STRANGERS = [("core/site", "core.server"), ("core/server", "core.site")]
STRANGERS += [("runtime/site", "runtime.server"), ("runtime/server", "runtime.site")]
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE or "__" not in path.name]


def package_of(parts: tuple[str, ...]) -> str:
    """`core` of core/site/state.py, `lab.sim` of lab/sim/world.py."""
    return ".".join(parts[: 2 if parts[0] == "lab" else 1]).removesuffix(".py")


def layer(package: str) -> int:
    (place,) = [i for i, packages in enumerate(LAYERS) if package in packages]
    return place


def imported_packages(path: Path) -> set[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            whole = node.module in ("weightgrad", "weightgrad.lab")
            names += [f"{node.module}.{alias.name}" for alias in node.names] if whole else [node.module]
    return {package_of(tuple(name.split(".")[1:])) for name in names if name.startswith("weightgrad.")}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_from_above(path: Path) -> None:
    parts = path.relative_to(PACKAGE).parts
    if parts == ("lab", "__init__.py"):
        return
    wrong = {name for name in imported_packages(path) if layer(name) > layer(package_of(parts))}
    assert not wrong, f"{'/'.join(parts)} must not import from {wrong}"


def test_the_library_never_imports_the_laboratory() -> None:
    library = [path for path in sorted(PACKAGE.rglob("*.py")) if "lab" not in path.relative_to(PACKAGE).parts]
    assert not [path for path in library for name in imported_packages(path) if name.startswith("lab")]


@pytest.mark.parametrize(("own", "other"), STRANGERS)
def test_a_site_and_the_server_import_nothing_of_each_other(own: str, other: str) -> None:
    files = sorted((PACKAGE / own).glob("*.py"))
    assert len(files) > 5
    wrong = [path.name for path in files if f"weightgrad.{other}" in path.read_text()]
    assert not wrong, f"these files of {own} import from {other}: {', '.join(wrong)}"


@pytest.mark.parametrize("use", ["import weightgrad", "import weightgrad; weightgrad.join", "import weightgrad.cli"])
def test_using_the_library_loads_nothing_of_the_laboratory(use: str) -> None:
    found = f"{use}; import sys; print(*(name for name in sys.modules if name.startswith('weightgrad.lab')))"
    done = subprocess.run([sys.executable, "-c", found], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_build_needs_only_the_standard_library() -> None:
    # setup.py runs it where nothing is installed yet
    allowed = {"__future__", "hashlib", "os", "platform", "shutil", "subprocess", "sys", "tempfile"}
    allowed |= {"concurrent.futures", "pathlib"}
    tree = ast.parse((PACKAGE / "kernels" / "build.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom):
            assert node.module in allowed


def test_no_file_whose_name_explains_nothing() -> None:
    bad = {"utils.py", "helpers.py", "common.py", "misc.py"}
    assert not [p for p in PACKAGE.parent.rglob("*.py") if p.name in bad and not {".venv", "runs"} & set(p.parts)]
