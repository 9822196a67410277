"""`weightgrad data fetch` says where the data is, or what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from weightgrad.errors import DataError
from weightgrad.lab.cli import data
from weightgrad.lab.data import fetch
from weightgrad.lab.data.sources import Report


def test_fetch_shows_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fake(name: str, directory: Path | None, *, progress: Report) -> Path:
        asked.append((name, directory))
        progress("a place", 1, 2)
        return tmp_path / name

    monkeypatch.setattr(fetch, "fetch", fake)
    result = CliRunner().invoke(data.app, ["fetch", "mnist", "--directory", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert f"mnist is in {tmp_path / 'mnist'}; its checksums are right." in result.output
    assert asked == [("mnist", tmp_path)]


def test_fetch_of_what_does_not_exist() -> None:
    result = CliRunner().invoke(data.app, ["fetch", "imagenet"])
    assert isinstance(result.exception, DataError)
    assert "there are cifar10" in str(result.exception)
