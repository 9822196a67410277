"""A room imports from the rooms above it, never from those below."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "weightgrad"
ROOMS = [
    {"errors", "units", "ledger"},
    {"kernels"},
    {"codecs"},
    {"wire"},
    {"site"},
    {"wan"},
    {"sim"},
    {"runtime"},
    {"emulate"},
    {"train"},
    {"report"},
    {"cli"},
]
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def floor(room: str) -> int:
    (place,) = [i for i, rooms in enumerate(ROOMS) if room in rooms]
    return place


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = [node.module]
            if node.module == "weightgrad":
                names = [f"weightgrad.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("weightgrad.")}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_from_above(path: Path) -> None:
    own = room_of(path)
    if own in ("__init__", "__main__"):
        return
    wrong = {room for room in imported_rooms(path) if room == "__main__" or floor(room) > floor(own)}
    assert not wrong, f"{path.relative_to(PACKAGE)} must not import from {wrong}"


def test_every_file_is_in_a_room() -> None:
    for path in FILES:
        if room_of(path) not in ("__init__", "__main__"):
            floor(room_of(path))


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
