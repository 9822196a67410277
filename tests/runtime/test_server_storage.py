"""A server's disk: after a crash at any moment, the log and the snapshots give back the same bits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from weightgrad.codecs import Fp32
from weightgrad.core.global_model import digest_of
from weightgrad.core.strategies import find
from weightgrad.errors import CheckpointError
from weightgrad.runtime.admission_messages import AdmissionRequest
from weightgrad.runtime.checkpoints import snapshot
from weightgrad.runtime.run_config import RunConfig
from weightgrad.runtime.server import storage as server_storage
from weightgrad.runtime.server.global_server import GlobalServer, ServeOptions
from weightgrad.runtime.server.storage import Input, ServerStorage
from weightgrad.runtime.transport.in_memory import InMemoryNetwork
from weightgrad.runtime.transport.in_memory_server import InMemoryServer
from weightgrad.runtime.transport.transport import EntryRequest, Outgoing, Peer, joined
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_bytes import pack, unpack
from weightgrad.wire.messages import Holding, Join, Message, ModelPart, Push, PushPart, RoundResult, Segment

NUMEL, ROUNDS = 12, 3
SITES = ("east", "west")
WEIGHTS = torch.arange(float(NUMEL))


# -- the storage alone ------------------------------------------------------------------------------


def test_a_process_that_never_had_a_state(tmp_path: Path) -> None:
    storage = ServerStorage(tmp_path / "state")
    assert storage.load() is None
    assert list(storage.records()) == []
    assert not storage.due
    storage.close()


def test_a_snapshot_and_the_inputs_since(tmp_path: Path) -> None:
    storage = ServerStorage(tmp_path)
    first = storage.append(Input.CONTROL, 1.0, b"in the snapshot")
    storage.write({"vector": torch.ones(3)}, {"time": 1.5}, first, wait=True)
    second = storage.append(Input.BULK, 2.0, b"since ", b"then")
    storage.append(Input.WAKE, 3.0)
    storage.sync()
    storage.close()
    again = ServerStorage(tmp_path)
    found = again.load()
    assert found is not None
    assert torch.equal(found.tensors["vector"], torch.ones(3))
    assert found.facts["time"] == 1.5
    records = list(again.records())
    assert [position for position, _ in records] == [second, second + 1]
    assert [(one.kind, one.time, bytes(one.data)) for _, one in records] == [
        (Input.BULK, 2.0, b"since then"),
        (Input.WAKE, 3.0, b""),
    ]
    assert again.last == second + 1
    again.close()


def test_the_log_is_kept_for_the_older_snapshot_too(tmp_path: Path) -> None:
    """If the newest one is damaged, the one before it and a longer log give the same."""
    storage = ServerStorage(tmp_path)
    for number in range(1, 5):
        position = storage.append(Input.CONTROL, float(number), bytes([number]))
        storage.write({"vector": torch.tensor([float(number)])}, {}, position, wait=True)
    storage.close()
    (tmp_path / "state-000000000004" / "index.json").write_text("{")
    again = ServerStorage(tmp_path)
    found = again.load()
    assert found is not None
    assert found.tensors["vector"].tolist() == [3.0]
    assert len(found.damaged) == 1
    assert [bytes(one.data) for _, one in again.records()] == [b"\4"]
    again.close()


def test_a_snapshot_is_due_when_the_log_outgrows_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_storage, "_LEAST_LOG", 1000)
    storage, due = ServerStorage(tmp_path), []
    for size, state in ((500, None), (600, None), (1, 1000), (9000, None), (2000, None)):
        storage.append(Input.BULK, 0.0, bytes(size))
        if state is not None:
            storage.write({"vector": torch.zeros(state)}, {}, storage.last, wait=True)
        due.append(storage.due)
    assert due == [False, True, False, False, True], "4000 bytes of state are worth 10000 of log"
    storage.close()


def test_the_inputs_of_another_run_are_forgotten(tmp_path: Path) -> None:
    storage = ServerStorage(tmp_path)
    storage.append(Input.CONTROL, 0.0, b"old")
    storage.restart()
    assert list(storage.records()) == []
    storage.append(Input.CONTROL, 1.0, b"new")
    storage.sync()
    assert [bytes(one.data) for _, one in storage.records()] == [b"new"]
    storage.close()


def with_a_state(directory: Path) -> ServerStorage:
    """Two snapshots with an open push before each, and an input since."""
    storage = ServerStorage(directory)
    for number in range(1, 4):
        position = storage.append(Input.BULK, float(number), b"of an open push")
        storage.append(Input.CONTROL, float(number), b"in the snapshot")
        storage.write({"vector": torch.tensor([float(number)])}, {}, position - 1, wait=True)
    storage.append(Input.CONTROL, 9.0, b"since")
    storage.close()
    return storage


def cut_short(state: Path, other: Path) -> None:
    (log,) = state.glob("inputs-*.log")
    os.truncate(log, log.stat().st_size - 100)


def gone(state: Path, other: Path) -> None:
    (log,) = state.glob("inputs-*.log")
    log.unlink()


def of_another_run(state: Path, other: Path) -> None:
    (log,) = state.glob("inputs-*.log")
    log.unlink()
    with_a_state(other)
    shutil.copy(next(other.glob("inputs-*.log")), state)


def newer_than_the_snapshot(state: Path, other: Path) -> None:
    """A snapshot from a backup, and a log that was cut since."""
    shutil.copytree(state / "state-000000000002", other)
    storage = ServerStorage(state)
    assert storage.load() is not None
    storage.append(Input.CONTROL, 9.0, b"later")
    for _ in range(2):
        storage.write({"vector": torch.zeros(1)}, {}, storage.last, wait=True)
    storage.close()
    for path in state.glob("state-*"):
        shutil.rmtree(path)
    shutil.copytree(other, state / "state-000000000002")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (cut_short, r"the log ends with input 5, and state-000000000003 was written after input 6"),
        (gone, r"the log is another one than that of state-000000000003"),
        (of_another_run, r"the log is another one than that of state-000000000003"),
        (newer_than_the_snapshot, r"the log begins with input 9, and state-000000000002 needs those from 3 on"),
    ],
)
def test_a_log_that_does_not_belong_to_the_snapshot_is_refused(
    change: Callable[[Path, Path], None], says: str, tmp_path: Path
) -> None:
    """Inputs would be missing without a word: those that are gone, and new ones with positions of old ones."""
    state = tmp_path / "state"
    with_a_state(state)
    change(state, tmp_path / "other")
    again = ServerStorage(state)
    with pytest.raises(CheckpointError, match=says):
        again.load()
    again.close()


def test_the_advice_for_a_log_that_was_cut_works(tmp_path: Path) -> None:
    with_a_state(tmp_path)
    cut_short(tmp_path, tmp_path)
    shutil.rmtree(tmp_path / "state-000000000003")
    again = ServerStorage(tmp_path)
    found = again.load()
    assert found is not None
    assert found.tensors["vector"].tolist() == [2.0]
    assert [position for position, _ in again.records()] == [3, 4, 5]
    again.close()


def test_a_snapshot_is_never_ahead_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash may take inputs that were not synced; their positions are given again, to others."""
    storage = ServerStorage(tmp_path)
    storage.append(Input.CONTROL, 0.0, b"not synced")
    done: list[str] = []

    def noted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            done.append(name)
            return work(*arguments)

        return run

    monkeypatch.setattr(os, "fsync", noted("sync", os.fsync))
    monkeypatch.setattr(snapshot, "write", noted("write", snapshot.write))
    storage.write({"vector": torch.zeros(1)}, {}, storage.last, wait=True)
    assert done[:2] == ["sync", "write"]
    storage.close()


