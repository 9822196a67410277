"""A server of two processes, without sockets: whenever they are killed, they end with the bits of one process."""

from __future__ import annotations

import random
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from weightgrad.codecs import Fp32
from weightgrad.core.global_model import digest_of
from weightgrad.core.server.close_order import ClosedPart
from weightgrad.core.server.shard import ServerShard
from weightgrad.core.strategies import Strategy, find
from weightgrad.errors import CheckpointError, LinkError
from weightgrad.runtime.admission_messages import AdmissionRequest
from weightgrad.runtime.run_config import RunConfig
from weightgrad.runtime.server import storage as server_storage
from weightgrad.runtime.server.global_server import GlobalServer, ServeOptions, _closes
from weightgrad.runtime.server.group import ServerGroup
from weightgrad.runtime.server.worker import ServerWorker
from weightgrad.runtime.transport.in_memory import InMemoryNetwork
from weightgrad.runtime.transport.in_memory_server import InMemoryServer
from weightgrad.runtime.transport.transport import EntryRequest, Outgoing, Peer, joined
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_bytes import pack, unpack
from weightgrad.wire.messages import Holding, Join, Message, ModelPart, Push, PushPart, RoundResult, Segment

NUMEL, ROUNDS = 12, 4
HALVES = ((0, NUMEL // 2), (NUMEL // 2, NUMEL))
SITES = ("east", "west")
WEIGHTS = torch.arange(float(NUMEL))


def fit(numel: int) -> Strategy:
    del numel
    return find("diloco", {"every": 1, "down": "qsgd(bits=4)"})


def update(site: str, round_: int) -> Tensor:
    """What a site pushes."""
    return torch.full((NUMEL,), float(round_)) if site == "east" else WEIGHTS / (round_ + 2)


def segment(vector: Tensor, start: int, stop: int) -> Segment:
    return Segment(start, Fp32().encode(vector[start:stop], {}, 0)[0])


class QueueGroup(ServerGroup):
    """Two processes whose messages wait until the test delivers them."""

    def __init__(self, number: int, queues: dict[int, deque[bytes]]) -> None:
        self.number, self.size = number, 2
        self._queues = queues

    def start(self, receive: Callable[[int, bytes], None], failed: Callable[[str], None]) -> None:
        del receive, failed

    def send(self, to: int, data: bytes) -> None:
        self._queues[to].append(data)


class TwoProcesses:
    """The coordinator and a worker on their disks, and two sites whose messages are put in by hand.

    Attributes:
        told: the last version whose result any site was sent.
    """

    def __init__(self, disk: Path, told: int = 0) -> None:
        self.told = told
        self.queues: dict[int, deque[bytes]] = {0: deque(), 1: deque()}
        config = RunConfig(SITES, fit, seed=3)
        self.worker = ServerWorker(
            config.strategy_for,
            3,
            self._transport("worker"),
            7444,
            lambda entry: None,
            QueueGroup(1, self.queues),
            state=disk / "1",
        )
        try:
            self.coordinator = GlobalServer(
                config, ServeOptions(state=disk / "0"), self._transport("hub"), group=QueueGroup(0, self.queues)
            )
        except CheckpointError:
            self.worker.process.close()
            raise
        self.worker._introduce()
        self._hand_over_notes()
        self.coordinator._start_processes()
        while self._has_input():  # what the worker has said beside that it is there
            self.coordinator._process_next()

    def _transport(self, name: str) -> InMemoryServer:
        made = InMemoryServer(InMemoryNetwork(), name)
        made.send = self._send  # type: ignore[method-assign]
        return made

    def _send(self, peer: Peer, data: Outgoing, *, control: bool = False) -> bool:
        message = unpack(joined(data))
        if control and isinstance(message, RoundResult):
            self.told = max(self.told, message.version)
        return True

    # -- what may happen --------------------------------------------------------------------------

    def _hand_over_notes(self) -> None:
        while self.queues[0]:
            self.coordinator._inbox.put_control((1, self.queues[0].popleft()))

    def deliver(self, to: int) -> bool:
        """The oldest message between the processes arrives; false if there is none."""
        if not self.queues[to]:
            return False
        data = self.queues[to].popleft()
        if to == 1:
            self.worker._inbox.put_control((0, data))
            self.worker._process_next()
        else:
            self.coordinator._inbox.put_control((1, data))
            self._coordinate()
        return True

    def put(self, process: int, peer: Peer, message: Message) -> None:
        """A message of a rank arrives at a process."""
        data = memoryview(pack(message))
        if process == 1:
            self.worker._inbox.put_bulk((peer, data), peer.site, len(data))
            self.worker._process_next()
        elif isinstance(message, Push | Join):
            self.coordinator._inbox.put_control((peer, data))
            self._coordinate()
        else:
            self.coordinator._inbox.put_bulk((peer, data), peer.site, len(data))
            self._coordinate()

    def _coordinate(self) -> None:
        self.coordinator._process_next()
        while self._has_input():
            self.coordinator._process_next()

    def _has_input(self) -> bool:
        """Whether the coordinator has a message that it may handle now: while a round closes, others have to wait."""
        waiting = [one.item for one in self.coordinator._inbox._control]
        if self.coordinator.rounds is not None and self.coordinator.rounds.closing:
            return any(_closes(item) for item in waiting)
        return bool(self.coordinator._deferred or waiting)

    def settle(self) -> None:
        """Everything on its way between the processes arrives."""
        while self.deliver(1) or self.deliver(0):
            pass

    def write_snapshots(self) -> None:
        self.worker._write_snapshot_if_due()
        self.coordinator.snapshots.write_if_due()
        for process in (self.worker.process, self.coordinator.process):
            process.before_close()

    # -- sites ------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Both sites come, or come back."""
        for site in SITES:
            request = AdmissionRequest(site, [("a", [HALVES[0][1]]), ("b", [HALVES[0][1]])], self.told or -1, epoch=1)
            self.coordinator.enter(EntryRequest(site, 0, "1", request.pack(), None, None, "here"))
        self.settle()
        if self.coordinator.coordinator is None:
            for process, (start, stop) in enumerate(HALVES):
                piece = segment(WEIGHTS, start, stop)
                self.put(process, Peer("east", 0), ModelPart(version=0, vector="weights", segments=(piece,), last=True))
            self.settle()
        whole = Intervals.whole(NUMEL)
        for site in SITES:
            for process in (0, 1):
                held = Holding(site=site, rank=0, ranks=1, epoch=1, held=whole)
                self.put(process, Peer(site, 0), held)
            digest = None if self.told else digest_of(WEIGHTS, whole)
            self.put(0, Peer(site, 0), Join(site=site, version=self.told, epoch=1, digest=digest))

    def messages(self, site: str, round_: int) -> list[tuple[int, Message]]:
        """A push, as it comes to the two processes."""
        values, seen = update(site, round_), min(round_ - 1, self.told)
        parts = [
            (process, PushPart(site=site, round=round_, rank=0, segments=(segment(values, *half),), last=True))
            for process, half in enumerate(HALVES)
        ]
        return [*parts, (0, Push(site=site, round=round_, after=round_ - 1, step=round_, seen=seen, samples=1))]

    def train(self, draw: random.Random) -> Iterator[None]:
        """All rounds from the last one on that sites know, which comes again; stops after each single event."""
        for round_ in range(max(1, self.told), ROUNDS + 1):
            waiting = [(process, site, one) for site in SITES for process, one in self.messages(site, round_)]
            draw.shuffle(waiting)
            while waiting:
                choice = draw.random()
                if choice < 0.5:
                    process, site, message = waiting.pop()
                    self.put(process, Peer(site, 0), message)
                elif not self.deliver(int(choice < 0.75)):
                    continue
                yield
            while self.deliver(draw.randrange(2)) or self.deliver(0) or self.deliver(1):
                yield

    # -- the state --------------------------------------------------------------------------------

    @property
    def shards(self) -> list[ServerShard]:
        serving = [self.coordinator.process.serving, self.worker.process.serving]
        return [one.shard for one in serving if one is not None]

    @property
    def version(self) -> int:
        return self.coordinator.coordinator.version if self.coordinator.coordinator is not None else 0

    def digest(self) -> int:
        return sum(shard.global_model.digest_value() for shard in self.shards) % 2**64

    def close(self) -> None:
        self.worker.process.close()
        self.coordinator.process.close()


def finish(pair: TwoProcesses, draw: random.Random) -> int:
    """Train to the end; the digest of the global model."""
    pair.enter()
    for _ in pair.train(draw):
        pass
    assert pair.version == ROUNDS
    assert all(not shard.pushes for shard in pair.shards), "nothing is kept that no round takes"
    assert pair.coordinator.rounds is not None
    assert not pair.coordinator.rounds.pending
    found = pair.digest()
    pair.close()
    return found


@pytest.fixture
def wanted(tmp_path: Path) -> int:
    """The digest of a run that nothing happens to."""
    return finish(TwoProcesses(tmp_path / "undisturbed"), random.Random(0))


@pytest.mark.parametrize("seed", range(8))
def test_the_order_in_which_messages_come_changes_no_bit(seed: int, tmp_path: Path, wanted: int) -> None:
    assert finish(TwoProcesses(tmp_path / "disk"), random.Random(seed)) == wanted


@pytest.mark.parametrize("snapshots", [False, True], ids=["a snapshot at first", "snapshots all the time"])
@pytest.mark.parametrize("power", [False, True], ids=["killed", "power failure"])
@pytest.mark.parametrize("seed", range(3))
def test_both_processes_end_at_any_moment_and_go_on_from_their_disks(
    seed: int, power: bool, snapshots: bool, tmp_path: Path, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if snapshots:
        monkeypatch.setattr(server_storage, "_LEAST_LOG", 1)
        monkeypatch.setattr(server_storage, "_LOG_PER_STATE", 0.0)
    disk, draw = tmp_path / "disk", random.Random(seed)
    durable = Durable(disk, tmp_path / "durable", monkeypatch) if power else None
    pair = TwoProcesses(disk)
    pair.enter()
    crashes = 0
    while pair.version < ROUNDS:
        after = draw.randrange(1, 50)
        for events, _ in enumerate(pair.train(draw)):
            if snapshots:
                pair.write_snapshots()
            if events == after:
                break
        else:
            break
        told = pair.told
        pair.close()
        if durable is not None:
            durable.lose_the_rest()
        pair = TwoProcesses(disk, told)
        assert pair.version >= told, "nobody was told what is forgotten"
        pair.enter()
        crashes += 1
    assert crashes
    if durable is not None:
        durable.end()
    assert finish(pair, draw) == wanted


class Durable:
    """Remembers what each log had when it was last synced; a power failure leaves no more than that."""

    def __init__(self, disk: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._disk, self._copy, self._patch = disk, copy, monkeypatch
        self._sync = server_storage.ServerStorage.sync
        for name in ("sync", "write", "restart", "settle"):
            work = getattr(server_storage.ServerStorage, name)
            monkeypatch.setattr(server_storage.ServerStorage, name, self._around(work))

    def _around(self, work: Callable[..., None]) -> Callable[..., None]:
        def done(storage: server_storage.ServerStorage, *arguments: object, **named: object) -> None:
            work(storage, *arguments, **named)
            storage._writer.wait()
            if work is not self._sync:
                self._sync(storage)  # what these leave is durable too
            own: Path = storage._directory
            shutil.rmtree(self._copy / own.name, ignore_errors=True)
            shutil.copytree(own, self._copy / own.name)

        return done

    def lose_the_rest(self) -> None:
        for own in self._copy.iterdir():
            shutil.rmtree(self._disk / own.name)
            shutil.copytree(own, self._disk / own.name)

    def end(self) -> None:
        self._patch.undo()


def test_states_of_different_times_are_refused(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    pair, draw = TwoProcesses(disk), random.Random(0)
    pair.enter()
    pair.settle()
    for process in (pair.worker.process, pair.coordinator.process):
        process.sync()
    shutil.copytree(disk / "1", tmp_path / "old")
    finish(pair, draw)
    shutil.rmtree(disk / "1")
    shutil.copytree(tmp_path / "old", disk / "1")
    with pytest.raises(CheckpointError, match="process 1 has global model version 0, the coordinator 4"):
        TwoProcesses(disk)


def test_a_round_that_is_closed_in_one_process_only_is_closed_in_the_other(tmp_path: Path, wanted: int) -> None:
    """The coordinator's order is lost with the connection; its parts are not closed twice."""
    disk, draw = tmp_path / "disk", random.Random(1)
    pair = TwoProcesses(disk)
    pair.enter()
    pair.settle()
    for site in SITES:
        for process, message in pair.messages(site, 1):
            pair.put(process, Peer(site, 0), message)
            while pair.deliver(0):
                pass
    assert [shard.global_model.version for shard in pair.shards] == [1, 0]
    assert pair.told == 0
    pair.close()
    again = TwoProcesses(disk)
    again.enter()
    again.settle()
    assert [shard.global_model.version for shard in again.shards] == [1, 1]
    assert again.version == again.told == 1
    assert finish(again, draw) == wanted


def test_a_note_that_a_round_is_closed_is_said_again(tmp_path: Path, wanted: int) -> None:
    disk, draw = tmp_path / "disk", random.Random(1)
    pair = TwoProcesses(disk)
    pair.enter()
    pair.settle()
    for site in SITES:
        for process, message in pair.messages(site, 1):
            pair.put(process, Peer(site, 0), message)
            while pair.deliver(0):
                pass
    while pair.deliver(1):
        pass  # the worker closes the round; the coordinator does not hear of it
    assert [shard.global_model.version for shard in pair.shards] == [1, 1]
    assert pair.told == 0
    part = pair.worker._last_closed
    assert part is not None
    assert isinstance(part.part, ClosedPart)
    pair.close()
    again = TwoProcesses(disk)
    again.settle()
    assert again.version == 1
    assert finish(again, draw) == wanted


def test_a_worker_whose_coordinator_has_ended_blames_no_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: int
) -> None:
    """The site is not refused, but waits for the server's return; what it has sent is in the log."""
    disk, draw = tmp_path / "disk", random.Random(1)
    pair = TwoProcesses(disk)
    pair.enter()
    pair.settle()
    refused: list[Peer] = []

    def ended(to: int, data: bytes) -> None:
        raise LinkError(f"server process {to} has ended")

    with monkeypatch.context() as patch:
        patch.setattr(pair.worker.group, "send", ended)
        patch.setattr(pair.worker.transport, "drop", lambda peer, why: refused.append(peer))
        with pytest.raises(LinkError, match="server process 0 has ended"):
            pair.put(*next((process, Peer("east", 0), one) for process, one in pair.messages("east", 1) if process))
    assert not refused
    pair.close()
    assert finish(TwoProcesses(disk), draw) == wanted
