"""What the global server does with a push and with a round, without the network: unpack, log, sync, check, close.

`ServerProcess` of the deployment takes packed messages that were encoded beforehand, writes them to its log on disk,
and closes rounds. So the sender costs nothing, and two server processes can be compared with one on two cores.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
from deployment.server_process import file_bytes_written, peak_memory
from result_table import ResultTable, Row, parameters
from server_cost import pass_seconds

from weightgrad import codecs
from weightgrad.core import pieces, strategies
from weightgrad.core.layout import Layout
from weightgrad.core.server.close_order import ClosedPush, CloseOrder
from weightgrad.kernels import derive
from weightgrad.runtime.server import storage as server_storage
from weightgrad.runtime.server.orders import Begin
from weightgrad.runtime.server.process import ServerProcess
from weightgrad.runtime.transport.transport import Application, Outgoing, Peer, ServerTransport, SessionStatus, Traffic
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_bytes import pack
from weightgrad.wire.message_parts import push_parts
from weightgrad.wire.messages import Holding, ModelPart, Push, RoundResult, Segment

COLUMNS = [
    ("strategy", "strategy", "{}"),
    ("parameters", "shown", "{}"),
    ("sites", "sites", "{:d}"),
    ("push MB", "push_mb", "{:.3g}"),
    ("updates/s", "updates_s", "{:.3g}"),
    ("CPU ms an update", "cpu_ms", "{:.3g}"),
    ("passes", "passes", "{:.2f}"),
    ("disk / pushes", "disk_ratio", "{:.2f}"),
    ("with snapshots", "snapshot_ratio", "{:.2f}"),
    ("peak RSS MB", "peak_mb", "{:.0f}"),
]
PROCESS_COLUMNS = [
    ("strategy", "strategy", "{}"),
    ("parameters", "shown", "{}"),
    ("sites", "sites", "{:d}"),
    ("one process, updates/s", "one", "{:.3g}"),
    ("two, updates/s", "two", "{:.3g}"),
    ("ratio", "ratio", "{:.2f}"),
]


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    numels: tuple[int, ...] = (1_000_000, 10_000_000, 64_000_000)
    sites: tuple[int, ...] = (1, 2, 8)
    strategies: tuple[str, ...] = ("auto", "weightgrad", "diloco-4bit")
    seconds: float = 4.0
    processes_numel: int = 64_000_000
    processes_sites: int = 4
    repeats: int = 3


QUICK = Plan(
    numels=(300_000,),
    sites=(2,),
    strategies=("auto",),
    seconds=0.2,
    processes_numel=300_000,
    processes_sites=2,
    repeats=1,
)
_CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "diloco-4bit": ("diloco", {"up": "ef(qsgd(bits=4))", "down": "ef(qsgd(bits=4))"}),
}


@dataclass(frozen=True)
class Case:
    """The work of one server process: of `processes` equal parts of a model it serves one."""

    strategy: str
    numel: int
    sites: int
    seconds: float
    process: int = 0
    processes: int = 1


def find_strategy(name: str) -> strategies.Strategy:
    """A preset, or one of this benchmark's own."""
    preset, changes = _CHANGES.get(name, (name, {}))
    return strategies.find(preset, changes)


def measure(plan: Plan, report: Callable[[str], None]) -> list[ResultTable]:
    """One table over sizes and sites, and one of two processes against one."""
    work = ResultTable(
        "server-work",
        "Work of the global server",
        "The `ServerProcess` of `weightgrad serve`, alone in a process, with messages that were packed beforehand: "
        "unpack, append to the log, decode for the guard; then sync, aggregate, encode, move the global model, digest. "
        "No network, so updates/s are what one core of a server can do. A pass is `Tensor.copy_` of as many float32 "
        "values as the model has. Disk: bytes written for a round over the bytes of its pushes, without and with the "
        "snapshots that become due. diloco-4bit is diloco with 4-bit codecs with error feedback both ways.",
        COLUMNS,
    )
    for strategy in plan.strategies:
        for numel in plan.numels:
            for sites in plan.sites:
                report(f"server work: {strategy}, {parameters(numel)}, {sites} sites")
                work.rows.append(_run([Case(strategy, numel, sites, plan.seconds)])[0])
    both = ResultTable(
        "server-processes",
        "Two server processes against one",
        "The same work, of a model served by one process, and by two processes at the same time that serve half of it "
        f"each. Both need a core of their own; the sender needs none here. The median of {plan.repeats}.",
        PROCESS_COLUMNS,
    )
    for strategy in plan.strategies:
        report(f"server processes: {strategy}")
        both.rows.append(_compare(plan, strategy))
    return [work, both]


