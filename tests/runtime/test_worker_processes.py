"""What process 0 of a server knows of the others, without starting any."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from weightgrad.errors import CheckpointError, StrategyError
from weightgrad.runtime.admission_messages import ServedBy
from weightgrad.runtime.server.group import ServerGroup
from weightgrad.runtime.server.orders import Ready, Resume, parse
from weightgrad.runtime.server.rounds import ServerRounds
from weightgrad.runtime.server.worker_processes import WorkerProcesses


class Group(ServerGroup):
    """Three processes of which only this one is there."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 3
        self.sent: list[tuple[int, bytes]] = []

    def send(self, to: int, data: bytes) -> None:
        self.sent.append((to, data))


def rounds(version: int, *, closing: bool = False) -> tuple[ServerRounds, list[dict[int, int]]]:
    """Rounds of that version, and what was closed again."""
    again: list[dict[int, int]] = []
    made = SimpleNamespace(coordinator=SimpleNamespace(version=version), closing=closing, close_again=again.append)
    return cast(ServerRounds, made), again


def ready(process: int, version: int = -1) -> Ready:
    return Ready(process=process, version=version, port=7000 + process)


def test_all_come_up_and_go_on_from_the_same_version() -> None:
    group = Group()
    workers, (found, again) = WorkerProcesses(group, None), rounds(5, closing=True)
    introduced: list[int] = []
    complete = []
    for process, version in ((2, 5), (1, 6)):
        workers.ready(ready(process, version), found)
        complete.append(workers.all_ready)
    assert complete == [False, True]
    workers.resume(found, introduced.append)
    assert introduced == [1, 2]
    assert [(to, parse(data)) for to, data in group.sent] == [(1, Resume(version=5)), (2, Resume(version=5))]
    assert again == [{1: 6, 2: 5}]


@pytest.mark.parametrize(
    ("version", "closing", "other"), [(5, False, 6), (5, False, 4), (5, True, 7), (None, False, 1)]
)
def test_a_disk_of_another_time_is_refused(version: int | None, closing: bool, other: int) -> None:
    found = None if version is None else rounds(version, closing=closing)[0]
    with pytest.raises(CheckpointError, match=f"server process 1 has global model version {other}, the coordinator"):
        WorkerProcesses(Group(), None).ready(ready(1, other), found)


def test_without_a_model_a_process_may_have_none_or_the_first() -> None:
    group = Group()
    workers = WorkerProcesses(group, None)
    workers.ready(ready(1, -1), None)
    workers.ready(ready(2, 0), None)
    workers.resume(None, lambda process: None)
    assert [parse(data) for _, data in group.sent] == [Resume(version=-1)] * 2


def test_processes_are_reached_at_their_ports_or_where_the_operator_says() -> None:
    workers = WorkerProcesses(Group(), None)
    for process in (2, 1):
        workers.ready(ready(process), None)
    assert workers.located([ServedBy("", [])]) == [ServedBy("", []), ServedBy(":7001", []), ServedBy(":7002", [])]
    known = [ServedBy("old", [(number, number + 1)]) for number in range(3)]
    said = WorkerProcesses(Group(), ("a:1", "b:1", "c:1")).located(known)
    assert said == [ServedBy("a:1", [(0, 1)]), ServedBy("b:1", [(1, 2)]), ServedBy("c:1", [(2, 3)])]
    with pytest.raises(StrategyError, match="--advertise has 1 addresses and the server 3 processes"):
        WorkerProcesses(Group(), ("a:1",)).located(known)
