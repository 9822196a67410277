"""The tables about WeightGrad's own parts: what each costs, and what the threshold brings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import table_ablation
import table_threshold
from table_threshold import Point, value_at
from tables import Options

from weightgrad.core import parts
from weightgrad.core.parts.triggers import Significance
from weightgrad.errors import RunError
from weightgrad.lab.run import simulation as train_run


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(name="tiny", command="python tiny", quick=True, out=tmp_path, runs=tmp_path / "runs", jobs=0)


def again(*_: object, **__: object) -> object:
    raise RunError("it was made already")


def test_the_ablation_is_made_and_goes_on_where_it_stopped(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = table_ablation.Plan(steps=2, seeds=1, batch=8, evaluate_on=20, data="digits", model="lenet-digits")
    document = table_ablation.make(plan, options)
    paths = document.write(options)
    text = paths[0].read_text()
    assert not document.failures
    assert "master weights %" in text
    (rows,) = (table.rows for table in document.tables)
    by_name = {row["name"]: row for row in rows}
    assert set(by_name) == set(table_ablation.ROWS)
    assert by_name["weightgrad-paper"]["master"] is not None
    assert by_name["fp32 weights"]["master"] is None, "it is judged by its master weights"
    assert by_name["fp32 LAN gradients"]["lan_mb"] > 2 * by_name["weightgrad-paper"]["lan_mb"]
    assert by_name["fp32 WAN"]["wan_mb"] > by_name["weightgrad-paper"]["wan_mb"]
    assert json.loads(paths[1].read_text())["claims"]
    monkeypatch.setattr(train_run, "simulate", again)
    assert not table_ablation.make(plan, options).failures


def test_a_part_of_the_ablation_is_a_table_too(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = table_ablation.Plan(steps=1, seeds=1, batch=8, evaluate_on=20, data="digits", model="lenet-digits")
    real, made = train_run.simulate, 0

    def two_runs(*args: object, **named: object) -> object:
        nonlocal made
        made += 1
        return real(*args, **named) if made <= 2 else again()  # type: ignore[arg-type]

    monkeypatch.setattr(train_run, "simulate", two_runs)
    document = table_ablation.make(plan, options)
    assert len(document.failures) == len(table_ablation.ROWS) - 2
    assert [row["name"] for row in document.tables[0].rows] == ["baseline", "weightgrad-paper"]
    assert "What failed" in document.write(options)[0].read_text()


def test_the_threshold_is_compared_at_equal_bytes(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = table_threshold.Plan(steps=26, seeds=1, evaluate_on=20)
    document = table_threshold.make(plan, options)
    text = document.write(options)[0].read_text()
    assert not document.failures
    rows = {row["name"]: row for row in document.tables[0].rows}
    assert rows["every(2)"]["wan_mb"] > rows["every(8)"]["wan_mb"]
    assert rows["every(4)"]["between"] == pytest.approx(4.0)
    assert rows["every(4)"]["last"] is None
    falling = parts.parse("trigger", table_threshold.SIGNIFICANT["G from 4, T = 8"])
    assert isinstance(falling, Significance)
    assert rows["G from 4, T = 8"]["first"] == falling.threshold
    assert falling.low <= rows["G from 4, T = 8"]["last"] < falling.threshold, "the learning rate falls"
    assert rows["G = 4, T = 8"]["last"] == 4.0
    assert "than every(H) with the same bytes" in text
    monkeypatch.setattr(train_run, "simulate", again)
    assert not table_threshold.make(plan, options).failures


def test_values_between_two_points() -> None:
    points = [Point(16.0, 3.0), Point(1.0, 1.0), Point(4.0, 2.0)]
    assert value_at(points, 2.0) == pytest.approx(1.5)
    assert value_at(points, 16.0) == pytest.approx(3.0)
    assert value_at(points, 17.0) is None
    assert value_at(points, 0.5) is None
