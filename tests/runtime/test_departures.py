"""Sites that go: by an error, Ctrl-C or a kill, after unequal numbers of steps; and sites that come late or again."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

import weightgrad as wg
from weightgrad.errors import StrategyError, WeightGradError
from weightgrad.lab.recipes.recipe import Recipe

from . import departing_site
from .departing_site import Loop
from .deployment import PATIENCE_S, Hub

RECIPE = """
name: departures
seed: 5
data: {{name: digits}}
model: {{name: lenet-digits}}
training: {{steps: 1, batch: 10, optimizer: {{name: sgd, lr: 0.01}}}}
server: {{name: hub}}
sites: [{sites}]
links: [{links}]
compute: {{seconds_per_step: 0.05}}
strategy: {strategy}
"""

SIGNALS = {
    "failed": signal.SIGUSR1,
    "interrupted": signal.SIGINT,
    "terminated": signal.SIGTERM,
    "killed": signal.SIGKILL,
}


def recipe(*names: str, strategy: str = "baseline") -> Recipe:
    sites = ", ".join(f"{{name: {name}, workers: 1}}" for name in names)
    links = ", ".join(f"{{between: [hub, {name}], bandwidth: 1 Gbit/s, delay: 1 ms}}" for name in names)
    return Recipe.parse(RECIPE.format(sites=sites, links=links, strategy=strategy), "departures.yaml")


class Thread:
    """A site in a thread of this process, which does one step after the other until it is told to leave."""

    def __init__(self, address: str, name: str, steps: int = 10**9) -> None:
        self.site, self.loop = wg.join(address, site=name, insecure=True), Loop()
        self.error: WeightGradError | None = None
        self._ends, self._steps = threading.Event(), steps
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self.site:
                self.site.prepare(self.loop.model, self.loop.optimizer)
                while not self._ends.is_set() and self.site.steps < self._steps:
                    self.loop.steps(1)
        except WeightGradError as error:
            self.error = error

    def leave(self) -> None:
        self._ends.set()
        self.join()

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        assert self.error is None, self.error


def further(hub: Hub, rounds: int = 5) -> None:
    """Until so many rounds more are closed."""
    goal = hub.version + rounds
    hub.until(lambda: hub.version >= goal)


def end_by(process: subprocess.Popen[str], number: int) -> str:
    """End a process by a signal; what it said.

    Python drops what a handler raises in the middle of a destructor or of a log line, so the signal is sent again.
    """
    for _ in range(int(PATIENCE_S / 20)):
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=20)[1]
    raise AssertionError(f"signal {number} does not end the process")


def test_nobody_waits_for_a_site_that_has_ended_however_it_ended(caplog: pytest.LogCaptureFixture) -> None:
    """By an error, Ctrl-C, SIGTERM or SIGKILL, without `leave`: the others go on before any deadline has passed."""
    script = str(Path(departing_site.__file__))
    caplog.set_level("INFO", "weightgrad")
    with Hub(recipe("stays", *SIGNALS)) as hub:
        leaving = {
            name: subprocess.Popen([sys.executable, script, hub.address, name], stderr=subprocess.PIPE, text=True)
            for name in SIGNALS
        }
        try:
            stays = Thread(hub.address, "stays")
            hub.until(lambda: hub.version > 0 and len(hub.core.members.awaited) == 5 == len(hub.transport.sessions()))
            further(hub)
            caplog.clear()  # one that was slow to start may have been late
            said = {}
            for name, number in SIGNALS.items():
                assert leaving[name].poll() is None
                said[name] = end_by(leaving[name], number)
                further(hub)
            stays.leave()
        finally:
            for process in leaving.values():
                process.kill()
                process.wait()
                assert process.stderr is not None
                process.stderr.close()
    assert "RuntimeError: the data is gone" in said["failed"]
    for name in ("failed", "interrupted"):
        assert f"{name} leaves before its training is over" in said[name]
        assert f"{name} leaves\n" in caplog.text
        assert f"{name} is gone" not in caplog.text
    for name in ("terminated", "killed"):
        assert f"{name} is gone: its process has ended without leave(); rounds continue without it" in caplog.text
    assert "has sent nothing for too long" not in caplog.text


def test_sites_with_unequal_numbers_of_steps() -> None:
    """The one with fewer steps leaves, and the other trains on alone."""
    with Hub(recipe("short", "long")) as hub:
        short, long = Thread(hub.address, "short", steps=5), Thread(hub.address, "long", steps=30)
        short.join()
        long.join()
        assert (short.site.steps, long.site.steps) == (5, 30)
        assert hub.version >= 30


def test_a_site_that_leaves_and_joins_again_in_one_process() -> None:
    with Hub(recipe("stays", "again")) as hub:
        stays, loop = Thread(hub.address, "stays"), Loop()
        for _ in range(2):
            with wg.join(hub.address, site="again", insecure=True) as site:
                site.prepare(loop.model, loop.optimizer)
                before = site.steps
                loop.steps(5)
                assert site.steps == before + 5, "each step counts once"
                with pytest.raises(StrategyError, match="the site is prepared already"):
                    site.prepare(loop.model, loop.optimizer)
            with pytest.raises(StrategyError, match="the site has left"):
                loop.steps(1)
            further(hub)
        stays.leave()


def test_a_site_that_comes_two_hundred_steps_late() -> None:
    """It has another deadline than the default, so that the first site does not wait for it for a minute."""
    with Hub(recipe("early", "late", strategy="{name: baseline, t_global: 0.1}")) as hub:
        early = Thread(hub.address, "early")
        hub.until(lambda: hub.version >= 200)
        loop = Loop()
        with wg.join(hub.address, site="late", insecure=True) as site:
            site.prepare(loop.model, loop.optimizer)
            assert site.steps >= 200, "it begins at the step of the global model"
            loop.steps(5)
        early.leave()
