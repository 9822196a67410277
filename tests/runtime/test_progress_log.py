"""The line that a site logs now and then."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from weightgrad.runtime.site import progress_log
from weightgrad.runtime.site.progress_log import ProgressLog, show_by_default
from weightgrad.wire.sync_schedule import SyncSchedule


@dataclass
class Counters:
    up_bytes: int = 500
    down_bytes: int = 700
    waited: float = 1.0
    waits: dict[str, int] = field(default_factory=dict)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_line_says_what_happened_since_the_line_before(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "weightgrad")
    counters, clock = Counters(), Clock()
    progress = ProgressLog("east", counters, 40, clock=clock)
    for step in range(41, 61):
        clock.now += 1.0
        counters.up_bytes += 1000
        counters.down_bytes += 2000
        counters.waited += 0.25
        progress.after_step(step, 7, None if step < 55 else SyncSchedule(4, 2, "ef(topk(0.01) > sign())"))
    assert caplog.messages == [
        "east: step 50, 1 steps/s; 10 kB up, 20 kB down, 25 % of the time waiting",
        "east: step 60, 1 steps/s; 10 kB up, 20 kB down, 25 % of the time waiting; "
        "a round every 4 steps, its result 2 steps later, ef(topk(0.01) > sign()) up",
    ]


def test_a_line_names_those_for_whom_the_site_has_waited_long(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "weightgrad")
    counters, clock = Counters(waits={"north": 1}), Clock()
    progress = ProgressLog("east", counters, 0, clock=clock)
    counters.waits = {"north": 1, "west": 2}
    for step in (1, 2):
        clock.now += 10.0
        progress.after_step(step, 0, None)
    assert [line.rpartition("waiting")[2] for line in caplog.messages] == [", long for west", ""]


def test_a_slow_step_has_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "weightgrad")
    clock = Clock()
    progress = ProgressLog("east", Counters(), 0, clock=clock)
    clock.now += 35.0
    progress.after_step(1, 0, None)
    clock.now += 5.0
    progress.after_step(2, 0, None)
    assert caplog.messages == ["east: step 1, 0.0286 steps/s; 0 B up, 0 B down, 0 % of the time waiting"]


def test_a_loss_that_is_a_tensor_is_read_when_a_line_is_written(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "weightgrad")
    clock = Clock()
    progress = ProgressLog("east", Counters(), 0, clock=clock)
    weight = torch.ones((), requires_grad=True)
    loss = 2.5 * weight
    progress.note(loss)
    assert progress._loss is not loss, "it would keep the graph of the backward pass"
    clock.now += 10.0
    progress.after_step(1, 0, None)
    assert caplog.messages[0].startswith("east: step 1, loss 2.5, ")
    assert progress.stats(1, 0, None)["loss"] == 2.5


def test_the_last_line_is_about_the_whole_run(caplog: pytest.LogCaptureFixture) -> None:
    """A run of a few seconds has no other."""
    caplog.set_level(logging.INFO, "weightgrad")
    counters, clock = Counters(), Clock()
    progress = ProgressLog("east", counters, 40, clock=clock)
    progress.note(0.125)
    clock.now += 4.0
    counters.up_bytes, counters.down_bytes, counters.waited = 12_000, 34_000, 2.0
    progress.leaves(60)
    assert caplog.messages == [
        "east leaves after step 60, loss 0.125; 12 kB up, 34 kB down in 4 s, 25 % of the time waiting"
    ]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The logger of a process in which nobody has set up logging."""
    log = logging.Logger("weightgrad")
    monkeypatch.setattr(progress_log, "log", log)
    yield log
    for handler in log.handlers:
        handler.close()


def test_lines_are_visible_where_nobody_has_set_up_logging(bare: logging.Logger) -> None:
    show_by_default()
    show_by_default()
    assert len(bare.handlers) == 1
    assert bare.isEnabledFor(logging.INFO)


def test_what_the_user_has_set_up_stays(bare: logging.Logger) -> None:
    own = logging.NullHandler()
    bare.addHandler(own)
    bare.setLevel(logging.ERROR)
    show_by_default()
    assert bare.handlers == [own]
    assert bare.level == logging.ERROR


def test_a_level_of_the_users_own_stays(bare: logging.Logger) -> None:
    bare.setLevel(logging.ERROR)
    show_by_default()
    assert bare.level == logging.ERROR