def test_a_directory_that_is_in_use_is_refused(tmp_path: Path) -> None:
    storage = ServerStorage(tmp_path)
    with pytest.raises(CheckpointError, match="another process"):
        ServerStorage(tmp_path)
    storage.close()
    ServerStorage(tmp_path).close()


def test_a_snapshot_that_cannot_be_written_is_said_when_somebody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    storage = ServerStorage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("weightgrad.runtime.checkpoints.snapshot.save_file", full)
        storage.write({"vector": torch.zeros(1)}, {}, 0, wait=False)
        with pytest.raises(CheckpointError, match="the disk is full; the previous state is kept"):
            storage.settle()
    storage.write({"vector": torch.zeros(1)}, {}, 0, wait=True)
    storage.close()


# -- a whole server, killed at every moment -----------------------------------------------------------


def update(site: str, round_: int) -> Tensor:
    """What a site pushes."""
    return torch.full((NUMEL,), float(round_)) if site == "east" else WEIGHTS / (round_ + 2)


def of_weights(vector: Tensor, start: int, stop: int) -> Segment:
    return Segment(start, Fp32().encode(vector[start:stop], {}, 0)[0])


class Driver:
    """A server without a transport: messages are put in by hand, and what sites are told is noted."""

    def __init__(self, state: Path) -> None:
        config = RunConfig(SITES, lambda numel: find("diloco", {"every": 1, "down": "qsgd(bits=4)"}), seed=3)
        transport = InMemoryServer(InMemoryNetwork(), "hub")
        self.server = GlobalServer(config, ServeOptions(state=state), transport)
        self.told = 0  # the last version whose result any site was sent
        transport.send = self._send  # type: ignore[method-assign]

    def _send(self, peer: Peer, data: Outgoing, *, control: bool = False) -> bool:
        del peer, control
        message = unpack(joined(data))
        self.told = max(self.told, message.version if isinstance(message, RoundResult) else 0)
        return True

    def put(self, peer: Peer, message: Message) -> None:
        self.server.inputs.handle(peer, pack(message), self.server.now)
        self.server.snapshots.write_if_due()
        self.server.process.before_close()

    def enter(self, told: int) -> None:
        """Both sites come, or come back; what was in flight comes again."""
        for site in SITES:
            request = AdmissionRequest(site, [("weight", [NUMEL])], told if told else -1, epoch=1).pack()
            self.server.enter(EntryRequest(site, 0, "1", request, None, None, "here"))
        if self.server.coordinator is None:
            piece = of_weights(WEIGHTS, 0, NUMEL)
            self.put(Peer("east", 0), ModelPart(version=0, vector="weights", segments=(piece,), last=True))
        for site in SITES:
            self.put(Peer(site, 0), Holding(site=site, rank=0, ranks=1, epoch=1, held=Intervals.whole(NUMEL)))
            digest = None if told else digest_of(WEIGHTS, Intervals.whole(NUMEL))
            self.put(Peer(site, 0), Join(site=site, version=told, epoch=1, digest=digest))

    def train(self) -> None:
        """Every push of every round, once more if the server has it already."""
        for round_ in range(1, ROUNDS + 1):
            for site in SITES:
                self.push(site, round_)

    def push(self, site: str, round_: int) -> None:
        peer, values, half = Peer(site, 0), update(site, round_), NUMEL // 2
        seen = min(round_ - 1, self.version)
        first, last = (of_weights(values, 0, half),), (of_weights(values, half, NUMEL),)
        self.put(peer, PushPart(site=site, round=round_, rank=0, segments=first, last=False))
        self.put(peer, Push(site=site, round=round_, after=round_ - 1, step=round_, seen=seen, samples=1))
        self.put(peer, PushPart(site=site, round=round_, rank=0, segments=last, last=True))

    @property
    def version(self) -> int:
        return self.server.coordinator.version if self.server.coordinator is not None else 0

    @property
    def digest(self) -> str:
        assert self.server.process.serving is not None
        return self.server.process.serving.shard.global_model.digest()

    def close(self) -> None:
        self.server.process.close()


