"""Many runs of one recipe: every strategy with every seed, each in a process of its own.

    DIR/weightgrad/seed-0, DIR/weightgrad/seed-1, DIR/diloco-every=50/seed-0, …

A run that is finished is not run again, so a sweep that was stopped goes on where it was. A process
that dies takes nothing with it but its own run. Processes are asked to stop with SIGTERM, which
reaches the simulator as KeyboardInterrupt and leaves a readable run; SIGINT is kept from them, or
Ctrl-C would reach them twice.
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

from weightgrad import kernels, ledger
from weightgrad.errors import RunError, WeightGradError
from weightgrad.report.choices import Choice
from weightgrad.report.comparison import flat
from weightgrad.report.runs import FILES, Run
from weightgrad.train.recipe import Recipe
from weightgrad.train.run import chosen_strategy
from weightgrad.wan import strategies

if TYPE_CHECKING:
    from weightgrad.train.run import Progress

ERROR_FILE = "error.txt"
_PATIENCE = 20.0  # seconds a process has to write what it has
_PAUSE = 0.1  # seconds between two reports of a process
_FOR_CHILDREN = {
    "OMP_NUM_THREADS": "1",
    # To glibc: keep what is freed, also if it is large. Given back, every gradient of a large model would come as
    # fresh pages, which the kernel clears one by one: half the time of a step with 36.8 M parameters.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}

Simulate = Callable[..., object]


@dataclass(frozen=True)
class Job:
    """One run to be made."""

    choice: Choice
    seed: int
    recipe: Recipe
    directory: Path

    @property
    def label(self) -> str:
        """For a line of progress."""
        return f"{self.choice.label} seed {self.seed}"


def plan(recipe: Recipe, choices: Sequence[Choice], seeds: int, out: Path) -> list[Job]:
    """Seed by seed, so that there is something to compare early. A strategy that is none is an error now, not later."""
    jobs = []
    for seed in range(seeds):
        for choice in choices:
            changed = recipe.with_settings([choice.setting, f"seed={seed}"])
            strategies.find(changed.strategy.name, changed.strategy.overrides)
            jobs.append(Job(choice, seed, changed, out / choice.directory / f"seed-{seed}"))
    return jobs


def finished(job: Job) -> bool:
    """Whether its directory holds this very run. Another recipe there is an error: it may be worth hours."""
    path = job.directory / "ledger.jsonl"
    if not path.is_file():
        return False
    try:
        header = ledger.read(path)[0]
        there = {**header["recipe"], "row": _unfitted(header["row"])}
    except (RunError, LookupError):
        return False
    row = _unfitted(chosen_strategy(job.recipe).row())
    wanted = json.loads(json.dumps({**job.recipe.dump(), "row": row}))
    if there != wanted:
        old, new = flat(there), flat(wanted)
        changed = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
        shown = ", ".join(f"{key} is {old.get(key)} there and {new.get(key)} here" for key in changed[:3])
        raise RunError(
            f"{job.directory} holds a run of another recipe: {shown}{', …' if len(changed) > 3 else ''}; "
            f"choose another directory with --out, or remove this one"
        )
    try:
        return Run.read(job.directory).finished
    except RunError:
        return False


def _unfitted(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the overlap that `hide` fits to the recipe."""
    return {**row, "overlap": 0} if row.get("hide") else row


class Watcher(Protocol):
    """Is told what happens. `key` is a job's label."""

    def started(self, key: str) -> None:
        """A run has begun."""

    def progressed(self, key: str, progress: Progress) -> None:
        """A run is so far."""

    def ended(self, key: str, error: str | None) -> None:
        """A run is over, well or with this error."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _child(pipe: connection.Connection[Any, Any], simulate: Simulate, recipe: Recipe, directory: Path) -> None:
    """One run, in a process of its own. Says (what, details) through the pipe."""
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # stdout belongs to the parent, which may print JSON there
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
            except OSError:  # the parent is gone, and nobody waits for this run
                raise KeyboardInterrupt from None

    try:
        simulate(recipe, directory, watch=watch)
        said = ("finished", "")
    except KeyboardInterrupt:
        said = ("failed", "interrupted")
    except WeightGradError as error:
        said = ("failed", f"{type(error).__name__}: {error}")
    except Exception as error:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ERROR_FILE).write_text(traceback.format_exc(), encoding="utf-8")
        said = ("failed", f"{type(error).__name__}: {error}; all of it is in {directory / ERROR_FILE}")
    with suppress(OSError):
        pipe.send(said)


@contextmanager
def _for_children() -> Iterator[None]:
    """While children start: one thread each, which keeps its memory, and Ctrl-C for the parent only."""
    resource_tracker.ensure_running()  # it would unblock the signal
    before = {name: os.environ.get(name) for name in _FOR_CHILDREN}
    os.environ.update(_FOR_CHILDREN)
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
    """A process and what it says."""

    def __init__(self, job: Job, simulate: Simulate) -> None:
        self.job = job
        self.said: tuple[str, str] | None = None
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

    def hear(self, watcher: Watcher) -> bool:
        """Take one message; False when there will be no more."""
        try:
            what, detail = self.pipe.recv()
        except (EOFError, OSError):
            return False
        if what == "progress":
            watcher.progressed(self.job.label, detail)
        else:
            self.said = (what, detail)
        return True

    def verdict(self) -> str | None:
        """What went wrong, once the process is over."""
        self.process.join()
        self.pipe.close()
        if self.said is None:
            return f"its process ended with code {self.process.exitcode} and no word; killed, or out of memory?"
        what, detail = self.said
        return None if what == "finished" else detail


def _stop(running: Sequence[_Running]) -> None:
    """Let them write what they have; those that do not end are killed."""
    try:
        for one in running:
            one.process.terminate()
        until = time.monotonic() + _PATIENCE
        for one in running:
            one.process.join(max(0.0, until - time.monotonic()))
    finally:
        for one in running:
            one.process.kill()
            one.process.join()
            one.pipe.close()


def run(jobs: Sequence[Job], *, processes: int, simulate: Simulate, watcher: Watcher) -> dict[str, str]:
    """Run all of them, so many at a time. The errors of those that failed, by label."""
    waiting = list(jobs)
    running: list[_Running] = []
    failures: dict[str, str] = {}
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                job = waiting.pop(0)
                running.append(_Running(job, simulate))
                watcher.started(job.label)
            for ready in connection.wait([one.pipe for one in running]):
                one = next(one for one in running if one.pipe is ready)
                if not one.hear(watcher):
                    running.remove(one)
                    error = one.verdict()
                    watcher.ended(one.job.label, error)
                    if error is not None:
                        failures[one.job.label] = error
    except BaseException:
        _stop(running)
        raise
    return failures
