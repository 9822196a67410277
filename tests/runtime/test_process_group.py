"""The end of a process: Gloo's threads of a real group, and threads that do not come to rest."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from weightgrad.runtime import process_group


def test_a_groups_threads_are_found_and_come_to_rest() -> None:
    """A torch that names them otherwise fails here, and not now and then at the end of somebody's training."""
    before = len(list(process_group._gloo_threads()))
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))  # type: ignore[attr-defined]
    until = time.monotonic() + 60
    while len(list(process_group._gloo_threads())) <= before:  # a thread gives itself its name
        assert time.monotonic() < until
        time.sleep(0.01)
    for _ in range(20):
        group.allreduce(torch.ones(1000)).wait()  # type: ignore[attr-defined]
    assert process_group.wait_for_gloo_threads()


def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for one that wakes again and again, nor for one that runs."""
    monkeypatch.setattr(process_group, "_AT_MOST_S", 0.05)
    count = itertools.count()
    monkeypatch.setattr(process_group, "_gloo_threads", lambda: iter([("7", (True, (str(next(count)), "0")))]))
    assert not process_group.wait_for_gloo_threads()
    monkeypatch.setattr(process_group, "_gloo_threads", lambda: iter([("7", (False, ("1", "0")))]))
    assert not process_group.wait_for_gloo_threads()


def test_without_threads_there_is_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_gloo_threads", lambda: iter(()))
    assert process_group.wait_for_gloo_threads()
