"""The chart of accuracy over time."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from weightgrad.report import curves
from weightgrad.report.runs import Run

from . import fake_runs


def test_every_strategy_has_a_line_and_its_name(tmp_path: Path) -> None:
    groups = {}
    for name in ("baseline", "gaia", "weightgrad"):
        fake_runs.simulate(fake_runs.recipe(strategy=name, steps=40), tmp_path / name)
        groups[name] = [Run.read(tmp_path / name)]
    drawn = curves.draw(groups, title="a < b")
    tree = ElementTree.fromstring(drawn)
    paths = [e for e in tree.iter() if e.tag.endswith("path")]
    assert len(paths) == 3
    assert all(len(e.attrib["d"].split("L")) > 2 for e in paths)
    words = [e.text for e in tree.iter() if e.tag.endswith("text")]
    assert {"baseline", "gaia", "weightgrad", "a < b"} <= set(words)


def test_nothing_evaluated_is_no_chart() -> None:
    assert curves.draw({}, title="none") == ""
