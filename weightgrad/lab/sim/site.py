"""One simulated site: the real step of `local/step.py` on real gradients, and how many virtual seconds it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from weightgrad import wire
from weightgrad.codecs import Payload
from weightgrad.codecs import cost as codec_cost
from weightgrad.core.global_model import GlobalModel
from weightgrad.core.random_streams import RunStream
from weightgrad.core.site_state import SiteState
from weightgrad.kernels.noise import derive
from weightgrad.lab.sim.local_network import allreduce_bytes
from weightgrad.lab.sim.plan import SimulationPlan, SiteSpec
from weightgrad.lab.sim.task import Task
from weightgrad.local.local_server import LocalServer
from weightgrad.local.step import LocalStep
from weightgrad.wire.messages import Push, RoundResult, numel, segments_bytes


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


class CountingExchange:
    """The `Exchange` of workers that live in one process: nothing travels, and the bytes are counted."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.workers = range(size)
        self.gathered: list[int] = []
        """Bytes that each worker sent to all others, of this step."""
        self.dealt: list[int] = []
        """Bytes of the chunks that each worker dealt to the others, of this step."""

    def begin_step(self) -> None:
        """Count from zero."""
        self.gathered, self.dealt = [], []

    @property
    def sizes(self) -> list[int]:
        """What each worker sent in this step. Of an allreduce it is the chunks: their means are the second half."""
        return self.dealt or self.gathered

    def all_gather(self, own: Iterable[Sequence[Payload]]) -> Iterator[Sequence[Payload]]:
        """All payloads, one worker's at a time."""
        for payloads in own:
            self.gathered.append(_frame_bytes(payloads))
            yield payloads

    def all_gather_vectors(self, own: Iterable[Tensor]) -> Iterator[Tensor]:
        """Copies of all vectors."""
        return (vector.clone() for vector in self.mean(own))

    def mean(self, own: Iterable[Tensor]) -> Iterator[Tensor]:
        """All vectors, one at a time; whoever takes them adds them up in the order of the workers."""
        for vector in own:
            self.gathered.append(4 * vector.numel())
            yield vector

    def all_to_all(self, own: Sequence[Sequence[Payload]]) -> list[list[Payload]]:
        """Payload i of every worker, for each worker i."""
        self.dealt += [_frame_bytes(payloads) for payloads in own]
        return [[payloads[worker] for payloads in own] for worker in self.workers]


