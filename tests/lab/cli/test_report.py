"""`weightgrad report`: directories in, one file out."""

from __future__ import annotations

from pathlib import Path

import typer
from typer.testing import CliRunner

from weightgrad.errors import RunError
from weightgrad.lab.cli.report import report
from weightgrad.lab.report import comparison_table
from weightgrad.lab.report.comparison import compare
from weightgrad.lab.report.runs import Run

from ..report import fake_runs

app = typer.Typer()
app.command()(report)


def test_a_comparison_keeps_its_order_target_and_command(tmp_path: Path) -> None:
    names = ("terngrad", "dgc", "baseline")
    for name in names:
        fake_runs.simulate(fake_runs.recipe(steps=20, strategy=name), tmp_path / name)
    runs = {name: [Run.read(tmp_path / name)] for name in names}
    every = [run for members in runs.values() for run in members]
    comparison_table.write(compare(runs, target=0.3), every, tmp_path, command="the <command>", machine="")
    done = CliRunner().invoke(app, [str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert done.output.strip() == f"{tmp_path / 'report.html'}: 3 runs"
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "the &lt;command&gt;" in text
    assert "an accuracy of 30.00 %" in text
    places = [text.index(f"<th scope='row'>{name}</th>") for name in ("baseline", "terngrad", "dgc")]
    assert places == sorted(places)


def test_several_runs_and_a_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        fake_runs.simulate(fake_runs.recipe(steps=20, seed=ord(name)), tmp_path / name)
    out = tmp_path / "new" / "page.html"
    done = CliRunner().invoke(app, [str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "Means over 2 seeds" in out.read_text(encoding="utf-8")


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    for name in ("a", "b"):
        fake_runs.simulate(fake_runs.recipe(steps=20), tmp_path / name)
    (tmp_path / "b" / "summary.json").unlink()
    done = CliRunner().invoke(app, [str(tmp_path)])
    assert done.exit_code == 0
    assert "skipped: " in done.output
    assert isinstance(CliRunner().invoke(app, [str(tmp_path / "b")]).exception, RunError)
    assert isinstance(CliRunner().invoke(app, [str(tmp_path / "nowhere")]).exception, RunError)
