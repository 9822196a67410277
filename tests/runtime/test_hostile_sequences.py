"""Any sequence of messages of one site, right or wrong: no error but refusals, a finite model, the same bits again.

The server is a real one without connections: messages are given to it one after the other. What it does then is read
once more from its log, as after a crash.
"""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from weightgrad.codecs import Codec, Fp32, parse
from weightgrad.core.optimizers.spec import OptimizerSpec
from weightgrad.core.server.guard import Guard
from weightgrad.core.strategies import find
from weightgrad.errors import RangeError, WeightGradError
from weightgrad.runtime.admission_messages import AdmissionRequest
from weightgrad.runtime.run_config import RunConfig
from weightgrad.runtime.server.global_server import GlobalServer, ServeOptions
from weightgrad.runtime.transport.transport import EntryRequest, Outgoing, Peer, ServerTransport
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_bytes import pack
from weightgrad.wire.messages import FinalPart, Holding, Join, Leave, Message, ModelPart, Push, PushPart, Segment
from weightgrad.wire.sync_schedule import Report

SITES = ("east", "mallory", "west")
MODULE = nn.Linear(8, 5)
LAYOUT = [(name, list(one.shape)) for name, one in MODULE.named_parameters()]
NUMEL = 45
LARGEST = 2**32 - 1
CODECS = [parse(text) for text in ("fp32", "fp16", "qsgd(bits=4, bucket=32)", "topk(0.3) > sign()", "codebook(bits=3)")]
HELD = [((0, 45),), ((0, 20),), ((20, 45),), (), ((1, 2), (3, 4)), ((0, 15),), ((15, 30),), ((30, 45),)]
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("diloco", {"every": 1, "aggregator": "mean"}),
    ("diloco", {"every": 1, "consistency": "async_()"}),
    ("diloco", {"every": 1, "aggregator": "mean", "consistency": "backup(1)"}),
    ("baseline", {}),
    ("weightgrad", {}),
    ("auto", {}),
]


class Nobody:
    """A transport that takes everything and carries nothing."""

    max_message: int | None = None
    max_queued = 1 << 30

    def send(self, peer: Peer, data: Outgoing, *, control: bool = False) -> bool:
        return True

    def sessions(self) -> dict[Peer, Any]:
        return {}

    def drop(self, peer: Peer, why: str) -> None:
        pass


def made(strategy: str, row: dict[str, Any], state: Path) -> GlobalServer:
    run = RunConfig(sites=SITES, fit=lambda numel: find(strategy, {**row, "t_global": 5.0}), seed=3)
    return GlobalServer(run, ServeOptions(guard=Guard(), agree_s=0.0, state=state), cast(ServerTransport, Nobody()))


def segment(start: int, values: torch.Tensor, codec: Codec) -> Segment:
    return Segment(start, codec.encode(values, codec.init(values), 1)[0])