@dataclass(frozen=True)
class Image:
    """A disk at the moment of a crash, and what the sites had been told."""

    disk: Path
    told: int


@pytest.fixture
def crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Driver], list[Image]]]:
    """Copies the disk of a server whenever it is about to make something durable."""
    images: list[Image] = []
    watched: list[Driver] = []

    def around(work: Callable[..., Any]) -> Callable[..., Any]:
        def done(*arguments: Any) -> Any:
            if watched:
                target = tmp_path / "images" / str(len(images))
                shutil.copytree(tmp_path / "state", target)
                images.append(Image(target, watched[0].told))
            return work(*arguments)

        return done

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, around(getattr(os, name)))

    def watch(driver: Driver) -> list[Image]:
        watched.append(driver)
        return images

    yield watch
    watched.clear()


@pytest.mark.parametrize("snapshots", ["one at first", "all the time"])
def test_a_server_that_is_killed_at_any_moment_ends_with_the_same_bits(
    snapshots: str,
    tmp_path: Path,
    crashes: Callable[[Driver], list[Image]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if snapshots == "all the time":
        monkeypatch.setattr(server_storage, "_LEAST_LOG", 1)
        monkeypatch.setattr(server_storage, "_LOG_PER_STATE", 0.0)
    first = Driver(tmp_path / "state")
    images = crashes(first)
    first.enter(0)
    first.train()
    first.close()
    shutil.copytree(tmp_path / "state", tmp_path / "end")
    taken = [*images, Image(tmp_path / "end", ROUNDS)]
    assert first.version == ROUNDS
    assert len(taken) > ROUNDS
    monkeypatch.undo()
    for image in taken:
        again = Driver(image.disk)
        assert again.version >= image.told, "nobody was told what is forgotten"
        again.enter(image.told)
        again.train()
        assert (again.version, again.digest) == (ROUNDS, first.digest)
        again.close()


@pytest.mark.parametrize("cut", range(0, 260, 13))
def test_a_log_whose_end_is_torn_loses_only_what_was_not_answered(cut: int, tmp_path: Path) -> None:
    """The last push is not complete: its parts were not synced, and a crash may have kept any of their bytes."""
    first = Driver(tmp_path / "state")
    first.enter(0)
    for round_ in range(1, ROUNDS):
        for site in SITES:
            first.push(site, round_)
    told = first.told
    assert told == ROUNDS - 1
    peer, values = Peer("east", 0), update("east", ROUNDS)
    storage = first.server.process.storage
    assert storage is not None
    storage.sync()
    (log,) = (tmp_path / "state").glob("inputs-*.log")
    durable = log.stat().st_size
    first.put(peer, PushPart(site="east", round=ROUNDS, rank=0, segments=(of_weights(values, 0, NUMEL),), last=False))
    first.put(peer, Push(site="east", round=ROUNDS, after=ROUNDS - 1, step=ROUNDS, seen=told, samples=1))
    first.close()
    os.truncate(log, min(durable + cut, log.stat().st_size))
    again = Driver(tmp_path / "state")
    assert again.version == told
    again.enter(told)
    again.train()
    assert again.version == ROUNDS
    whole = Driver(tmp_path / "whole")
    whole.enter(0)
    whole.train()
    assert again.digest == whole.digest
    again.close()
    whole.close()
