"""A library that somebody else could have written is not loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weightgrad.kernels import build, native


@pytest.fixture(name="compiled")
def fixture_compiled(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What was compiled; compiling writes a text instead."""
    made: list[Path] = []

    def write(target: Path) -> None:
        made.append(target)
        target.write_text("ours")
        target.chmod(0o755)

    monkeypatch.setattr(build, "compile_library", write)
    return made


def folder_in(tmp_path: Path, mode: int = 0o700) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    return folder


def test_a_cache_of_our_own_is_used_again(tmp_path: Path, compiled: list[Path]) -> None:
    folder = folder_in(tmp_path)
    assert native.compiled_in_cache(folder) == native.compiled_in_cache(folder)
    assert len(compiled) == 1


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_directory_that_others_may_write_is_not_trusted(tmp_path: Path, compiled: list[Path], mode: int) -> None:
    folder = folder_in(tmp_path, mode)
    foreign = folder / f"kernels-{build.source_hash()}-{build.library_name()}"
    foreign.write_text("theirs")
    found = native.compiled_in_cache(folder)
    assert found.parent != folder
    assert found.read_text() == "ours"
    assert found.parent.stat().st_mode & 0o077 == 0
    assert compiled == [found]


def test_a_library_that_others_may_write_is_not_trusted(tmp_path: Path, compiled: list[Path]) -> None:
    folder = folder_in(tmp_path)
    path = native.compiled_in_cache(folder)
    path.chmod(0o777)
    assert native.compiled_in_cache(folder) != path
    assert len(compiled) == 2


def test_what_belongs_to_another_user_is_not_trusted(
    tmp_path: Path, compiled: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_in(tmp_path)
    path = native.compiled_in_cache(folder)
    if os.getuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert native.compiled_in_cache(folder) != path
