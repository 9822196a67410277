"""`weightgrad compare`, with a simulator that only pretends, in real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from weightgrad.errors import RunError
from weightgrad.lab.cli.compare import compare
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.report import sweep
from weightgrad.lab.run import simulation

from ..report import fake_runs

app = typer.Typer()
app.command()(compare)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(Path(__file__).parents[3])  # for the processes
    monkeypatch.chdir(tmp_path)
    Path("paper.yaml").write_text(fake_runs.RECIPE)
    monkeypatch.setattr(simulation, "simulate", fake_runs.simulate)
    return tmp_path


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["paper.yaml", "--set", "training.steps=40", *arguments])


def breaks_on_gaia(recipe: Recipe, out: Path, **options: Any) -> object:
    if recipe.strategy.name == "gaia":
        raise RunError("no gaia today")
    return fake_runs.simulate(recipe, out, **options)


def test_runs_once_and_then_reuses() -> None:
    done = invoke("--strategies", "weightgrad,baseline", "--jobs", "2")
    assert done.exit_code == 0, done.output
    out = Path("runs/paper")
    event_logs = [out / name / "seed-0" / "events.jsonl" for name in ("weightgrad", "baseline")]
    before = [path.stat().st_mtime_ns for path in event_logs]
    page = (out / "comparison.md").read_text()
    command = (
        "weightgrad compare paper.yaml --strategies weightgrad,baseline --seeds 1 --jobs 2 --set training.steps=40"
    )
    assert command in page
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")]
    assert rows == ["| strategy", "| baseline", "| weightgrad"]
    for name in ("comparison.json", "comparison.md", "report.html"):
        assert (out / name).is_file()
        assert f"  {out / name}\n" in done.output
    again = invoke("--strategies", "weightgrad,baseline", "--json", "--target", "0.2")
    assert again.exit_code == 0
    assert "2 of 2 runs are already finished." in again.stderr
    objects = json.loads(again.stdout)
    assert [one["strategy"] for one in objects] == ["baseline", "weightgrad"]
    assert len(objects[0]) == 9
    assert objects[1]["speedup_to_accuracy"] > 1
    assert [path.stat().st_mtime_ns for path in event_logs] == before
    assert json.loads((out / "comparison.json").read_text())["target"] == 0.2


def test_a_failure_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "simulate", breaks_on_gaia)
    done = invoke("--strategies", "gaia,diloco(every=5)", "--out", "there")
    assert done.exit_code == 1
    assert "gaia seed 0: failed: RunError: no gaia today" in done.output
    assert "The strategy baseline is not among these" in done.output
    assert Path("there/diloco-every=5/seed-0/summary.json").is_file()
    assert "diloco(every=5)" in Path("there/comparison.md").read_text()
    assert "no gaia today" in Path("there/report.html").read_text()


def test_another_recipe_stops_before_anything_runs() -> None:
    fake_runs.simulate(fake_runs.recipe(strategy="gaia"), Path("runs/paper/gaia/seed-0"))
    done = invoke("--strategies", "baseline,gaia")
    assert isinstance(done.exception, RunError)
    assert not Path("runs/paper/baseline").exists()


def test_interrupt_says_what_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe.load("paper.yaml").with_settings(["training.steps=40", "strategy=baseline"])
    fake_runs.simulate(recipe, Path("runs/paper/baseline/seed-0"))

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "run", interrupted)
    done = invoke("--strategies", "baseline,gaia")
    assert done.exit_code == 130
    last = done.output.splitlines()[-1]
    assert last == "Interrupted. 1 of 2 runs are finished in runs/paper; the same command continues."
