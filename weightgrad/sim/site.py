"""One simulated site: real gradients, the real local server, virtual seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from weightgrad import wire
from weightgrad.codecs import Fp32, Payload
from weightgrad.kernels.noise import derive
from weightgrad.sim import codec_time
from weightgrad.sim.lan import allreduce_bytes
from weightgrad.sim.plan import SitePlace, WorldPlan
from weightgrad.sim.task import Task
from weightgrad.site.allreduce import QuantizedAllreduce
from weightgrad.site.local_server import Combiner, LocalServer
from weightgrad.site.worker import GradientEncoder
from weightgrad.wan.base import Base
from weightgrad.wan.messages import Answer, Push, numel, parts_bytes
from weightgrad.wan.site_end import SiteEnd


@dataclass
class Times:
    """Where a site's time and LAN bytes went."""

    compute: float = 0.0
    codec: float = 0.0
    lan: float = 0.0
    waiting: float = 0.0
    lan_bytes: int = 0


@dataclass
class Step:
    """A step that has been computed and takes until `seconds` have passed."""

    seconds: float
    loss: float
    gradient: Tensor | None


@dataclass
class SimSite:
    """The place, its end of the WAN, its local server, and how it is doing."""

    number: int
    place: SitePlace
    plan: WorldPlan
    task: Task
    end: SiteEnd
    times: Times = field(default_factory=Times)
    alive: bool = True
    leaving: bool = False
    left: bool = False
    open_step: Step | None = None
    life: int = 0  # counts deaths, so that events of an earlier life are void
    waiting_since: float | None = None
    encoded: float = 0.0  # when the last push has been encoded: the next leaves after it
    applied: list[Answer | Push] = field(default_factory=list)  # what moved the model and workers have not been handed

    def __post_init__(self) -> None:
        self._row = strategy = self.plan.strategy.inside(self.place.workers)
        layout = self.task.layout
        self._codec = strategy.wan_codec("gradients")
        self._coded = not isinstance(self._codec, Fp32)
        self._weights_out = strategy.weights_out
        self._sharded = strategy.exchange == "sharded"
        self._spreads = strategy.shares == "updates" and strategy.exchange != "allreduce"  # weights, each step
        self.local: LocalServer | None = None
        key = derive(self.plan.seed, 11, self.number)
        if strategy.shares == "updates":
            self.local = LocalServer(
                layout,
                self.end.model,
                (self.plan.optimizer[0], strategy.optimizer_with(self.plan.optimizer[1])),
                combine=strategy.combine,
                weights_out=self._weights_out,
                serial_scale=strategy.serial_scale,
                key=derive(key, 1),
            )
        self._combiner = Combiner(layout)
        self._encoders: list[GradientEncoder] = []
        self._ring: list[QuantizedAllreduce] = []
        self._mean: Tensor | None = None  # of the ring, filled again at every step
        workers = self.place.workers
        if self._coded and strategy.exchange == "allreduce" and workers > 1:
            self._ring = [
                QuantizedAllreduce(workers, layout.numel, self._codec, derive(key, 3, w)) for w in range(workers)
            ]
        elif self._coded or self.plan.clip_norm is not None or strategy.correction:
            self._encoders = [
                GradientEncoder(
                    layout,
                    self._codec,
                    derive(key, 2, worker),
                    clip_norm=self.plan.clip_norm,
                    momentum=strategy.correction,
                )
                for worker in range(workers)
            ]

    # -- a step -----------------------------------------------------------------------------

    def compute(self) -> Step:
        """Do the next step for real; say how long it takes."""
        number = self.end.step
        seconds = self._hand_on()
        starts = [
            self.place.compute.seconds(self.plan.seed, self.place.name, self.number, worker, number)
            for worker in range(self.place.workers)
        ]
        weights, spread = self._release()
        losses: list[float] = []
        sizes: list[int] = []
        gradient = self._train(weights, number, losses, sizes)
        slowest = max(starts)
        end, coding = self._exchange(starts, sizes)
        exchange = end - slowest
        self.times.compute += slowest
        self.times.codec += coding
        self.times.lan += exchange - coding
        seconds += self.plan.step_overhead
        return Step(seconds + spread + slowest + exchange, sum(losses) / len(losses), gradient)

    def _release(self) -> tuple[Tensor, float]:
        """The weights the workers compute on, and the seconds until they have them."""
        if self.local is None or not self._spreads:
            return self.end.model, 0.0
        total, speed = self.task.layout.numel, self.plan.codec_speed
        coding, nbytes = 0.0, 4 * total
        if self._weights_out is not None:
            payloads = self.local.released()
            assert payloads is not None
            nbytes = _frames(payloads)
            shards = self.place.workers if self._sharded else 1
            coding = codec_time.encode_seconds(self._weights_out.codec, total, speed) / shards
            coding += codec_time.decode_seconds(self._weights_out.codec, total, speed)
        workers, lan = self.place.workers, self.place.lan
        seconds = lan.all_to_all(workers, nbytes) if self._sharded else lan.spread(workers, nbytes)
        if workers > 1:
            self.times.lan_bytes += (workers - 1 if self._sharded else workers) * nbytes
        self.times.codec += coding
        self.times.lan += seconds
        weights = self.end.model if self._weights_out is None else self.local.working_weights()
        return weights, coding + seconds

    def _train(self, weights: Tensor, number: int, losses: list[float], sizes: list[int]) -> Tensor | None:
        if self._ring:
            vector = self._by_ring(weights, number, losses, sizes)
            return self._use(iter([vector]), number)
        return self._use(self._gradients(weights, number, losses, sizes), number)

    def _use(self, gradients: Iterator[tuple[Payload, ...] | Tensor], number: int) -> Tensor | None:
        if self.local is not None:
            self.local.step(gradients, self.plan.rate(number))
            return None
        for gradient in gradients:
            if isinstance(gradient, Tensor):
                self._combiner.add_plain(gradient)
            else:
                self._combiner.add(gradient)
        return self._combiner.mean()

    def _gradients(
        self, weights: Tensor, number: int, losses: list[float], sizes: list[int]
    ) -> Iterator[tuple[Payload, ...] | Tensor]:
        whole = 4 * self.task.layout.numel
        for worker, found in enumerate(self.task.gradients(self.number, weights, number)):
            losses.append(found.loss)
            if self._encoders:
                payloads = self._encoders[worker].encode(found.vector, number)
                sizes.append(_frames(payloads))
                yield payloads
            else:
                sizes.append(whole)
                yield found.vector.clone() if self._row.combine == "serial" else found.vector

    def _by_ring(self, weights: Tensor, number: int, losses: list[float], sizes: list[int]) -> Tensor:
        chunks = []
        for worker, found in enumerate(self.task.gradients(self.number, weights, number)):
            losses.append(found.loss)
            chunks.append(self._ring[worker].encode_chunks(found.vector, number))
        reduced = [ring.reduce([c[rank] for c in chunks], number) for rank, ring in enumerate(self._ring)]
        sizes += [max(_frames(c) for c in chunks)] * len(chunks)
        self._mean = self._ring[0].gather(reduced, out=self._mean)  # whoever takes it copies it
        return self._mean

    def _exchange(self, starts: list[float], sizes: list[int]) -> tuple[float, float]:
        """When the site has its gradient, counted from when the workers began; seconds of it for the codec."""
        workers, lan = self.place.workers, self.place.lan
        total, speed = self.task.layout.numel, self.plan.codec_speed
        if workers < 2:
            return starts[0], 0.0
        if self._row.exchange == "allreduce":
            coding = 0.0
            if self._coded:  # all of it, and a share of the mean; a share from everyone, and everyone's mean
                coding += codec_time.encode_seconds(self._codec, total + total // workers, speed)
                coding += codec_time.decode_seconds(self._codec, 2 * total, speed)
            self.times.lan_bytes += allreduce_bytes(workers, max(sizes))
            return max(starts) + coding + lan.allreduce(workers, max(sizes)), coding
        coding = codec_time.encode_seconds(self._codec, total, speed)
        if self._sharded:
            decoding = codec_time.decode_seconds(self._codec, total, speed)  # n pushes of 1/n each
            self.times.lan_bytes += (workers - 1) * max(sizes)
            return max(starts) + coding + lan.all_to_all(workers, max(sizes)) + decoding, coding + decoding
        decoding = workers * codec_time.decode_seconds(self._codec, total, speed)
        self.times.lan_bytes += sum(sizes)
        return lan.gather([s + coding for s in starts], sizes) + decoding, coding + decoding

    def _hand_on(self) -> float:
        """Seconds to decode what moved the model and to hand it to workers that have replicas of their own."""
        if not self.applied:
            return 0.0
        applied, self.applied = self.applied, []
        workers, down = self.place.workers, self.plan.strategy.wan_codec("down")
        moved = sum(numel(one.moves if isinstance(one, Answer) else one.parts) for one in applied)
        seconds = codec_time.decode_seconds(down, moved, self.plan.codec_speed)
        self.times.codec += seconds
        if not self._spreads and workers > 1:
            nbytes = sum(parts_bytes(one.moves if isinstance(one, Answer) else one.parts) for one in applied)
            lan = self.place.lan.broadcast(workers, nbytes)
            self.times.lan += lan
            self.times.lan_bytes += (workers - 1) * nbytes
            seconds += lan
        return seconds


def _frames(payloads: tuple[Payload, ...] | list[Payload]) -> int:
    return sum(wire.frame_bytes(payload) for payload in payloads)


def make(number: int, place: SitePlace, plan: WorldPlan, task: Task, base: Callable[[], Base]) -> SimSite:
    """A site at the start of the run."""
    end = SiteEnd(place.name, base(), plan.strategy.for_site(), task.samples(number), derive(plan.seed, 10, number))
    return SimSite(number, place, plan, task, end)
