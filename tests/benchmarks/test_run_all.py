"""`run_all.py`: an interrupted table goes on with exactly what is missing, here and on another machine."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import run_all
import run_records
import table_long
import table_runs
from run_estimates import RunEstimates
from run_records import RunKey, RunRecords
from tables import HERE, ROOT, Options

from weightgrad.errors import RunError, WeightGradError
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.report.runs import Run
from weightgrad.lab.run import simulation as train_run

TINY = """
from dataclasses import dataclass
from table_runs import cells, run, table, columns
from tables import ROOT, Claim, Document
from weightgrad.lab.recipes.recipe import Recipe

PARTIAL = True

@dataclass(frozen=True, kw_only=True)
class Plan:
    steps: int = 2

QUICK = Plan(steps=1)

def wanted(plan):
    settings = [f"training.steps={plan.steps}", "training.batch=6", "training.evaluate_on=20"]
    recipe = Recipe.load(ROOT / "recipes" / "laptop.yaml").with_settings(settings)
    return cells("Digits", recipe, {name: name for name in ("baseline", "terngrad", "qsgd")}, 1)

def make(plan, options):
    found = run(wanted(plan), options)
    shown = [table(part, "", columns("accuracy", "points"), runs) for part, runs in found.parts.items()]
    return Document(title="Tiny", rests_on=found.facts(), tables=shown, claims=[Claim("x", True, "")], measured=[])