class Play:
    """Three sites, of which mallory does anything."""

    def __init__(self, server: GlobalServer, seed: int) -> None:
        self.server, self.draw = server, random.Random(seed)
        optimizer = OptimizerSpec.of(torch.optim.Adam(MODULE.parameters()), list(MODULE.parameters())).dump()
        for name in (*SITES, *SITES):  # the first time they vote
            request = AdmissionRequest(name, LAYOUT, -1, workers=3, optimizer=optimizer).pack()
            with suppress(WeightGradError):
                server.enter(EntryRequest(name, 0, "1", request, name, None, ""))
        first = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))
        parts = (segment(0, first, Fp32()),)
        assert server.admission.initializer is not None
        self.give(server.admission.initializer, ModelPart(version=0, vector="weights", segments=parts, last=True))
        for name in ("east", "west"):
            self.give(name, Holding(site=name, rank=0, ranks=1, epoch=0, held=Intervals.whole(NUMEL)))
            self.give(name, Join(site=name, version=-1))
        self.rate = 0.1 if self.serving.shard.global_model.takes_gradients else None

    @property
    def serving(self) -> Any:
        assert self.server.process.serving is not None
        return self.server.process.serving

    def give(self, site: str, message: Message, rank: int = 0) -> None:
        self.server.inputs.handle(Peer(site, rank), pack(message), self.server.now)

    def honest(self) -> None:
        core, name = self.server.coordinator, self.draw.choice(("east", "west"))
        assert core is not None
        round_ = core.members.by_name[name].pushed_round + 1
        self.give(name, self.push(name, round_, after=round_ - 1, step=round_, seen=core.version, rate=self.rate))
        values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(round_)) * 0.01
        self.give(name, PushPart(site=name, round=round_, rank=0, segments=(segment(0, values, Fp32()),), last=True))

    def push(self, site: str, round_: int, **numbers: Any) -> Push:
        given = {"after": 0, "step": 0, "seen": 0, "samples": 1, "segments": (), **numbers}
        return Push(site=site, round=round_, **given)

    def hostile(self) -> None:
        draw, core, name = self.draw, self.server.coordinator, "mallory"
        assert core is not None
        rank, deed = draw.choice([0, 0, 0, 1, 2]), draw.randrange(8)
        round_ = max(1, core._progress.round + draw.choice([0, 0, 1, 1, 1, 2, 3, -1, 5, 100]))
        if deed <= 1:
            starts = [at for at in (0, 15, 30) if draw.random() < 0.7]
            values = torch.randn(15) * draw.choice([0.0, 1.0, 1e20, 1e-40, 1e-3])
            own = [segment(at, values[: draw.choice([1, 5, 15])], draw.choice(CODECS)) for at in starts]
            last = draw.random() < 0.7
            self.give(name, PushPart(site=name, round=round_, rank=rank, segments=tuple(own), last=last), rank)
        elif deed <= 3:
            options = tuple(draw.choice([0.0, 1.0, -1.0, 1e308, 0.5]) for _ in range(5))
            message = self.push(
                name,
                round_,
                after=draw.choice([0, round_ - 1]),
                step=draw.choice([0, round_, LARGEST]),
                seen=draw.choice([0, core.version]),
                samples=draw.choice([0, 1, LARGEST]),
                final=draw.random() < 0.2,
                rate=draw.choice([self.rate, 0.0, 1e-300, 1e300]),
                options=draw.choice([(), options]),
                report=draw.choice([None, Report(draw.choice([0.0, 1e-300, 1e9]), round_, 1e9, 0.0)]),
                buffers=draw.choice([{}, {"a": torch.full((3,), float("nan"))}, {"a": torch.tensor(2**62)}]),
            )
            self.give(name, message)
        elif deed == 4:
            ranks, epoch = draw.choice([1, 2, 3, LARGEST]), draw.choice([0, 0, 1, 2, 2**31])
            held = Intervals(draw.choice(HELD))
            self.give(name, Holding(site=name, rank=rank, ranks=max(ranks, rank + 1), epoch=epoch, held=held), rank)
        elif deed == 5:
            version, codec = draw.choice([-1, 0, core.version, core.version + 5]), draw.choice([None, "sign()"])
            self.give(name, Join(site=name, version=version, epoch=draw.choice([0, 1]), download_codec=codec))
        elif deed == 6:
            self.give(name, Leave(site=name))
        else:
            self.give(name, FinalPart(site=name, place=draw.choice([0, 1]), parts=2, data=b"x"))

    def deadline(self) -> None:
        core, rounds = self.server.coordinator, self.server.rounds
        assert core is not None
        assert rounds is not None
        self.server.telemetry.continue_from(self.server.now + self.draw.choice([0.1, 3.0, 20.0]))
        due = core.next_wake()
        if due is not None and due <= self.server.now:
            rounds.wake(self.server.now)


@pytest.mark.parametrize("seed", [0, 9, 18, 24])  # with the last three the bits were others once
@pytest.mark.parametrize(("strategy", "row"), ROWS, ids=lambda one: str(one))
def test_no_sequence_ends_the_server_and_its_log_gives_the_same_bits(
    strategy: str, row: dict[str, Any], seed: int, tmp_path: Path
) -> None:
    server = made(strategy, row, tmp_path)
    play = Play(server, seed)
    for number in range(80):
        for _ in range(play.draw.randrange(7)):
            with suppress(RangeError):  # values that the codec cannot take: there is no such message
                play.hostile()
        play.honest()
        if play.draw.random() < 0.3:
            play.deadline()
        if number % 31 == 17:
            server.snapshots.write(wait=True)
    model = play.serving.shard.global_model
    assert model.version > 5
    assert model.vector.isfinite().all()
    server.process.close()
    again = made(strategy, row, tmp_path)
    assert again.process.serving is not None
    assert again.process.serving.shard.global_model.version == model.version
    assert again.process.serving.shard.global_model.digest() == model.digest()
    again.process.close()
