"""Many runs of one recipe: every strategy with every seed, each in a process of its own.

    DIR/weightgrad/seed-0, DIR/weightgrad/seed-1, DIR/diloco-every=50/seed-0, …

A finished run is not run again, so a sweep that was stopped continues. A process that dies affects only its own run.
Processes are stopped with SIGTERM, which reaches the simulator as KeyboardInterrupt and leaves a readable run; they
ignore SIGINT, because Ctrl-C would otherwise reach them twice.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from weightgrad import event_log, kernels
from weightgrad.core import strategies
from weightgrad.errors import RunError, WeightGradError
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.report.choices import Choice
from weightgrad.lab.report.comparison import flat
from weightgrad.lab.report.runs import FILES, Run
from weightgrad.lab.run.simulation import chosen_strategy

if TYPE_CHECKING:
    from weightgrad.lab.run.simulation import Progress

ERROR_FILE = "error.txt"
_TIMEOUT = 20.0  # seconds that a process has to end in good order
_PAUSE = 0.1  # seconds between two progress messages of a process
ENVIRONMENT = {  # of a process that makes a run
    "OMP_NUM_THREADS": "1",
    # Tell glibc to keep large blocks that are freed. Otherwise every gradient of a large model gets fresh pages, which
    # the kernel must clear: half the time of a step with 36.8 M parameters.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}

Simulate = Callable[..., object]


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    choice: Choice
    seed: int
    recipe: Recipe
    directory: Path

    @property
    def label(self) -> str:
        """The name of the run in progress messages."""
        return f"{self.choice.label} seed {self.seed}"


def plan(recipe: Recipe, choices: Sequence[Choice], seeds: int, out: Path) -> list[Job]:
    """The runs of a sweep, seed by seed, so that strategies can be compared early.

    Raises:
        StrategyError: A strategy is wrong.
    """
    jobs = []
    for seed in range(seeds):
        for choice in choices:
            changed = recipe.with_settings([choice.setting, f"seed={seed}"])
            strategies.find(changed.strategy.name, changed.strategy.overrides)
            jobs.append(Job(choice, seed, changed, out / choice.directory / f"seed-{seed}"))
    return jobs


def finished(job: Job) -> bool:
    """Whether the run is complete in its directory.

    Raises:
        RunError: The directory has a run of another recipe, which may have taken hours.
    """
    path = job.directory / "events.jsonl"
    if not path.is_file():
        return False
    try:
        header = event_log.read(path)[0]
        found = {**header["recipe"], "parts": _unfitted(header["parts"])}
    except (RunError, LookupError):
        return False
    parts = _unfitted(chosen_strategy(job.recipe).to_dict())
    wanted = json.loads(json.dumps({**job.recipe.dump(), "parts": parts}))
    if found != wanted:
        old, new = flat(found), flat(wanted)
        changed = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
        shown = ", ".join(f"{key} is {old.get(key)} there and {new.get(key)} here" for key in changed[:3])
        raise RunError(
            f"{job.directory} has a run of another recipe: {shown}{', …' if len(changed) > 3 else ''}; "
            f"choose another directory with --out, or remove this one"
        )
    try:
        return Run.read(job.directory).finished
    except RunError:
        return False


def _unfitted(parts: dict[str, Any]) -> dict[str, Any]:
    """The parts of a strategy without the overlap that `hide` fits to the recipe."""
    return {**parts, "overlap": 0} if parts.get("hide") else parts


class ProgressListener(Protocol):
    """Is called when runs start, progress and end; `key` is the label of a job."""

    def started(self, key: str) -> None:
        """A run has started."""

    def progressed(self, key: str, progress: Progress) -> None:
        """A run has made progress."""

    def ended(self, key: str, error: str | None) -> None:
        """A run has ended; `error` is None if it succeeded."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _child(pipe: connection.Connection[Any, Any], simulate: Simulate, recipe: Recipe, directory: Path) -> None:
    """Make one run in this process; sends (what, details) through the pipe."""
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # the parent may print JSON on stdout
    torch.set_num_threads(1)
    kernels.set_threads(1)
    last = 0.0

    def watch(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _PAUSE or progress.step >= progress.steps:
            last = now
            try:
                pipe.send(("progress", progress))
            except OSError:  # the parent is gone
                raise KeyboardInterrupt from None

    try:
        simulate(recipe, directory, watch=watch)
        outcome = ("finished", "")
    except KeyboardInterrupt:
        outcome = ("failed", "interrupted")
    except WeightGradError as error:
        outcome = ("failed", f"{type(error).__name__}: {error}")
    except Exception as error:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ERROR_FILE).write_text(traceback.format_exc(), encoding="utf-8")
        outcome = ("failed", f"{type(error).__name__}: {error}; the traceback is in {directory / ERROR_FILE}")
    with suppress(OSError):
        pipe.send(outcome)


@contextmanager
def _for_children() -> Iterator[None]:
    """While children start: one thread each, memory that is kept, and Ctrl-C for the parent only."""
    resource_tracker.ensure_running()  # it would unblock the signal
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class _Running:
    """A process and the messages from it."""

    def __init__(self, job: Job, simulate: Simulate) -> None:
        self.job = job
        self.outcome: tuple[str, str] | None = None
        for name in (*FILES, ERROR_FILE):
            (job.directory / name).unlink(missing_ok=True)
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe(duplex=False)
        with _for_children():
            self.process = context.Process(
                target=_child, args=(theirs, simulate, job.recipe, job.directory), daemon=True
            )
            self.process.start()
        theirs.close()

    def receive(self, listener: ProgressListener) -> bool:
        """Receive one message; returns False if there will be no more."""
        try:
            what, detail = self.pipe.recv()
        except (EOFError, OSError):
            return False
        if what == "progress":
            listener.progressed(self.job.label, detail)
        else:
            self.outcome = (what, detail)
        return True

    def error(self) -> str | None:
        """Wait for the end of the process; returns what went wrong, or None."""
        self.process.join()
        self.pipe.close()
        if self.outcome is None:
            return (
                f"its process ended with code {self.process.exitcode} and no message; was it killed, or out of memory?"
            )
        what, detail = self.outcome
        return None if what == "finished" else detail


def _stop(running: Sequence[_Running]) -> None:
    """Stop processes in good order; kill those that do not end."""
    try:
        for run in running:
            run.process.terminate()
        until = time.monotonic() + _TIMEOUT
        for run in running:
            run.process.join(max(0.0, until - time.monotonic()))
    finally:
        for run in running:
            run.process.kill()
            run.process.join()
            run.pipe.close()


def run(jobs: Sequence[Job], *, processes: int, simulate: Simulate, listener: ProgressListener) -> dict[str, str]:
    """Make runs.

    Args:
        jobs: The runs.
        processes: Number of runs at a time.
        simulate: Makes one run, as `weightgrad.lab.run.simulation.simulate` does.
        listener: Called when runs start, progress and end.

    Returns:
        The errors of the runs that failed, by label.
    """
    waiting = list(jobs)
    running: list[_Running] = []
    failures: dict[str, str] = {}
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                job = waiting.pop(0)
                running.append(_Running(job, simulate))
                listener.started(job.label)
            for ready in connection.wait([run.pipe for run in running]):
                run = next(run for run in running if run.pipe is ready)
                if not run.receive(listener):
                    running.remove(run)
                    error = run.error()
                    listener.ended(run.job.label, error)
                    if error is not None:
                        failures[run.job.label] = error
    except BaseException:
        _stop(running)
        raise
    return failures
