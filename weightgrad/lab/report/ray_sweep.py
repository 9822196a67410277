"""The runs of a sweep on a Ray cluster: `weightgrad compare --on ray`.

A run is one task on one core, in a process of its own, as with `--jobs`, so its results are the same to the byte.
Machines need not share a disk: a task writes into a directory of its machine and returns the files, and this process
puts them where `--jobs` would have written them. A sweep that was interrupted goes on with the runs that are not there.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import weightgrad
from weightgrad import kernels
from weightgrad.errors import RunError, WeightGradError
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.report.runs import FILES
from weightgrad.lab.report.sweep import ENVIRONMENT, ERROR_FILE, Job, ProgressListener, Simulate

if TYPE_CHECKING:
    from weightgrad.lab.run.simulation import Progress

_PAUSE = 0.5  # seconds between two progress messages of a run
_LOOK_S = 0.2  # between two looks at the mailbox


def load_ray() -> Any:
    """The package ray.

    Raises:
        RunError: It is not installed.
    """
    try:
        import ray
    except ImportError:
        raise RunError("--on ray needs Ray; pip install 'weightgrad[ray]'") from None
    return ray


@dataclass(frozen=True)
class Outcome:
    """What a task returns: the files of its run, and what went wrong, if anything did."""

    files: dict[str, bytes] = field(default_factory=dict)
    error: str | None = None


class Mailbox:
    """Progress of all runs on its way to the process that shows it; an actor."""

    def __init__(self) -> None:
        self._progress: dict[str, Progress | None] = {}

    def put(self, label: str, progress: Progress | None) -> None:
        """Leave the newest progress of a run; None says that it has started."""
        self._progress[label] = progress

    def take(self) -> dict[str, Progress | None]:
        """What has come since the last time."""
        found, self._progress = self._progress, {}
        return found


def simulate_there(
    simulate: Simulate, recipe: Recipe, version: str, tell: Callable[[Progress | None], object]
) -> Outcome:
    """Make one run in this process, in a directory that is removed afterwards."""
    if weightgrad.__version__ != version:
        return Outcome(
            error=f"a machine of the cluster has weightgrad {weightgrad.__version__}, and this one {version}; "
            "install the same release on all of them"
        )
    torch.set_num_threads(1)
    kernels.set_threads(1)
    last = 0.0

    def watch(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _PAUSE or progress.step >= progress.steps:
            last = now
            tell(progress)

    tell(None)
    with tempfile.TemporaryDirectory(prefix="weightgrad-") as place:
        out, error = Path(place), None
        try:
            simulate(recipe, out, watch=watch)
        except WeightGradError as caught:
            error = f"{type(caught).__name__}: {caught}"
        except Exception as caught:
            (out / ERROR_FILE).write_text(traceback.format_exc(), encoding="utf-8")
            error = f"{type(caught).__name__}: {caught}; the traceback is in {ERROR_FILE}"
        files = {path.name: path.read_bytes() for path in sorted(out.iterdir()) if path.is_file()}
    return Outcome(files, error)


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Ray, connected to a cluster: the one at `address`, or the one that this machine belongs to, or a new local one.

    Raises:
        RunError: There is no Ray, or no cluster at that address.
    """
    ray = load_ray()
    if ray.is_initialized():
        yield ray
        return
    quiet = {"log_to_driver": False, "logging_level": "error"}
    try:
        ray.init(address=address or "auto", **quiet)
    except ConnectionError as error:
        if address is not None or "RAY_ADDRESS" in os.environ:
            raise RunError(f"no Ray cluster at {address or os.environ['RAY_ADDRESS']}: {error}") from None
        ray.init(address="local", include_dashboard=False, **quiet)
    try:
        yield ray
    finally:
        ray.shutdown()


def run(
    jobs: Sequence[Job],
    *,
    address: str | None,
    at_once: int | None,
    simulate: Simulate,
    listener: ProgressListener,
) -> dict[str, str]:
    """Make runs on a Ray cluster, as `sweep.run` does on this machine.

    Args:
        jobs: The runs.
        address: The cluster's address; None takes the one that this machine belongs to, or starts a local one.
        at_once: Most runs at the same time; None leaves it to Ray: one for each free core.
        simulate: Makes one run, as `weightgrad.lab.run.simulation.simulate` does.
        listener: Called when runs start, progress and end.

    Returns:
        The errors of the runs that failed, by label.

    Raises:
        RunError: There is no Ray, or no cluster at that address.
    """
    with connected(address) as ray:
        return _Sweep(ray, simulate, listener).run(jobs, at_once or len(jobs))


class _Sweep:
    def __init__(self, ray: Any, simulate: Simulate, listener: ProgressListener) -> None:
        self._ray, self._simulate, self._listener = ray, simulate, listener
        self._mailbox = ray.remote(num_cpus=0)(Mailbox).remote()
        # One task a process: a second run in it might not have the same bits.
        self._task = ray.remote(num_cpus=1, max_calls=1, runtime_env={"env_vars": ENVIRONMENT})(_remote)
        self._running: dict[Any, Job] = {}
        self._started: set[str] = set()
        self._failures: dict[str, str] = {}

    def run(self, jobs: Sequence[Job], at_once: int) -> dict[str, str]:
        waiting = list(jobs)
        try:
            while waiting or self._running:
                while waiting and len(self._running) < at_once:
                    job = waiting.pop(0)
                    ref = self._task.remote(
                        self._simulate, job.recipe, weightgrad.__version__, self._mailbox, job.label
                    )
                    self._running[ref] = job
                done, _ = self._ray.wait(list(self._running), timeout=_LOOK_S)
                self._show()
                for ref in done:
                    self._end(ref, self._running.pop(ref))
        except BaseException:
            for ref in self._running:
                self._ray.cancel(ref, force=True)
            raise
        return self._failures

    def _show(self) -> None:
        labels = {job.label for job in self._running.values()}
        for label, progress in self._ray.get(self._mailbox.take.remote()).items():
            if label in labels:
                self._start(label)
                if progress is not None:
                    self._listener.progressed(label, progress)

    def _start(self, label: str) -> None:
        if label not in self._started:
            self._started.add(label)
            self._listener.started(label)

    def _end(self, ref: Any, job: Job) -> None:
        self._start(job.label)
        try:
            outcome: Outcome = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:  # a machine or a process was lost, more often than Ray tries
            outcome = Outcome(error=f"Ray could not finish it: {str(error).strip().splitlines()[-1]}")
        _write(outcome.files, job.directory)
        self._listener.ended(job.label, outcome.error)
        if outcome.error is not None:
            self._failures[job.label] = outcome.error


def _remote(simulate: Simulate, recipe: Recipe, version: str, mailbox: Any, label: str) -> Outcome:
    return simulate_there(simulate, recipe, version, lambda progress: mailbox.put.remote(label, progress))


def _write(files: dict[str, bytes], directory: Path) -> None:
    """Put the files of a run in its place; the summary last, which says that the run is complete."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in (*FILES, ERROR_FILE):
        (directory / name).unlink(missing_ok=True)
    for name, body in sorted(files.items(), key=lambda one: one[0] == "summary.json"):
        (directory / name).write_bytes(body)
