"""Runs of a sweep on Ray: with a stand-in for the scheduler, and on a local Ray where one is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import weightgrad
from weightgrad.errors import RunError
from weightgrad.lab.cli.compare import compare
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.report import ray_sweep, sweep
from weightgrad.lab.report.choices import parse_choices

from . import fake_runs

ROOT = Path(__file__).parents[3]


def breaks_on_gaia(recipe: Recipe, out: Path, **options: Any) -> object:
    if recipe.strategy.name == "gaia":
        raise RuntimeError("no gaia today")
    if recipe.strategy.name == "dgc":
        raise RunError("nor this")
    return fake_runs.simulate(recipe, out, **options)


class LostError(Exception):
    """A process of the cluster was lost."""


class StandIn:
    """The few calls of Ray that a sweep uses; a task runs when it is waited for."""

    exceptions = SimpleNamespace(RayError=LostError)

    def __init__(self, lose: str = "", interrupt_after: int | None = None) -> None:
        self.lose, self.interrupt_after = lose, interrupt_after
        self.tasks: dict[int, Callable[[], Any]] = {}
        self.cancelled: list[int] = []
        self.most = 0

    def is_initialized(self) -> bool:
        return True

    def remote(self, **options: Any) -> Callable[[Any], Any]:
        def wrap(what: Any) -> Any:
            if isinstance(what, type):
                actor = what()
                calls = {
                    name: SimpleNamespace(remote=lambda *given, name=name: self._now(actor, name, given))
                    for name in ("put", "take")
                }
                return SimpleNamespace(remote=lambda: SimpleNamespace(**calls))
            assert options["max_calls"] == 1, "a process may not be used twice"
            assert options["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "1"
            return SimpleNamespace(remote=lambda *given: self._later(lambda: what(*given)))

        return wrap

    def _now(self, actor: Any, name: str, given: tuple[Any, ...]) -> int:
        found = getattr(actor, name)(*given)
        return self._later(lambda: found)

    def _later(self, work: Callable[[], Any]) -> int:
        self.tasks[len(self.tasks)] = work
        return len(self.tasks) - 1

    def wait(self, refs: list[int], timeout: float) -> tuple[list[int], list[int]]:
        self.most = max(self.most, len(refs))
        if self.interrupt_after == 0:
            raise KeyboardInterrupt
        if self.interrupt_after is not None:
            self.interrupt_after -= 1
        found = self.tasks[refs[0]]()
        self.tasks[refs[0]] = lambda: found
        return refs[:1], refs[1:]

    def get(self, ref: int) -> Any:
        found = self.tasks[ref]()
        if (
            isinstance(found, ray_sweep.Outcome)
            and self.lose
            and self.lose.encode() in found.files.get("recipe.yaml", b"")
        ):
            raise LostError("a long story\nthe worker died")
        return found

    def cancel(self, ref: int, *, force: bool) -> None:
        assert force
        self.cancelled.append(ref)


class Recorder:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def started(self, key: str) -> None:
        self.lines.append(("started", key))

    def progressed(self, key: str, progress: Any) -> None:
        assert ("started", key) in self.lines
        self.lines.append(("progressed", key))

    def ended(self, key: str, error: str | None) -> None:
        self.lines.append(("ended", key))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    monkeypatch.setattr(ray_sweep, "load_ray", lambda: made)
    return made


def jobs_of(strategies: str, out: Path) -> list[sweep.Job]:
    return sweep.plan(fake_runs.recipe(steps=5), parse_choices(strategies), 1, out)


def run(jobs: list[sweep.Job], recorder: Recorder, simulate: Any = breaks_on_gaia, at_once: int | None = None) -> Any:
    return ray_sweep.run(jobs, address=None, at_once=at_once, simulate=simulate, listener=recorder)


def test_runs_fail_alone_and_their_files_are_where_jobs_would_put_them(tmp_path: Path, stand_in: StandIn) -> None:
    jobs, recorder = jobs_of("gaia,baseline,dgc,qsgd", tmp_path), Recorder()
    stand_in.lose = "qsgd"
    jobs[1].directory.mkdir(parents=True)
    (jobs[1].directory / "error.txt").write_text("of an earlier attempt")
    failures = run(jobs, recorder, at_once=2)
    assert stand_in.most == 2
    assert failures == {
        "gaia seed 0": "RuntimeError: no gaia today; the traceback is in error.txt",
        "dgc seed 0": "RunError: nor this",
        "qsgd seed 0": "Ray could not finish it: the worker died",
    }
    assert "Traceback" in (jobs[0].directory / "error.txt").read_text()
    assert not (jobs[1].directory / "error.txt").exists()
    assert [sweep.finished(job) for job in jobs] == [False, True, False, False]
    for job in jobs:
        assert recorder.lines.count(("started", job.label)) == recorder.lines.count(("ended", job.label)) == 1


def test_the_files_are_those_of_a_run_on_this_machine(tmp_path: Path, stand_in: StandIn) -> None:
    (job,), recorder = jobs_of("baseline", tmp_path / "ray"), Recorder()
    assert run([job], recorder, fake_runs.simulate) == {}
    fake_runs.simulate(job.recipe, tmp_path / "here")
    assert [path.name for path in sorted(job.directory.iterdir())] == [
        path.name for path in sorted((tmp_path / "here").iterdir())
    ]
    for path in (tmp_path / "here").iterdir():
        assert (job.directory / path.name).read_bytes() == path.read_bytes()


def test_an_interrupt_cancels_what_runs(tmp_path: Path, stand_in: StandIn) -> None:
    jobs = jobs_of("baseline,weightgrad,diloco", tmp_path)
    stand_in.interrupt_after = 1
    with pytest.raises(KeyboardInterrupt):
        run(jobs, Recorder(), fake_runs.simulate, at_once=2)
    assert len(stand_in.cancelled) == 2
    assert [sweep.finished(job) for job in jobs] == [True, False, False], "the next command goes on here"


def test_another_release_on_the_cluster_is_noticed() -> None:
    told: list[Any] = []
    found = ray_sweep.simulate_there(fake_runs.simulate, fake_runs.recipe(steps=5), "0.0.0", told.append)
    assert found.error is not None
    assert f"has weightgrad {weightgrad.__version__}, and this one 0.0.0; install the same release" in found.error
    assert not told


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[Any] = []
    found = ray_sweep.simulate_there(fake_runs.simulate, fake_runs.recipe(steps=5), weightgrad.__version__, told.append)
    assert found.error is None
    assert told[0] is None, "it has started"
    assert told[-1].step == 5


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "paper.yaml").write_text(fake_runs.RECIPE)
    app = typer.Typer()
    app.command()(compare)
    command = ["paper.yaml", "--strategies", "baseline"]
    done = CliRunner().invoke(app, [*command, "--address", "10.0.0.1:6379"])
    assert "--address 10.0.0.1:6379 is that of a Ray cluster; add --on ray" in str(done.exception)
    monkeypatch.setitem(sys.modules, "ray", None)
    done = CliRunner().invoke(app, [*command, "--on", "ray"])
    assert "--on ray needs Ray; pip install 'weightgrad[ray]'" in str(done.exception)


def test_a_local_ray_gives_the_results_of_jobs(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed (the extra `ray`)")
    environment = {**os.environ, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}  # Ray writes a token there
    environment.pop("RAY_ADDRESS", None)
    settings = ("training.steps=4", "training.evaluate_every=2", "training.evaluate_on=50")
    command = [sys.executable, "-m", "weightgrad", "compare", str(ROOT / "recipes" / "laptop.yaml"), "--seeds", "2"]
    command += ["--strategies", "diloco(every=2)", *(word for one in settings for word in ("--set", one))]
    for where in (("--on", "ray", "--out", "ray"), ("--jobs", "1", "--out", "here")):
        done = subprocess.run(
            [*command, *where], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    for seed in ("seed-0", "seed-1"):
        for name in ("events.jsonl", "summary.json", "model.safetensors"):
            place = Path("diloco-every=2") / seed / name
            assert (tmp_path / "ray" / place).read_bytes() == (tmp_path / "here" / place).read_bytes(), place
    rows = [json.loads((tmp_path / out / "comparison.json").read_text())["strategies"] for out in ("ray", "here")]
    assert rows[0] == rows[1]
