"""Run directories, read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weightgrad.errors import RunError
from weightgrad.lab.report import runs
from weightgrad.lab.report.runs import Run

from . import fake_runs


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    fake_runs.simulate(fake_runs.recipe(steps=20), tmp_path / "run", faults=True)
    return tmp_path / "run"


def test_lines_by_kind(directory: Path) -> None:
    run = Run.read(directory)
    assert (run.name, run.strategy, run.seed, run.status, run.finished) == ("paper", "weightgrad", 0, "finished", True)
    assert len(run.steps) == 20 * len(fake_runs.SITES)
    assert [line["step"] for line in run.rounds] == [8, 16]
    assert len(run.evaluations) == 20
    assert [line["what"] for line in run.faults] == [what for _, what, _ in fake_runs.FAULTS]
    assert len(run.links) == len(run.sites) == 2
    assert run.summary["accuracy"] == run.evaluations[-1]["accuracy"]
    assert run.wall["cores"] == 2
    assert run.recipe_text() == (directory / "recipe.yaml").read_text()


def test_settings_of_a_strategy_are_part_of_its_name(tmp_path: Path) -> None:
    fake_runs.simulate(fake_runs.recipe(steps=5, strategy="{name: diloco, every: 50, up: fp16}"), tmp_path)
    assert Run.read(tmp_path).strategy == "diloco(every=50, up=fp16)"


def test_an_interrupted_run_is_readable(tmp_path: Path) -> None:
    fake_runs.simulate(fake_runs.recipe(steps=20), tmp_path, status="interrupted")
    run = Run.read(tmp_path)
    assert (run.status, run.finished, run.summary["steps"]) == ("interrupted", False, 10)


def test_a_run_without_an_end_is_not_finished(directory: Path) -> None:
    events = directory / "events.jsonl"
    events.write_text("".join(events.read_text().splitlines(keepends=True)[:-1]))
    assert Run.read(directory).status == "unfinished"
    assert not Run.read(directory).finished


def test_recipe_comes_from_the_event_log_when_the_file_is_gone(directory: Path) -> None:
    (directory / "recipe.yaml").unlink()
    assert "name: paper" in Run.read(directory).recipe_text()


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"there is no directory .*nowhere"):
        Run.read(tmp_path / "nowhere")


def test_no_event_log(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"has no events\.jsonl"):
        Run.read(tmp_path)


def test_no_summary(directory: Path) -> None:
    (directory / "summary.json").unlink()
    with pytest.raises(RunError, match=r"has no summary\.json: .* run it again"):
        Run.read(directory)


@pytest.mark.parametrize("text", ["{", "[]", '{"status": "finished"}', '{"virtual_seconds": "long"}'])
def test_damaged_summary(directory: Path, text: str) -> None:
    (directory / "summary.json").write_text(text)
    with pytest.raises(RunError, match=r"summary\.json .*; run it again"):
        Run.read(directory)


def test_a_event_log_of_something_else(directory: Path) -> None:
    (directory / "events.jsonl").write_text('{"kind": "tea", "t": 0}\n')
    with pytest.raises(RunError, match="no entry of kind 'run'"):
        Run.read(directory)


def test_a_line_that_lacks_a_key_is_named(directory: Path) -> None:
    events = directory / "events.jsonl"
    events.write_text(events.read_text() + json.dumps({"kind": "evaluate", "t": 1, "step": 3}) + "\n")
    number = len(events.read_text().splitlines())
    with pytest.raises(RunError, match=rf"line {number}, kind 'evaluate': no accuracy, wan_bytes"):
        Run.read(directory)


def test_find_searches_below_and_leaves_out_what_cannot_be_read(tmp_path: Path) -> None:
    fake_runs.write_all(tmp_path, steps=5, seeds=1)
    (tmp_path / "gaia" / "seed-0" / "summary.json").unlink()
    found, skipped = runs.find([tmp_path, tmp_path / "dgc" / "seed-0"])
    assert sorted(run.strategy for run in found) == sorted(set(fake_runs.TRAITS) - {"gaia"})
    assert len(skipped) == 1
    assert "gaia" in skipped[0]


def test_find_needs_at_least_one_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no events\.jsonl in .* or below"):
        runs.find([tmp_path])
    with pytest.raises(RunError, match="there is no directory"):
        runs.find([tmp_path / "nowhere"])
