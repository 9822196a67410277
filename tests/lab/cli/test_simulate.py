"""`weightgrad simulate`, with a simulator that only pretends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from weightgrad.errors import RecipeError
from weightgrad.lab.cli import recipe_argument
from weightgrad.lab.cli.simulate import simulate
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run import simulation

from ..report import fake_runs

app = typer.Typer()
app.command()(simulate)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("recipes").mkdir()
    Path("recipes/laptop.yaml").write_text(fake_runs.RECIPE.replace("name: paper", "name: laptop"))
    monkeypatch.setattr(simulation, "simulate", fake_runs.simulate)
    return tmp_path


def test_a_line_every_twentieth_and_the_outcome() -> None:
    done = CliRunner().invoke(app, ["laptop", "--set", "training.steps=100", "--set", "strategy=dgc"])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert [line.split(",")[1].strip() for line in lines if " of 100" in line] == [
        f"dgc: step {step} of 100" for step in range(5, 101, 5)
    ]
    assert "WAN traffic" in done.output
    assert str(Path("runs/laptop-dgc/model.safetensors")) not in done.output  # the fake writes none
    assert f"  {Path('runs/laptop-dgc/events.jsonl')} " in done.output
    assert Path("runs/laptop-dgc/summary.json").is_file()


def test_out_and_a_path() -> None:
    done = CliRunner().invoke(app, ["recipes/laptop.yaml", "--out", "there", "--set", "training.steps=20"])
    assert done.exit_code == 0, done.output
    assert Path("there/events.jsonl").is_file()


def test_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(recipe: Recipe, out: Path, **options: Any) -> None:
        fake_runs.simulate(recipe, out, status="interrupted")
        raise KeyboardInterrupt

    monkeypatch.setattr(simulation, "simulate", interrupted)
    done = CliRunner().invoke(app, ["laptop", "--out", "there"])
    assert done.exit_code == 130
    assert done.output.splitlines()[-1] == "Interrupted. The event log so far is in there."


def test_bare_names_are_looked_up_in_recipes() -> None:
    assert recipe_argument.find("laptop") == Path("recipes/laptop.yaml")
    Path("laptop").write_text("a file of that name comes first")
    assert recipe_argument.find("laptop") == Path("laptop")


def test_names_are_known_where_there_is_no_directory_recipes(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))
    for name in ("chaos", "edge", "imagenet", "laptop", "paper", "world"):
        assert recipe_argument.load(name, None).name == name


def test_what_was_looked_for_is_said() -> None:
    with pytest.raises(
        RecipeError,
        match=r"looked for desktop and recipes.desktop\.yaml in .*the recipes that have a name are chaos, .*",
    ):
        recipe_argument.find("desktop")
    with pytest.raises(RecipeError, match=r"looked for desktop\.yaml in "):
        recipe_argument.find("desktop.yaml")