def _compare(plan: Plan, strategy: str) -> Row:
    numel, sites, found = plan.processes_numel, plan.processes_sites, []
    for _ in range(plan.repeats):
        (one,) = _run([Case(strategy, numel, sites, plan.seconds)])
        two = _run([Case(strategy, numel, sites, plan.seconds, process, 2) for process in range(2)])
        # A round is closed when both have closed it.
        found.append((one["updates_s"], min(row["updates_s"] for row in two)))
    one_s, two_s = sorted(found, key=lambda pair: pair[1] / pair[0])[len(found) // 2]
    row: Row = {"strategy": strategy, "shown": parameters(numel), "numel": numel, "sites": sites}
    return {**row, "one": one_s, "two": two_s, "ratio": two_s / one_s}


def _run(cases: list[Case]) -> list[Row]:
    """Run server processes at the same time."""
    context = multiprocessing.get_context("spawn")
    results, barrier = context.SimpleQueue(), context.Barrier(len(cases))
    children = [context.Process(target=_work, args=(case, barrier, results), daemon=True) for case in cases]
    for child in children:
        child.start()
    try:
        while results.empty():
            if any(child.exitcode for child in children):
                raise RuntimeError("a server process of the benchmark failed")
            time.sleep(0.01)
        return [results.get() for _ in cases]
    finally:
        for child in children:
            child.join(60)
            child.kill()


class _NoTransport(ServerTransport):
    """Takes what the server sends, and forgets it."""

    def start(self, application: Application) -> None:
        """Nothing."""

    def send(self, peer: Peer, data: Outgoing, *, control: bool = False) -> bool:
        """Forget it."""
        return True

    def sessions(self) -> dict[Peer, SessionStatus]:
        """None."""
        return {}

    def traffic_of(self, peer: Peer) -> Traffic:
        """None."""
        return Traffic()

    def socket_bytes(self) -> dict[Peer, Traffic]:
        """None."""
        return {}

    def drop(self, peer: Peer, why: str) -> None:
        """Nothing."""

    def stop(self, grace: float) -> None:
        """Nothing."""


def _work(case: Case, barrier: Barrier, results: SimpleQueue[Row]) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        results.put(_Server(case, Path(directory)).measure(barrier))


class _Server:
    """One server process and its precomputed pushes."""

    def __init__(self, case: Case, directory: Path) -> None:
        self._case = case
        self._names = [f"site-{place:03}" for place in range(case.sites)]
        layout = Layout.of_shapes([("weight", (case.numel,))])
        served = pieces.divide(layout, case.processes, whole_tensors=False)
        self._strategy = find_strategy(case.strategy)
        self.process = ServerProcess(
            case.process,
            lambda numel, optimizer: self._strategy,
            3,
            _NoTransport(),
            directory,
            lambda *_: None,
            lambda _: None,
        )
        self._own = served[case.process]
        self.process.prepare(
            Begin(layout=[("weight", [case.numel])], served=list(self._own.spans), optimizer=None, sender="site-000")
        )
        for segment in self._segments("fp32", 0):
            part = ModelPart(version=0, vector="weights", segments=(segment,), last=False)
            self.process.handle(Peer("site-000", 0), pack(part), 0.0)
        self.process.start_serving()
        self.process.snapshot({}, {}, wait=True)
        whole = Intervals.whole(case.numel)
        for name in self._names:
            holding = Holding(site=name, rank=0, ranks=1, epoch=1, held=whole)
            self.process.handle(Peer(name, 0), pack(holding), 0.0)
        up = str(self._strategy.wan_codec("up"))
        self._pushes = {name: self._segments(up, place + 1) for place, name in enumerate(self._names)}

    def _segments(self, codec_text: str, seed: int) -> tuple[Segment, ...]:
        codec, found = codecs.parse(codec_text), []
        layout = Layout.of_shapes([("weight", (self._case.numel,))])
        for piece in pieces.cut(self._own, layout, per_tensor=False):
            generator = torch.Generator().manual_seed(derive(seed, piece.start) >> 1)
            update = torch.randn(piece.numel, generator=generator).mul_(1e-3)
            found.append(Segment.at(piece.intervals, codec.encode(update, codec.init(update), seed)[0]))
        return tuple(found)

    def measure(self, barrier: Barrier) -> Row:
        """Close rounds for so many seconds."""
        case, rounds, spent, cpu = self._case, 0, 0.0, 0.0
        for number in (1, 2):  # vectors that are made when they are first needed
            self._round(number, self._messages(number))
        written, snapshots, push_bytes = file_bytes_written(), 0, 0
        barrier.wait(600)
        while spent < case.seconds or rounds < 2:
            number = rounds + 3
            messages = self._messages(number)
            push_bytes += sum(len(data) for parts in messages.values() for data in parts)
            began, began_cpu = time.perf_counter(), time.process_time()
            self._round(number, messages)
            spent, cpu = spent + time.perf_counter() - began, cpu + time.process_time() - began_cpu
            rounds += 1
            storage = self.process.storage
            if storage is not None and storage.due:
                before = file_bytes_written()
                self.process.snapshot({}, {}, wait=True)
                snapshots += file_bytes_written() - before
        disk = file_bytes_written() - written - snapshots
        updates = rounds * case.sites
        return {
            "strategy": case.strategy,
            "shown": parameters(case.numel),
            "numel": case.numel,
            "sites": case.sites,
            "process": case.process,
            "rounds": rounds,
            "push_mb": push_bytes / updates / 1e6,
            "updates_s": updates / spent,
            "cpu_ms": 1000 * cpu / updates,
            "passes": cpu / updates / pass_seconds(self._own.numel),
            "disk_ratio": disk / push_bytes,
            "snapshot_ratio": (disk + self._snapshot_share(push_bytes)) / push_bytes,
            "peak_mb": peak_memory() / 1e6,
        }

    def _snapshot_share(self, push_bytes: int) -> float:
        """The bytes of snapshots that fall due for so many bytes of pushes in a long run."""
        storage = self.process.storage
        if storage is None or self.process.serving is None:
            return 0.0
        state = sum(tensor.nbytes for tensor in self.process.serving.shard.state().values())
        log_bytes = max(server_storage._LEAST_LOG, server_storage._LOG_PER_STATE * state)
        return push_bytes * state / log_bytes

    def _messages(self, number: int) -> dict[str, list[bytes]]:
        found = {}
        for name, segments in self._pushes.items():
            push = Push(site=name, round=number, after=0, step=0, seen=0, samples=1, segments=segments)
            found[name] = [pack(part) for part in push_parts(push, 0)]
        return found

    def _round(self, number: int, messages: dict[str, list[bytes]]) -> None:
        for name, parts in messages.items():
            for data in parts:
                notes = self.process.handle(Peer(name, 0), data, float(number))
        assert notes, "a push of which all parts have come is complete"
        self.process.sync()
        self.process.before_close()
        serving = self.process.serving
        assert serving is not None
        order = CloseOrder(
            result=RoundResult(version=number, round=number, step=number),
            pushes=tuple(ClosedPush(site=name, round=number, weight=1.0, seen=number - 1) for name in self._names),
            weight=float(self._case.sites),
            relays=self._case.sites <= self._strategy.relay,
            sites=self._case.sites,
            receivers=dict.fromkeys(self._names, False),
        )
        serving.close(order)
        self.process.round_closed({(name, number) for name in self._names})
