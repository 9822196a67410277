"""The numbers of a comparison, checked by hand."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from weightgrad.lab.report import comparison, comparison_table
from weightgrad.lab.report.comparison import compare, seconds_to, wan_bytes_to
from weightgrad.lab.report.number_text import ratio_text
from weightgrad.lab.report.runs import Run

from . import fake_runs


def run(strategy: str, curve: list[tuple[float, float | None]], *, seed: int = 0, **changes: Any) -> Run:
    """A run that was evaluated at these (times, accuracies)."""
    summary = {
        "status": "finished",
        "accuracy": curve[-1][1] if curve else None,
        "virtual_seconds": curve[-1][0] if curve else 0.0,
        "wan_bytes": 1000,
        "lan_bytes": 500,
        "waiting_share": 0.5,
    }
    evaluations = tuple({"t": t, "step": k, "accuracy": a, "wan_bytes": 7 * t} for k, (t, a) in enumerate(curve))
    header = {"strategy": strategy, "seed": seed, "recipe": {"strategy": {"name": strategy}, "seed": seed}}
    return Run(Path(), header, (), (), evaluations, (), (), (), (), "finished", summary | changes)


@pytest.mark.parametrize(
    ("curve", "target", "wanted"),
    [
        ([(0, 0.1), (10, 0.5)], 0.3, 5.0),
        ([(0, 0.1), (10, 0.5)], 0.5, 10.0),
        ([(0, 0.1), (10, 0.5)], 0.6, None),
        ([(4, 0.9)], 0.5, 4.0),  # at the first evaluation: there is nothing before it to start from
        ([(0, 0.0), (10, 0.4), (20, 0.2), (30, 0.6)], 0.5, 25.0),  # a dip: the best so far was 0.4
        ([(0, 0.0), (10, 0.5), (20, 0.2), (30, 0.6)], 0.5, 10.0),  # the first crossing counts
        ([(0, None), (10, 0.0), (20, 1.0)], 0.5, 15.0),
        ([], 0.5, None),
    ],
)
def test_seconds_to(curve: list[tuple[float, float | None]], target: float, wanted: float | None) -> None:
    assert seconds_to(run("any", curve).evaluations, target) == (None if wanted is None else pytest.approx(wanted))


def test_bytes_are_read_off_as_times_are() -> None:
    dips = run("any", [(0, 0.0), (10, 0.4), (20, 0.2), (30, 0.6)]).evaluations
    assert wan_bytes_to(dips, 0.5) == pytest.approx(7 * 25)
    assert wan_bytes_to(dips, 0.7) is None
    half = [{**line, "wan_bytes": line["wan_bytes"] / 2} for line in dips]
    other = replace(run("other", []), evaluations=tuple(half))
    never = run("never", [(0, 0.0), (10, 0.5)])
    groups = {"baseline": [run("baseline", [(0, 0.0), (100, 0.5)])], "other": [other], "never": [never]}
    found = compare(groups).rows
    # 99 % of 0.5: the baseline after 99 s of 7 bytes, the other on the line from its best, 0.4, to 0.6
    assert found[1].wan_ratio_to_accuracy == pytest.approx(7 * 99 / (3.5 * (20 + 10 * (0.495 - 0.4) / 0.2)))
    assert found[2].wan_ratio_to_accuracy == pytest.approx(99 / 9.9)
    assert compare(groups, target=0.6).rows[2].wan_ratio_to_accuracy is None


def test_means_spread_and_ratios() -> None:
    groups = {
        "baseline": [run("baseline", [(0, 0.0), (100, 0.8)], seed=s, wan_bytes=9000) for s in (0, 1)],
        "other": [
            run("other", [(0, 0.0), (10, 0.8)], seed=0, wan_bytes=100, lan_bytes=3, waiting_share=0.2),
            run("other", [(0, 0.0), (20, 0.9)], seed=1, wan_bytes=200, lan_bytes=4, waiting_share=0.4),
        ],
    }
    first, other = compare(groups).rows
    assert (first.speedup_to_accuracy, first.wan_ratio, first.accuracy_std) == (1.0, 1.0, 0.0)
    assert other.accuracy_mean == pytest.approx(0.85)
    assert other.accuracy_std == pytest.approx(0.1 / 2**0.5)
    assert other.difference_points == pytest.approx(5.0)
    assert other.virtual_seconds == 15
    assert (other.wan_bytes, other.wan_ratio) == (150, 60)
    assert other.lan_bytes == 4  # 3.5, rounded to even
    assert other.waiting_share == pytest.approx(0.3)
    # 99 % of 0.8: the baseline needs 99 s; these need 9.9 s and 20 * 0.792 / 0.9 s
    assert other.speedup_to_accuracy == pytest.approx((10 + 99 / 17.6) / 2)
    assert other.reached == 2


def test_one_seed_has_no_spread() -> None:
    assert compare({"baseline": [run("baseline", [(1, 0.5)])]}).rows[0].accuracy_std == 0


def test_speedup_of_the_seeds_that_get_there() -> None:
    groups = {
        "baseline": [run("baseline", [(0, 0.0), (100, 0.8)], seed=s) for s in (0, 1, 2)],
        "half": [run("half", [(0, 0.0), (10, a)], seed=s) for s, a in ((0, 0.8), (1, 0.5), (2, 0.8))],
        "never": [run("never", [(0, 0.0), (10, 0.5)], seed=s) for s in (0, 1, 2)],
    }
    made = compare(groups)
    _, half, never = made.rows
    assert half.reached == 2
    assert half.speedup_to_accuracy == pytest.approx(10)
    assert comparison_table.speedup_text(half) == "10.0× (2 of 3)"  # noqa: RUF001
    assert (never.reached, never.speedup_to_accuracy) == (0, None)
    assert any("no seed reached that accuracy (never)" in note for note in comparison_table.notes(made))


def test_given_target() -> None:
    groups = {
        "baseline": [run("baseline", [(0, 0.0), (100, 0.8)])],
        "other": [run("other", [(0, 0.0), (10, 0.4)])],
    }
    assert compare(groups).rows[1].speedup_to_accuracy is None
    assert compare(groups, target=0.4).rows[1].speedup_to_accuracy == pytest.approx(5)
    assert compare(groups, target=0.9).rows[0].speedup_to_accuracy is None


def test_a_seed_without_its_baseline_is_not_timed() -> None:
    groups = {
        "baseline": [run("baseline", [(0, 0.0), (100, 0.8)], seed=0)],
        "other": [run("other", [(0, 0.0), (10, 0.8)], seed=s) for s in (0, 1)],
    }
    row = compare(groups).rows[1]
    assert row.reached == 1
    assert row.speedup_to_accuracy == pytest.approx(10)


def test_baseline_is_first_and_the_rest_as_asked() -> None:
    groups = {name: [run(name, [(1, 0.5)])] for name in ("zeta", "alpha", "baseline", "mid")}
    made = compare(groups)
    assert [row.strategy for row in made.rows] == ["baseline", "zeta", "alpha", "mid"]
    assert made.against_baseline


def test_without_baseline_the_first_is_the_reference_and_that_is_said() -> None:
    made = compare({name: [run(name, [(1, 0.5)])] for name in ("zeta", "alpha")})
    assert made.reference == "zeta"
    note = comparison_table.notes(made)[0]
    assert note == "The strategy baseline is not among these: Δ, speedup and ratio are relative to zeta."


def test_runs_without_an_evaluation_or_a_byte() -> None:
    groups = {
        "baseline": [run("baseline", [], wan_bytes=0)],
        "other": [run("other", [(1, 0.5)], wan_bytes=0)],
    }
    first, other = compare(groups).rows
    assert (first.accuracy_mean, first.wan_ratio, other.difference_points) == (None, None, None)
    assert comparison_table.cells(first, "baseline")[1] == "–"  # noqa: RUF001
    assert compare({}).rows == ()


def test_top5_has_a_column_where_the_data_set_has_it() -> None:
    plain = run("baseline", [(1, 0.5)])
    with_top5 = replace(plain, summary={**plain.summary, "top5_accuracy": 0.875})
    assert not compare({"baseline": [plain]}).has_top5
    made = compare({"baseline": [with_top5], "other": [run("other", [(1, 0.25)])]})
    assert comparison_table.headers(made)[:3] == ("strategy", "accuracy %", "top-5 %")
    assert [row[2] for row in comparison_table.table_rows(made)] == ["87.50", "–"]  # noqa: RUF001
    page = comparison_table.markdown(made, title="t", command="c", machine="m")
    assert "| strategy | accuracy % | top-5 % |" in page
    assert "87.50" in page


def test_divergence_is_marked(tmp_path: Path) -> None:
    fake_runs.simulate(fake_runs.recipe(steps=10), tmp_path, status="diverged")
    made = compare({"weightgrad": [Run.read(tmp_path)]})
    assert comparison_table.cells(made.rows[0], "baseline")[0] == "weightgrad†"
    assert any("†: diverged" in note and "weightgrad 1 of 1" in note for note in comparison_table.notes(made))


def test_json_has_exactly_the_promised_keys() -> None:
    (row,) = compare({"baseline": [run("baseline", [(1, 0.5)])]}).as_list()
    assert list(row) == [
        *("strategy", "accuracy_mean", "accuracy_std", "virtual_seconds", "speedup_to_accuracy"),
        *("wan_bytes", "wan_ratio", "lan_bytes", "waiting_share"),
    ]
    json.dumps(row, allow_nan=False)


def test_groups_by_strategy_and_by_recipe(tmp_path: Path) -> None:
    read = []
    for place, (strategy, steps, seed) in enumerate([("gaia", 5, 1), ("gaia", 5, 0), ("dgc", 5, 0), ("gaia", 7, 0)]):
        fake_runs.simulate(fake_runs.recipe(steps=steps, strategy=strategy, seed=seed), tmp_path / str(place))
        read.append(Run.read(tmp_path / str(place)))
    assert comparison.differing(read) == ["training.steps"]
    groups = comparison.grouped(read)
    assert list(groups) == ["gaia [training.steps=5]", "dgc", "gaia [training.steps=7]"]
    assert [one.seed for one in groups["gaia [training.steps=5]"]] == [0, 1]
    assert comparison.differing(read[:3]) == []


def test_table_and_markdown_say_the_same(tmp_path: Path) -> None:
    fake_runs.write_all(tmp_path, steps=40)
    groups = {
        name: [Run.read(tmp_path / name / f"seed-{seed}") for seed in range(2)] for name in reversed(fake_runs.TRAITS)
    }
    made = compare(groups)
    page = comparison_table.markdown(made, title="A title", command="weightgrad compare x", machine="A machine")
    assert "weightgrad compare x" in page
    assert "A machine." in page
    for width in (80, 140):
        file = io.StringIO()
        Console(file=file, width=width).print(comparison_table.table(made, width))
        printed = file.getvalue()
        assert max(map(len, printed.splitlines())) <= width
        for row in made.rows:
            for cell in comparison_table.cells(row, made.reference):
                assert cell in printed
                assert f"| {cell} |" in page


def test_written_files_are_recalled(tmp_path: Path) -> None:
    runs = [run(name, [(1, 0.5)]) for name in ("baseline", "other")]
    made = compare({one.strategy: [one] for one in runs}, target=0.4)
    paths = comparison_table.write(made, runs, tmp_path, command="the command", machine="m", failures=["x: broke"])
    assert [path.name for path in paths] == ["comparison.json", "comparison.md"]
    document = json.loads(paths[0].read_text())
    assert set(comparison.KEYS) < set(document["strategies"][0])
    assert document["failures"] == ["x: broke"]
    assert comparison_table.read_previous(tmp_path) == comparison_table.PreviousComparison(
        "the command", 0.4, ("baseline", "other")
    )
    paths[0].write_text("{}")
    assert comparison_table.read_previous(tmp_path) == comparison_table.PreviousComparison()


@pytest.mark.parametrize(
    ("ratio", "text"), [(1.0, "1.00×"), (9.999, "10.0×"), (99.97, "100×"), (1068.2, "1,068×"), (None, "–")]  # noqa: RUF001
)  # fmt: skip
def test_ratio_text(ratio: float | None, text: str) -> None:
    assert ratio_text(ratio) == text
