"""One simulated site: the real step of `local/step.py` on real gradients, and how many virtual seconds it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from weightgrad import wire
from weightgrad.codecs import cost as codec_cost
from weightgrad.core import pieces
from weightgrad.core.global_model import GlobalModel
from weightgrad.core.layout import Layout
from weightgrad.core.random_streams import RunStream
from weightgrad.core.site.local_changes import changes_nbytes, changes_of_holder, worth_passing_on
from weightgrad.core.site.state import SiteState
from weightgrad.core.site.update_shard import UpdateShard
from weightgrad.kernels.noise import derive
from weightgrad.lab.sim.lan_traffic import CountingExchange, LanTraffic
from weightgrad.lab.sim.local_network import allreduce_bytes
from weightgrad.lab.sim.plan import SimulationPlan, SiteSpec
from weightgrad.lab.sim.task import Task
from weightgrad.local.local_server import LocalServer
from weightgrad.local.serving import serving
from weightgrad.local.step import LocalStep
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_parts import of_holder
from weightgrad.wire.message_sizes import nbytes
from weightgrad.wire.messages import Push, ResultPart, RoundResult, Segment, numel


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
    waiting_for: str = ""  # what it waits for, in the words of `SiteCoordinator.blocked`
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
            averaged=self.place.sharded and self.place.workers > 1,
        )
        self._replicas = self.place.workers if not self.place.sharded else 1
        served = serving(self.task.layout, self._step.strategy, self.place.workers)
        self._most_served = self.task.layout.numel if served is None else max(one.numel for one in served)
        self._holdings = replica_holdings(self.place, self.plan, self.task.layout)
        self._ended = False
        if self._hands_on and self.plan.strategy.shares == "updates":
            self._update_shard().changes.begin()

    @property
    def _hands_on(self) -> bool:
        """Whether workers have replicas of their own, and are handed what moves the model."""
        return self._replicas > 1 and not self._step.releases_weights

    def _update_shard(self) -> UpdateShard:
        (shard,) = self.state.shards
        assert isinstance(shard, UpdateShard)
        return shard

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
        end, coding = self._exchange_seconds(starts)
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
        total = self.task.layout.numel
        if self.place.sharded and self.place.workers > 1:  # FSDP2 gathers the weights once more for the backward pass
            seconds = self.place.lan.allreduce(self.place.workers, 4 * total) / 2
            self.times.lan += seconds
            self.times.lan_bytes += allreduce_bytes(self.place.workers, 4 * total) // 2
            return seconds
        if not self._step.releases_weights:
            return 0.0
        traffic = self._released()
        coding, encoder = 0.0, self._step.weight_encoder
        if encoder is not None:
            speed = self.plan.codec_speed
            coding = codec_cost.encode_seconds(encoder.codec, self._most_served, speed)
            coding += codec_cost.decode_seconds(encoder.codec, total, speed)
        seconds = self.place.lan.exchange(traffic.busiest)
        self.times.codec += coding
        self.times.lan += seconds
        return coding + seconds

    def _released(self) -> LanTraffic:
        """Release the weights; the bytes are counted."""
        traffic, layout = LanTraffic(self.place.workers), self.task.layout
        payloads, owners = self._step.release(), self._step.gradients.owners
        sizes = [4 * slot.numel for slot in layout.slots] if payloads is None else map(wire.frame_bytes, payloads)
        for owner, size in zip(owners or (), sizes, strict=False):
            traffic.send_all(owner, size)
        self.times.lan_bytes += traffic.total
        return traffic

    def _exchange_seconds(self, starts: list[float]) -> tuple[float, float]:
        """When the site has its gradient, counted from when the workers began; seconds of it for the codec."""
        workers, lan, codec = self.place.workers, self.place.lan, self._step.gradients.codec
        total, speed, exchange = self.task.layout.numel, self.plan.codec_speed, self._exchange
        if workers < 2:
            return starts[0], 0.0
        self.times.lan_bytes += exchange.traffic.total
        if self._step.strategy.exchange == "allreduce":
            coding = 0.0
            if (
                self._step.gradients.encodes
            ):  # all of it, and a share of the mean; a share from everyone, and everyone's mean
                coding += codec_cost.encode_seconds(codec, total + total // workers, speed)
                coding += codec_cost.decode_seconds(codec, 2 * total, speed)
            return max(starts) + coding + lan.allreduce(workers, max(exchange.sizes)), coding
        coding = codec_cost.encode_seconds(codec, total, speed)
        decoding = workers * codec_cost.decode_seconds(codec, self._most_served, speed)
        if self._step.strategy.exchange == "sharded":
            end = max(starts) + coding + lan.exchange(exchange.traffic.busiest)
        else:
            end = lan.gather([start + coding for start in starts], exchange.sizes)
        return end + decoding, coding + decoding

    def _hand_on(self) -> float:
        """Seconds to decode what moved the model and to hand it to workers that have replicas of their own."""
        if not self.applied:
            return 0.0
        applied, self.applied = self.applied, []
        down = self.plan.strategy.wan_codec("down")
        segments = [one.moves if isinstance(one, RoundResult) else one.segments for one in applied]
        seconds = codec_cost.decode_seconds(down, sum(numel(one) for one in segments), self.plan.codec_speed)
        self.times.codec += seconds
        lan = self.place.lan.pass_on(self._handed_on(applied))
        self.times.lan += lan
        return seconds + lan

    def _handed_on(self, applied: list[RoundResult | Push]) -> list[int]:
        """The bytes that each worker gives all others, of what moved the model; they are counted.

        A result that is a gradient is passed on as it came; one that only changes entries of the local model too. What
        moves all of it, such as a push that leaves it, is handed on as weights.
        """
        if not self._hands_on:
            return []
        if self.plan.strategy.shares == "gradients":
            results = [one for one in applied if isinstance(one, RoundResult)]
            sizes = [sum(self._part_bytes(one.moves, held) for one in results) for held in self._holdings]
        else:
            sizes = self._changed()
        self.times.lan_bytes += (self._replicas - 1) * sum(sizes)
        return sizes

    def _changed(self) -> list[int]:
        """The bytes of what each worker has changed, or of its weights."""
        kept = self._update_shard().changes
        changes = kept.listed
        kept.begin()
        if changes is not None:
            sizes = [changes_nbytes(changes_of_holder(changes, held)) for held in self._holdings]
            if worth_passing_on(sizes, self.task.layout.numel):
                return sizes
        return [4 * held.numel for held in self._holdings]

    @staticmethod
    def _part_bytes(segments: tuple[Segment, ...], held: Intervals) -> int:
        own = of_holder(segments, held)
        return nbytes(ResultPart(version=0, segments=own, last=True)) if own else 0

    def steps_done(self) -> None:
        """Hand on what moved the model, and release the weights once more: nobody knows that no step follows."""
        applied, self.applied = self.applied, []
        if applied:
            self._handed_on(applied)
        if self._step.releases_weights and self._replicas > 1:
            self._released()

    def end(self) -> None:
        """Count what is sent when training is over: the last result, and the global model, for all workers."""
        applied, self.applied = self.applied, []
        if self._ended or self._replicas < 2:
            return
        self._ended = True
        if applied:
            self._handed_on(applied)
        if self.plan.strategy.shares == "updates":
            self.times.lan_bytes += (self._replicas - 1) * 4 * self.task.layout.numel
        if self.plan.strategy.evaluate == "quantized":
            self._released()  # the model that the strategy is judged by, for all workers


def make(
    number: int, place: SiteSpec, plan: SimulationPlan, task: Task, global_model: Callable[[], GlobalModel]
) -> SimSite:
    """A site at the start of the run."""
    key = derive(plan.seed, RunStream.SITE_STATE, number)
    held = holdings(place, plan, task.layout)
    state = SiteState(place.name, global_model(), plan.strategy.for_site(), task.samples(number), key, holdings=held)
    for shard in state.shards:
        shard.served = tuple(served(plan, task.layout))
    return SimSite(number, place, plan, task, state)


def holdings(place: SiteSpec, plan: SimulationPlan, layout: Layout) -> list[Intervals] | None:
    """What each rank holds, cut as in a deployment; None where one rank stands for all without a difference."""
    if place.sharded:
        per_tensor = plan.strategy.per == "tensor"
        return pieces.deal(
            pieces.rows(layout, place.workers), layout, per_tensor=per_tensor, served=served(plan, layout)
        )
    found = serving(layout, plan.strategy.inside(place.workers), place.workers)
    return None if found is None or found[0].numel == layout.numel else list(found)


def replica_holdings(place: SiteSpec, plan: SimulationPlan, layout: Layout) -> list[Intervals]:
    """What each worker of a site that is not sharded holds: what it serves, or its part of the work of the WAN."""
    found = serving(layout, plan.strategy.inside(place.workers), place.workers)
    if found is not None:
        return list(found)
    whole = [Intervals.whole(layout.numel)] * place.workers
    return pieces.deal(whole, layout, per_tensor=plan.strategy.per == "tensor", served=served(plan, layout))


def served(plan: SimulationPlan, layout: Layout) -> list[Intervals]:
    """What each process of the global server serves."""
    return pieces.divide(layout, plan.server_processes, whole_tensors=plan.strategy.whole_tensors)
