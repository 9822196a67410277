"""Pictures drawn by code: the same from the same seed, in the folders that `folder` reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from weightgrad.errors import DataError
from weightgrad.lab.cli import data
from weightgrad.lab.data import drawing, folder
from weightgrad.lab.data.drawing import DrawPlan


def test_folders_can_be_read(tmp_path: Path) -> None:
    plan = DrawPlan(classes=9, train=2, test=1, size=32, sites=("east", "west"))
    assert drawing.draw(tmp_path / "new", plan) == 2 * 9 * 3
    found = folder.find(tmp_path / "new")
    assert found.site_names == ("east", "west")
    assert len(found.class_names) == 9
    assert (len(found.train_paths), len(found.test_paths)) == (36, 18)
    for path in found.train_paths:
        with Image.open(path) as image:
            assert 32 <= min(image.size) <= max(image.size) <= 48


def test_a_picture_depends_on_nothing_but_its_own_numbers(tmp_path: Path) -> None:
    drawing.draw(tmp_path / "few", DrawPlan(classes=3, train=1, test=1, size=16, ending="png"))
    drawing.draw(tmp_path / "many", DrawPlan(classes=5, train=2, test=1, size=16, ending="png"))
    drawing.draw(tmp_path / "other", DrawPlan(classes=3, train=1, test=1, size=16, ending="png", seed=1))
    for path in sorted((tmp_path / "few").glob("*/*/*")):
        own = np.asarray(Image.open(path))
        name = path.relative_to(tmp_path / "few")
        assert np.array_equal(own, np.asarray(Image.open(tmp_path / "many" / name)))
        assert not np.array_equal(own, np.asarray(Image.open(tmp_path / "other" / name)))


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    for wrong, message in (
        ({"classes": 1}, "1 classes"),
        ({"train": 0}, "at least 1"),
        ({"size": 4}, "4 pixels"),
        ({"ending": "gif"}, "'gif'"),
        ({"sites": ("train",)}, "'train'"),
        ({"sites": ("a/b",)}, "'a/b'"),
    ):
        with pytest.raises(DataError, match=message):
            DrawPlan(**wrong)
    (tmp_path / "something").touch()
    with pytest.raises(DataError, match="is not empty"):
        drawing.draw(tmp_path, DrawPlan())


def test_the_command(tmp_path: Path) -> None:
    given = ["draw", str(tmp_path / "new"), "--classes", "2", "--train", "1", "--test", "1", "--sites", "a, b"]
    result = CliRunner().invoke(data.app, given)
    assert result.exit_code == 0, result.output
    assert "8 pictures of 2 classes" in result.output
    assert folder.find(tmp_path / "new").site_names == ("a", "b")
