"""Many runs in processes of their own, with a simulator that only pretends."""

from __future__ import annotations

import os
import platform
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from weightgrad.errors import RecipeError, RunError, StrategyError
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.report import sweep
from weightgrad.lab.report.choices import Choice, parse_choices, safe_name
from weightgrad.lab.report.runs import Run
from weightgrad.lab.run.simulation import Progress, simulate

from . import fake_runs


class Recorder:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, ...]] = []
        self.steps: dict[str, int] = {}
        self.first = threading.Event()

    def started(self, key: str) -> None:
        self.lines.append(("started", key))

    def progressed(self, key: str, progress: Progress) -> None:
        self.steps[key] = progress.step
        self.first.set()

    def ended(self, key: str, error: str | None) -> None:
        self.lines.append(("ended", key, error or ""))


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3])  # for the processes


def breaks_on_gaia(recipe: Recipe, out: Path, *, watch: Callable[[Progress], None]) -> object:
    if recipe.strategy.name == "gaia":
        raise RuntimeError("no gaia today")
    if recipe.strategy.name == "dgc":
        raise RunError("nor this")
    if recipe.strategy.name == "qsgd":
        os.kill(os.getpid(), signal.SIGKILL)
    return fake_runs.simulate(recipe, out, watch=watch)


def wants_memory_back(recipe: Recipe, out: Path, *, watch: Callable[[Progress], None]) -> object:
    torch.ones(2**24)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**23)  # 8192 pages
    if (faults := resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) > 1000:
        raise RunError(f"{faults} page faults")
    return fake_runs.simulate(recipe, out, watch=watch)


def never_ends(recipe: Recipe, out: Path, *, watch: Callable[[Progress], None]) -> object:
    try:
        for step in range(10**9):
            watch(Progress(step, 10**9, 1.0, None, 0.0, 0, 0))
            time.sleep(0.01)
    except KeyboardInterrupt:
        fake_runs.simulate(recipe, out, status="interrupted")
        raise
    return None


def test_choices() -> None:
    text = "baseline, diloco(every=50, up=ef(topk(0.01) > qsgd(bits=4))) ,baseline,weightgrad()"
    baseline, diloco, weightgrad = parse_choices(text)
    assert (baseline.label, baseline.directory) == ("baseline", "baseline")
    assert diloco.label == "diloco(every=50, up=ef(topk(0.01) > qsgd(bits=4)))"
    assert weightgrad == Choice("weightgrad")
    recipe = fake_runs.recipe().with_settings([diloco.setting])
    assert recipe.strategy.overrides == {"every": 50, "up": "ef(topk(0.01) > qsgd(bits=4))"}
    assert fake_runs.recipe().with_settings([baseline.setting]).strategy.overrides == {}


@pytest.mark.parametrize("text", ["", "a,,b", "a(b", "a)b(", "a(b)", "a(=1)", "a(b=)", "a b", "a('x)", "../up"])
def test_what_is_not_a_choice(text: str) -> None:
    with pytest.raises(StrategyError):
        parse_choices(text)


def test_directories_are_safe_and_differ() -> None:
    texts = ["a(x=1)", "a(x='1')", "a(x=f(1))", "a(x=[1])", "a(x={b: '/../..'})", f"a(x={'y' * 300})"]
    names = [choice.directory for text in texts for choice in parse_choices(text)]
    assert names[0] == "a-x=1"
    assert len(set(names)) == len(texts)
    for name in names:
        assert safe_name(name) == name
        assert len(name) < 80


def test_plan_is_seed_by_seed(tmp_path: Path) -> None:
    jobs = sweep.plan(fake_runs.recipe(), parse_choices("baseline,diloco(every=5)"), 2, tmp_path)
    assert [job.label for job in jobs] == [
        *("baseline seed 0", "diloco(every=5) seed 0", "baseline seed 1", "diloco(every=5) seed 1")
    ]
    assert jobs[3].directory == tmp_path / "diloco-every=5" / "seed-1"
    assert (jobs[3].recipe.seed, jobs[3].recipe.strategy.overrides) == (1, {"every": 5})


