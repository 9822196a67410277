"""Every kind of chart, drawn by matplotlib with small data."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import pytest
from charts import Accuracies, Band, Bar, Bars, Chart, Dot, Dots, Lines

AXES: Any = {"title": "a < b", "x": "across", "y": "up"}
NEAR = [Dot(1000 + n, 70 + n / 100, 0.5, f"dot {n}") for n in range(3)]
CHARTS: dict[str, Chart] = {
    "lines": Lines(**AXES, series={"baseline": [(1, 2), (10, 3)], "weightgrad": [(2, 2)], "auto": [(1, 2), (10, 3)]}),
    "log lines": Lines(**AXES, series={"a": [(1, 2), (10, 300)]}, log_y=True),
    "accuracies": Accuracies(
        **AXES, series={"auto": Band(x=[1.0, 10.0], mean=[50.0, 60.0], low=[49.0, 58.0], high=[51.0, 62.0])}
    ),
    "dots": Dots(**AXES, series={"a": NEAR}, horizontal={"reference": 71}, vertical={"goal": 3000}),
    "bars": Bars(**AXES, bars=[Bar("one", 3.0, 2.0), Bar("two", 0.5, 1.0)], first="here", second="there", mark="same"),
}
TEXTS = {
    "lines": ["baseline", "weightgrad", "auto"],
    "log lines": ["a"],
    "accuracies": ["auto"],
    "dots": ["dot 0", "dot 1", "dot 2", "reference", "goal"],
    "bars": ["one", "two", "here", "there", "same", "3.00", "0.50"],
}
EMPTY = [
    Lines(**AXES, series={"a": [], "b": [(1.0, float("nan"))]}),
    Accuracies(**AXES, series={}),
    Dots(**AXES, series={"a": []}),
    Bars(**AXES, bars=[], first="", second="", mark=""),
]


@pytest.fixture
def _matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; it is in the extra `bench`")


@pytest.mark.usefixtures("_matplotlib")
@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_an_svg_file_with_its_labels(name: str) -> None:
    drawn = CHARTS[name].svg()
    root = ElementTree.fromstring(drawn)
    assert root.tag.endswith("svg")
    texts = ["".join(element.itertext()) for element in root.iter() if element.tag.endswith("}text")]
    assert {*TEXTS[name], "a < b", "across", "up"} <= set(texts)
    assert "prefers-color-scheme: dark" in drawn
    assert drawn == CHARTS[name].svg()  # nothing in it depends on the time


@pytest.mark.usefixtures("_matplotlib")
def test_labels_keep_clear_of_each_other() -> None:
    root = ElementTree.fromstring(CHARTS["dots"].svg())
    places = {
        "".join(element.itertext()): element.get("transform")
        for element in root.iter()
        if element.tag.endswith("}text")
    }
    assert len({places[dot.label] for dot in NEAR}) == len(NEAR)


@pytest.mark.parametrize("chart", EMPTY, ids=lambda chart: type(chart).__name__)
def test_a_chart_without_data_is_empty(chart: Chart) -> None:
    assert chart.empty


@pytest.mark.parametrize("name", CHARTS)
def test_the_data_of_a_chart_is_kept_as_json(name: str) -> None:
    kept = json.loads(json.dumps(CHARTS[name].to_dict()))
    assert kept["kind"] == type(CHARTS[name]).__name__
    assert not CHARTS[name].empty
