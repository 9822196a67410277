"""Threads of a real group, and threads that do not come to rest."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from weightgrad.runtime import gloo_threads


def test_a_groups_threads_are_found_and_come_to_rest() -> None:
    """A torch that names them otherwise fails here, and not now and then at the end of somebody's training."""
    before = len(list(gloo_threads._threads()))
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))  # type: ignore[attr-defined]
    assert len(list(gloo_threads._threads())) > before
    for _ in range(20):
        group.allreduce(torch.ones(1000)).wait()  # type: ignore[attr-defined]
    assert gloo_threads.until_quiet()


def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for one that wakes again and again, nor for one that runs."""
    monkeypatch.setattr(gloo_threads, "_AT_MOST", 0.05)
    count = itertools.count()
    monkeypatch.setattr(gloo_threads, "_threads", lambda: iter([("7", (True, (str(next(count)), "0")))]))
    assert not gloo_threads.until_quiet()
    monkeypatch.setattr(gloo_threads, "_threads", lambda: iter([("7", (False, ("1", "0")))]))
    assert not gloo_threads.until_quiet()


def test_without_threads_there_is_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_threads, "_threads", lambda: iter(()))
    assert gloo_threads.until_quiet()