@pytest.mark.parametrize("text", ["weihgtgrad", "weightgrad(evry=5)"])
def test_a_strategy_that_is_none_is_known_before_the_first_run(tmp_path: Path, text: str) -> None:
    with pytest.raises((StrategyError, RecipeError)):
        sweep.plan(fake_runs.recipe(), parse_choices(f"baseline,{text}"), 1, tmp_path)


def test_runs_fail_alone(tmp_path: Path) -> None:
    jobs = sweep.plan(fake_runs.recipe(steps=5), parse_choices("gaia,baseline,dgc,qsgd"), 1, tmp_path)
    jobs[1].directory.mkdir(parents=True)
    (jobs[1].directory / "error.txt").write_text("of an earlier attempt")
    before = dict(os.environ)
    recorder = Recorder()
    failures = sweep.run(jobs, processes=2, simulate=breaks_on_gaia, listener=recorder)
    assert sorted(failures) == ["dgc seed 0", "gaia seed 0", "qsgd seed 0"]
    assert failures["dgc seed 0"] == "RunError: nor this"
    assert failures["gaia seed 0"].startswith("RuntimeError: no gaia today; the traceback is in ")
    assert "code -9" in failures["qsgd seed 0"]
    assert "Traceback" in (jobs[0].directory / "error.txt").read_text()
    assert not (jobs[1].directory / "error.txt").exists()
    assert [sweep.finished(job) for job in jobs] == [False, True, False, False]
    assert recorder.steps == {"baseline seed 0": 5}
    assert ("ended", "baseline seed 0", "") in recorder.lines
    assert {line[1] for line in recorder.lines if line[0] == "started"} == {job.label for job in jobs}
    assert dict(os.environ) == before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep memory")
def test_a_large_tensor_is_cleared_by_the_kernel_once(tmp_path: Path) -> None:
    (job,) = sweep.plan(fake_runs.recipe(steps=5), parse_choices("baseline"), 1, tmp_path)
    assert sweep.run([job], processes=1, simulate=wants_memory_back, listener=Recorder()) == {}


def test_finished_runs_are_known_and_interrupted_ones_are_not(tmp_path: Path) -> None:
    (job,) = sweep.plan(fake_runs.recipe(steps=6), parse_choices("gaia"), 1, tmp_path)
    assert not sweep.finished(job)
    fake_runs.simulate(job.recipe, job.directory, status="interrupted")
    assert not sweep.finished(job)
    for status in ("diverged", "finished"):
        fake_runs.simulate(job.recipe, job.directory, status=status)
        assert sweep.finished(job)
    (job.directory / "summary.json").unlink()
    assert not sweep.finished(job)
    (job.directory / "events.jsonl").write_text("")
    assert not sweep.finished(job)


def test_a_real_run_whose_overlap_was_fitted_is_known(tmp_path: Path) -> None:
    recipe = Recipe.load(Path(__file__).parents[3] / "recipes" / "laptop.yaml").with_settings(["training.steps=3"])
    (job,) = sweep.plan(recipe, parse_choices("weightgrad"), 1, tmp_path)
    simulate(job.recipe, job.directory)
    assert sweep.finished(job)


def test_another_recipe_is_not_overwritten(tmp_path: Path) -> None:
    (job,) = sweep.plan(fake_runs.recipe(steps=6), parse_choices("gaia"), 1, tmp_path)
    for status in ("finished", "interrupted"):
        fake_runs.simulate(fake_runs.recipe(steps=7, strategy="gaia"), job.directory, status=status)
        with pytest.raises(
            RunError, match=r"training\.steps is 7 there and 6 here; choose another directory with --out"
        ):
            sweep.finished(job)


def test_interrupt_stops_the_processes_and_leaves_readable_runs(tmp_path: Path) -> None:
    jobs = sweep.plan(fake_runs.recipe(steps=6), parse_choices("gaia,dgc"), 1, tmp_path)
    recorder = Recorder()

    def interrupt() -> None:
        recorder.first.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        sweep.run(jobs[:1], processes=1, simulate=never_ends, listener=recorder)
    thread.join()
    assert Run.read(jobs[0].directory).status == "interrupted"
    assert not sweep.finished(jobs[0])
