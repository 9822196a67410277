"""The chart of accuracy over time."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

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


def test_several_seeds_are_one_line_in_a_band(tmp_path: Path) -> None:
    runs = []
    for seed in (0, 1):
        fake_runs.simulate(fake_runs.recipe(strategy="gaia", steps=40, seed=seed), tmp_path / str(seed))
        runs.append(Run.read(tmp_path / str(seed)))
    tree = ElementTree.fromstring(curves.draw({"gaia": runs}, title="both"))
    (line,) = (e.attrib["d"] for e in tree.iter() if e.tag.endswith("path"))
    (band,) = (e.attrib["points"].split() for e in tree.iter() if e.tag.endswith("polygon"))
    heights = [float(place.split()[1]) for place in line.replace("M", "L").split("L")[1:]]
    above, below = band[1::2][: len(heights)], band[1::2][len(heights) :][::-1]
    assert all(float(top) <= at <= float(bottom) for top, at, bottom in zip(above, heights, below, strict=True))
    assert any(float(top) < float(bottom) for top, bottom in zip(above, below, strict=True))
    assert "mean of 2 seeds" in " ".join(e.text or "" for e in tree.iter())


def test_nothing_evaluated_is_no_chart() -> None:
    assert curves.draw({}, title="none") == ""


@given(st.lists(st.floats(0, 400), max_size=12).map(sorted))
def test_names_stay_apart_and_above_the_axis(heights: list[float]) -> None:
    places = curves.apart(heights, 14, 372)
    assert all(after - before >= 14 - 1e-9 for before, after in pairwise(places))
    assert all(place <= 372 for place in places)


def test_names_with_room_stay_where_their_lines_end() -> None:
    assert curves.apart([10.0, 40.0, 41.0, 300.0], 14, 372) == [10.0, 40.0, 54.0, 300.0]
    assert curves.apart([360.0, 365.0], 14, 372) == [358.0, 372]