"""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one table of three runs, and one that declares none."""
    directory = tmp_path / "scripts"
    directory.mkdir()
    (directory / "table_tiny.py").write_text(TINY)
    (directory / "table_measured.py").write_text("def make(plan, options): ...\n")
    monkeypatch.syspath_prepend(str(directory))
    for name in ("table_tiny", "table_measured"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return directory


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The strategies whose runs were started, in order."""
    found: list[str] = []
    real = train_run.simulate

    def noted(recipe: Recipe, *arguments: object, **options: object) -> object:
        found.append(recipe.strategy.name)
        return real(recipe, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(train_run, "simulate", noted)
    return found


def interrupts(monkeypatch: pytest.MonkeyPatch, at: str) -> Callable[[], None]:
    """Ctrl-C in the middle of the run of a strategy, until the returned function is called."""
    from weightgrad.lab.sim.simulator import Simulator

    real = Simulator.evaluate

    def evaluate(self: Simulator) -> object:
        if self.plan.strategy.name == at:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(Simulator, "evaluate", evaluate)
    return lambda: monkeypatch.setattr(Simulator, "evaluate", real)


def test_an_interrupted_table_goes_on_with_what_is_missing(
    scripts: Path, made: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = ["--quick", "--resume", "--out", str(out)]
    no_more = interrupts(monkeypatch, at="terngrad")
    assert run_all.main(command, scripts) == 130
    assert made == ["baseline", "terngrad"]
    records = list((out / "records").rglob("*.json"))
    assert [json.loads(path.read_text())["row"] for path in records] == ["baseline"]
    assert not list((out / "records").rglob(".*"))  # whole files only
    (half,) = out.glob("*-tiny.md")
    assert "## What is missing\n- Digits: 2 of 3 runs" in half.read_text()

    no_more()
    made.clear()
    shutil.rmtree(out / "runs")  # as on another machine, which has the repository only
    capsys.readouterr()
    assert run_all.main([*command, "--list"], scripts) == 0
    listed = capsys.readouterr().out
    assert "tiny            1 of    3 runs done" in listed
    assert "terngrad; qsgd" in listed
    assert not made
    assert run_all.main([*command, "--most-runs", "1"], scripts) == 0
    assert made == ["terngrad"]
    assert run_all.main(command, scripts) == 0
    assert made == ["terngrad", "qsgd"]
    (whole,) = out.glob("*-tiny.md")
    assert "What is missing" not in whole.read_text()
    assert run_all.main(command, scripts) == 0
    assert made == ["terngrad", "qsgd"]


def test_only_tables_with_runs_can_be_chosen(scripts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [table.name for table in run_all.find(scripts, [], quick=True)] == ["tiny"]
    with pytest.raises(WeightGradError, match="no runs of a table 'measured'; there are tiny"):
        run_all.find(scripts, ["measured"], quick=True)
    with pytest.raises(SystemExit):
        run_all.main(["--only", "huge"], scripts)
    assert "no runs of a table 'huge'" in capsys.readouterr().err


def test_every_table_of_the_repository_is_listed() -> None:
    found = {table.name: table for table in run_all.find(HERE, [], quick=False)}
    assert {"consistency", "limits", "long", "mlp", "qsgd", "scale", "skew", "weightgrad"} <= set(found)
    for table in found.values():
        cells = table.wanted(table.plan)
        assert len({cell.label for cell in cells}) == len(cells), f"{table.name}: two runs have the same name"
    assert found["mlp"].plan.images == 60_000
    assert {cell.recipe.training.steps for cell in found["long"].wanted(found["long"].plan)} == {10_000}


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(name="tiny", command="", quick=True, out=tmp_path, runs=tmp_path / "runs", jobs=0)


@pytest.fixture
def digits() -> Recipe:
    path = ROOT / "recipes" / "laptop.yaml"
    return Recipe.load(path).with_settings(["training.steps=3", "training.batch=6", "training.evaluate_on=20"])


def test_a_record_has_what_tables_need(options: Options, digits: Recipe) -> None:
    (cell,) = table_runs.cells("Digits", digits, {"auto": "auto"}, 1)
    (kept,) = table_runs.run([cell], options).all()
    whole = Run.read(cell.job(options.runs / options.name).directory)
    assert kept.summary == whole.summary
    assert [line["accuracy"] for line in kept.evaluations] == [line["accuracy"] for line in whole.evaluations]
    assert (kept.strategy, kept.seed, kept.name, kept.finished) == (whole.strategy, whole.seed, whole.name, True)
    assert kept.header["sites"] == whole.header["sites"]
    assert {"evaluations", "schedules", "links", "sites"} <= set(run_records._KEPT)
    assert len(kept.links) == len(whole.links)
    assert kept.schedules[-1]["every"] == whole.schedules[-1]["every"]
    assert kept.recipe["training"] == whole.recipe["training"]
    assert {"machine", "date", "wall_seconds", "torch", "python"} <= set(kept.wall)
    assert kept.directory.stat().st_size < 16_000
    assert [run.seed for run in RunRecords(options.records).all()] == [0]


def test_a_record_holds_for_what_was_run_only(digits: Recipe, tmp_path: Path) -> None:
    key = RunKey.of(digits)
    other = digits.with_settings(["training.optimizer.lr=0.01"])
    elsewhere = digits.with_settings([f"data.directory={tmp_path}", "name=another"])
    assert RunKey.of(other).mark != key.mark
    assert RunKey.of(digits, held_out=True).mark != key.mark
    assert RunKey.of(elsewhere) == key
    assert RunKey.of(digits.with_settings(["seed=7"])).mark == key.mark
    # Settings that a record does not know are new, at their default; a default that has changed is another run.
    settings = json.loads(json.dumps(key.settings))
    del settings["recipe"]["sites"][0]["sharding"], settings["strategy"]["relay"]
    assert key.fits(settings)
    settings["recipe"]["training"]["warmup"] = 5
    assert not key.fits(settings)


def test_a_damaged_record_is_made_again(options: Options, digits: Recipe, made: list[str]) -> None:
    (cell,) = table_runs.cells("Digits", digits, {"baseline": "baseline"}, 1)
    (kept,) = table_runs.run([cell], options).all()
    kept.directory.write_text('{"format": 1}')
    shutil.rmtree(options.runs)
    records = RunRecords(options.records / options.name)
    with pytest.raises(RunError, match="remove it"):
        records.read(cell.part, cell.row, cell.key)
    assert not list(records.all())
    assert len(table_runs.run([cell], options).all()) == 1
    assert made == ["baseline", "baseline"]


def test_estimates_follow_the_records(options: Options, digits: Recipe) -> None:
    (cell,) = table_runs.cells("Digits", digits, {"baseline": "baseline"}, 1)
    (longer,) = table_runs.cells("Digits", digits.with_settings(["training.steps=30"]), {"terngrad": "terngrad"}, 1)
    (kept,) = table_runs.run([cell], options).all()
    kept = dataclasses.replace(kept, wall={**kept.wall, "wall_seconds": 6.0})
    assert RunEstimates([kept], options.runs / "e.json", measure=False).seconds(longer) == pytest.approx(60)
    assert RunEstimates([], options.runs / "e.json", measure=False).seconds(longer) is None
    measured = RunEstimates([], options.runs / "e.json").seconds(longer)
    assert measured is not None
    assert RunEstimates([], options.runs / "e.json", measure=False).seconds(longer) == measured  # it is kept


def test_losses_of_a_record_are_means_of_stretches() -> None:
    steps = [{"t": float(n), "step": n, "loss": float(n % 2)} for n in range(1, 201)]
    found = run_records._losses(steps)
    assert len(found) == 50
    assert (found[-1]["step"], found[0]["loss"]) == (200, 0.5)
    assert run_records._losses([{"t": 1.0, "step": 1, "loss": None}]) == []


def test_the_long_table_has_a_curve(options: Options, monkeypatch: pytest.MonkeyPatch, digits: Recipe) -> None:
    plan = dataclasses.replace(table_long.QUICK, steps=4, evaluate_on=20)
    small = digits.with_settings(["training.steps=4", "training.evaluate_every=2"])
    monkeypatch.setattr(table_long, "recipe", lambda _: small)
    document = table_long.make(plan, options)
    assert not document.failures
    assert [row["row"] for row in document.tables[0].rows] == list(table_long.STRATEGIES)
    last = document.tables[1].rows[-1]
    assert last["steps"] == 4
    assert {"baseline", "weightgrad-paper", "auto"} <= set(last)
    assert len(document.claims) == len(table_long.STRATEGIES) - 1