@dataclass
class SimSite:
    """A place, the state machine of its site, its local step, and how it is doing."""

    number: int
    place: SiteSpec
    plan: SimulationPlan
    task: Task
    state: SiteState
    times: Times = field(default_factory=Times)
    alive: bool = True
    leaving: bool = False
    left: bool = False
    open_step: Step | None = None
    life: int = 0  # counts deaths, so that events of an earlier life are void
    waiting_since: float | None = None
    encoded: float = 0.0  # when the last push has been encoded: the next leaves after it
    applied: list[RoundResult | Push] = field(default_factory=list)  # moved the model, and workers do not have it yet

    def __post_init__(self) -> None:
        name, options = self.plan.optimizer
        self._exchange = CountingExchange(self.place.workers)
        self._step = LocalStep(
            self.task.layout,
            self.state.model,
            self.plan.strategy,
            self._exchange,
            optimizer=(name, self.plan.strategy.optimizer_with(options)),
            key=derive(self.plan.seed, RunStream.LOCAL_STEP, self.number),
            clip_norm=self.plan.clip_norm,
        )
        self._sharded = self._step.strategy.exchange == "sharded"

    @property
    def local(self) -> LocalServer | None:
        """The local server; None where sites share gradients."""
        return self._step.local_server

    # -- a step -----------------------------------------------------------------------------

    def compute(self) -> Step:
        """Do the next step for real; say how long it takes."""
        number = self.state.step
        seconds = self._hand_on()
        starts = [
            self.place.compute.seconds(self.plan.seed, self.place.name, self.number, worker, number)
            for worker in range(self.place.workers)
        ]
        spread = self._release()
        losses: list[float] = []
        self._exchange.begin_step()
        gradient = self._step.step(self._gradients(number, losses), number, self.plan.rate(number))
        slowest = max(starts)
        end, coding = self._exchange_seconds(starts, self._exchange.sizes)
        exchange = end - slowest
        self.times.compute += slowest
        self.times.codec += coding
        self.times.lan += exchange - coding
        seconds += self.plan.step_overhead
        return Step(seconds + spread + slowest + exchange, sum(losses) / len(losses), gradient)

    def _gradients(self, number: int, losses: list[float]) -> Iterator[Tensor]:
        for found in self.task.gradients(self.number, self._step.working_weights(), number):
            losses.append(found.loss)
            yield found.vector

    # -- virtual seconds and bytes ----------------------------------------------------------

    def _release(self) -> float:
        """Release the weights to the workers; seconds until they have them."""
        if not self._step.releases_weights:
            return 0.0
        total, speed = self.task.layout.numel, self.plan.codec_speed
        coding, nbytes = 0.0, 4 * total
        payloads, encoder = self._step.release(), self._step.weight_encoder
        if payloads is not None and encoder is not None:
            nbytes = _frame_bytes(payloads)
            shards = self.place.workers if self._sharded else 1
            coding = codec_cost.encode_seconds(encoder.codec, total, speed) / shards
            coding += codec_cost.decode_seconds(encoder.codec, total, speed)
        workers, lan = self.place.workers, self.place.lan
        seconds = lan.all_to_all(workers, nbytes) if self._sharded else lan.spread(workers, nbytes)
        if workers > 1:
            self.times.lan_bytes += (workers - 1 if self._sharded else workers) * nbytes
        self.times.codec += coding
        self.times.lan += seconds
        return coding + seconds

    def _exchange_seconds(self, starts: list[float], sizes: list[int]) -> tuple[float, float]:
        """When the site has its gradient, counted from when the workers began; seconds of it for the codec."""
        workers, lan, codec = self.place.workers, self.place.lan, self._step.gradient_codec
        total, speed = self.task.layout.numel, self.plan.codec_speed
        if workers < 2:
            return starts[0], 0.0
        if self._step.strategy.exchange == "allreduce":
            coding = 0.0
            if self._step.encodes:  # all of it, and a share of the mean; a share from everyone, and everyone's mean
                coding += codec_cost.encode_seconds(codec, total + total // workers, speed)
                coding += codec_cost.decode_seconds(codec, 2 * total, speed)
            self.times.lan_bytes += allreduce_bytes(workers, max(sizes))
            return max(starts) + coding + lan.allreduce(workers, max(sizes)), coding
        coding = codec_cost.encode_seconds(codec, total, speed)
        if self._sharded:
            decoding = codec_cost.decode_seconds(codec, total, speed)  # n pushes of 1/n each
            self.times.lan_bytes += (workers - 1) * max(sizes)
            return max(starts) + coding + lan.all_to_all(workers, max(sizes)) + decoding, coding + decoding
        decoding = workers * codec_cost.decode_seconds(codec, total, speed)
        self.times.lan_bytes += sum(sizes)
        return lan.gather([s + coding for s in starts], sizes) + decoding, coding + decoding

    def _hand_on(self) -> float:
        """Seconds to decode what moved the model and to hand it to workers that have replicas of their own."""
        if not self.applied:
            return 0.0
        applied, self.applied = self.applied, []
        workers, down = self.place.workers, self.plan.strategy.wan_codec("down")
        segments = [one.moves if isinstance(one, RoundResult) else one.segments for one in applied]
        seconds = codec_cost.decode_seconds(down, sum(numel(one) for one in segments), self.plan.codec_speed)
        self.times.codec += seconds
        if not self._step.releases_weights and workers > 1:
            nbytes = sum(segments_bytes(one) for one in segments)
            lan = self.place.lan.broadcast(workers, nbytes)
            self.times.lan += lan
            self.times.lan_bytes += (workers - 1) * nbytes
            seconds += lan
        return seconds


def _frame_bytes(payloads: Sequence[Payload]) -> int:
    return sum(wire.frame_bytes(payload) for payload in payloads)


def make(
    number: int, place: SiteSpec, plan: SimulationPlan, task: Task, global_model: Callable[[], GlobalModel]
) -> SimSite:
    """A site at the start of the run."""
    key = derive(plan.seed, RunStream.SITE_STATE, number)
    state = SiteState(place.name, global_model(), plan.strategy.for_site(), task.samples(number), key)
    return SimSite(number, place, plan, task, state)
