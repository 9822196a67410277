"""What a strategy will take in a scenario: time, waiting, and bytes on every link, in a round and in the whole run.

A stand-in of the model is played through for a few rounds in the simulator (`stand_in.py`). What its second half does
in a step, the rest of the run does too; what comes once, such as a warm start or the flush at the end, counts once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from weightgrad import event_log
from weightgrad.codecs import ErrorFeedback, Fp32, cost
from weightgrad.codecs.codec import Codec
from weightgrad.codecs.dgc import Dgc
from weightgrad.codecs.warmup import WarmUp
from weightgrad.core import parts
from weightgrad.core.controller.update_controller import Auto
from weightgrad.core.parts.triggers import Every, Scheduled, Significance, Staggered
from weightgrad.core.strategies import Strategy
from weightgrad.event_log import EventLog
from weightgrad.lab.plan.scenario import Scenario
from weightgrad.lab.plan.stand_in import ELEMENTS, TYPICAL, Gradients, StandIn, StandInTask, shrunk
from weightgrad.lab.sim.network import SimulatedNetwork
from weightgrad.lab.sim.simulator import Simulator
from weightgrad.lab.sim.task import Task

_ROUNDS = 6  # of the second half of what is played through, at least
_SIGNIFICANT_ROUNDS = 24  # the same where it depends on the updates how many steps lie between two rounds
_LEAST_STEPS = 24
_SETTLE_STEPS = 4  # after a warm start, and for each step that a result is late
_MOST_STEPS = 640
_DAY = 86400.0


@dataclass(frozen=True)
class Transfer:
    """One message on a link."""

    site: str
    upward: bool
    nbytes: int
    start: float
    end: float


@dataclass(frozen=True)
class Span:
    """A stretch of a site's time: computing a step (with its LAN exchange), or waiting."""

    site: str
    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class LinkUse:
    """What a link carries, up from the site and down to it.

    Attributes:
        site: the site.
        up_round: bytes of a usual round towards the server.
        down_round: bytes back.
        up_total: bytes of the whole run.
        down_total: the same, back.
        up_day: bytes of a day of training.
        down_day: the same, back.
        transfer_seconds: from a push to its result in a usual round, waiting for the other sites included.
        waiting_seconds: what the site waits in a usual round.
    """

    site: str
    up_round: float
    down_round: float
    up_total: float
    down_total: float
    up_day: float
    down_day: float
    transfer_seconds: float
    waiting_seconds: float

    @property
    def hidden(self) -> float:
        """The share of the exchange that is hidden behind compute."""
        return 1.0 - min(1.0, self.waiting_seconds / self.transfer_seconds) if self.transfer_seconds > 0 else 1.0


@dataclass(frozen=True)
class Prediction:
    """What a strategy takes.

    Attributes:
        strategy: the strategy, with the overlap that was fitted.
        seconds: of the whole run.
        step_seconds: of a usual step, waiting included.
        compute_seconds: of a usual step without the WAN, of the slowest site.
        round_steps: steps between two rounds, on average.
        links: what each link carries.
        transfers: messages of the last few rounds that were played through.
        spans: what the sites did in that time.
        lan_bytes: bytes inside the sites in the whole run.
        schedule: what `auto` settled on, or None.
        lost: sites whose pushes are later than the strategy waits (`t_global`). A run would go on without them; the
            prediction is that of one that waits.
    """

    strategy: Strategy
    seconds: float
    step_seconds: float
    compute_seconds: float
    round_steps: float
    links: tuple[LinkUse, ...]
    transfers: tuple[Transfer, ...]
    spans: tuple[Span, ...]
    lan_bytes: float
    schedule: dict[str, object] | None
    lost: tuple[str, ...] = ()

    @property
    def wan_bytes(self) -> float:
        """Bytes over all links, both ways."""
        return sum(link.up_total + link.down_total for link in self.links)

    @property
    def slowdown(self) -> float:
        """How many times longer a step takes than without a WAN."""
        return self.step_seconds / self.compute_seconds if self.compute_seconds > 0 else 1.0


class _Recorder:
    """The simulated network, with a note of every message, and of every step."""

    def __init__(self, network: SimulatedNetwork, clock: Callable[[], float], server: str) -> None:
        self._network, self._clock, self._server = network, clock, server
        self.transfers: list[Transfer] = []
        self.links = network.links
        self.steps: list[Span] = []

    def send(self, sender: str, receiver: str, nbytes: int, arrive: Callable[[], None]) -> None:
        """Send a message, and note when it arrives."""
        upward, start = receiver == self._server, self._clock()

        def arrived() -> None:
            site = sender if upward else receiver
            self.transfers.append(Transfer(site, upward, nbytes, start, self._clock()))
            arrive()

        self._network.send(sender, receiver, nbytes, arrived)

    @property
    def wan_bytes(self) -> int:
        """Bytes over all links."""
        return self._network.wan_bytes


def predict(
    scenario: Scenario,
    strategy: Strategy,
    *,
    task: Task | None = None,
    elements: int = ELEMENTS,
    gradients: Gradients = TYPICAL,
) -> Prediction:
    """Play a strategy through, and work out the whole run.

    Args:
        scenario: what is planned.
        strategy: the strategy.
        task: a real task of the scenario's model to play through, instead of a stand-in.
        elements: of the stand-in, about.
        gradients: of the stand-in.
    """
    found, lost = _played(scenario, strategy, task, elements, gradients)
    if found is None:  # the server gave up a site
        patient = replace(strategy, t_global=None)
        found, _ = _played(scenario, patient, task, elements, gradients)
        assert found is not None
        found = replace(found, strategy=scenario.fitted(strategy), lost=lost)
    return found


def _played(
    scenario: Scenario, strategy: Strategy, task: Task | None, elements: int, gradients: Gradients
) -> tuple[Prediction | None, tuple[str, ...]]:
    """What was played through, extrapolated, or the sites that the server gave up."""
    strategy = scenario.fitted(strategy)
    steps = min(scenario.steps, steps_to_play(strategy))
    plan = scenario.plan(strategy, steps)
    per_tensor = strategy.per == "tensor" or strategy.exempt != "default"  # names are kept
    small = scenario.layout if task is not None else shrunk(scenario.layout, per_tensor=per_tensor, elements=elements)
    stand_in = StandIn(scenario.layout, small, plan.strategy)
    if task is None:
        each = scenario.batch / scenario.workers
        samples = [max(1, round(each * site.workers)) for site in scenario.sites]
        played_workers = [stand_in.played(site) for site in scenario.sites]
        task = StandInTask(small, samples, played_workers, scenario.seed, gradients)
    played = stand_in.plan(plan)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "events.jsonl"
        with EventLog(path) as events:
            steps_begun: list[Span] = []
            simulator = Simulator(
                played,
                task,
                events,
                size_of=stand_in.counter(plan),
                step_begins=lambda site, now, seconds: steps_begun.append(Span(site, "step", now, now + seconds)),
            )
            recorder = _Recorder(simulator.network, lambda: simulator.clock.now, plan.server)
            simulator.network = recorder  # type: ignore[assignment]
            with _one_thread():
                simulator.run()
            recorder.steps = steps_begun
        log = event_log.read(path)
        if lost := {str(name) for line in log if line.get("what") == "lost" for name in line["where"]}:
            return None, tuple(sorted(lost))
        return _extrapolated(scenario, plan.strategy, steps, log, recorder, stand_in), ()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Vectors as short as these take many times as long with several threads, and a run's steps have one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def steps_to_play(strategy: Strategy) -> int:
    """Steps that show what a strategy does: its warm start, and then some rounds of the second half."""
    trigger = parts.parse("trigger", strategy.trigger)
    every, rounds = 1, _ROUNDS
    if isinstance(trigger, (Every, Staggered)):
        every = trigger.steps
    elif isinstance(trigger, Significance):
        every, rounds = trigger.at_most, _SIGNIFICANT_ROUNDS
    elif isinstance(trigger, Scheduled):
        every = trigger.steps * 4 if strategy.auto is not None else trigger.steps
    warm = max(_warm_up(strategy.wan_codec(way)) for way in ("up", "down"))
    if isinstance(strategy.auto, Auto):
        warm = max(warm, strategy.auto.young_rounds * strategy.auto.every)
    # The result of the last push of a warm start comes after it, and a line that is used all the time fills its queues.
    settled = warm + _SETTLE_STEPS + _SETTLE_STEPS * max(strategy.overlap, strategy.hide)
    wanted = max(_LEAST_STEPS, 2 * settled, 2 * rounds * every)
    limit = max(_MOST_STEPS, 4 * every)
    return min(wanted, limit)


def _warm_up(codec: Codec) -> int:
    if isinstance(codec, WarmUp):
        return codec.steps
    if isinstance(codec, ErrorFeedback):
        return _warm_up(codec.inner)
    return codec.warmup if isinstance(codec, Dgc) else 0


def _extrapolated(
    scenario: Scenario,
    strategy: Strategy,
    steps: int,
    events: list[dict[str, object]],
    recorder: _Recorder,
    stand_in: StandIn,
) -> Prediction:
    history = _History(scenario, events, recorder, steps)
    rest = scenario.steps - steps
    links = tuple(history.link(site.name, rest) for site in scenario.sites)
    lan = stand_in.ratio * sum(
        float(str(event["lan_bytes"])) * _hops(stand_in, scenario, str(event["site"]))
        for event in events
        if event["kind"] == "site"
    )
    schedules = [event for event in events if event["kind"] == "schedule"]
    return Prediction(
        strategy=strategy,
        seconds=history.end + rest * history.step_seconds,
        step_seconds=history.step_seconds,
        compute_seconds=history.compute_seconds,
        round_steps=history.round_steps,
        links=links,
        transfers=tuple(t for t in recorder.transfers if t.end >= history.middle and t.start <= history.last_step),
        spans=tuple(span for span in history.spans if span.end > history.middle),
        lan_bytes=lan * scenario.steps / steps,
        schedule={key: schedules[-1][key] for key in ("every", "overlap", "up", "down", "why")} if schedules else None,
    )


def _hops(stand_in: StandIn, scenario: Scenario, name: str) -> float:
    """How many times as many hops the ring of a site has as that of the ranks that were played."""
    site = next(site for site in scenario.sites if site.name == name)
    played = stand_in.played(site)
    return 1.0 if played == site.workers else (site.workers - 1) / (played - 1)


class _History:
    """What was played through: when steps ended, what was sent, and the usual step of its second half."""

    def __init__(self, scenario: Scenario, events: list[dict[str, object]], recorder: _Recorder, steps: int) -> None:
        self.transfers, self.steps = recorder.transfers, steps
        self._by_site = {site.name: [s for s in recorder.steps if s.site == site.name] for site in scenario.sites}
        self.ends = {name: [0.0, *(span.end for span in own)] for name, own in self._by_site.items()}
        self.end = float(str(events[-1]["t"]))
        self.half = steps // 2
        self.middle = max(own[self.half] for own in self.ends.values())
        self.last_step = max(own[-1] for own in self.ends.values())
        self.rounds = [
            int(str(event["step"]))
            for event in events
            if event["kind"] == "round" and event["step"] > self.half  # type: ignore[operator]
        ]
        self.step_seconds = self._step_seconds()
        self.round_steps = self._round_steps()
        later = [own[self.half :] for own in self._by_site.values()]
        self.compute_seconds = max(sum(s.end - s.start for s in own) / max(1, len(own)) for own in later)
        self.spans = tuple(span for own in self._by_site.values() for span in _with_waiting(own))

    def _step_seconds(self) -> float:
        count = self.steps - self.half
        return max((own[-1] - own[self.half]) / count for own in self.ends.values()) if count else self.end

    def _round_steps(self) -> float:
        marks = sorted(set(self.rounds))
        if len(marks) > 1:
            return (marks[-1] - marks[0]) / (len(marks) - 1)
        return float(self.steps - self.half)

    def link(self, site: str, rest: int) -> LinkUse:
        """What the link of a site carries, if `rest` further steps follow what was played through."""
        first, last = self.ends[site][self.half], self.ends[site][-1]
        own = [transfer for transfer in self.transfers if transfer.site == site]
        count = max(1, self.steps - self.half)
        up, down = ([t for t in own if t.upward == upward] for upward in (True, False))
        usual_up, usual_down = ([t for t in way if first < t.start <= last] for way in (up, down))
        if len(up) == len(down):
            # Every push has its result, but those of the last pushes may leave after the last step: take theirs.
            ordered = sorted(down, key=lambda t: t.start)
            before = sum(t.start <= first for t in up)
            usual_down = ordered[before : before + len(usual_up)]
        each_up, each_down = (sum(t.nbytes for t in way) / count for way in (usual_up, usual_down))
        total_up, total_down = (float(sum(t.nbytes for t in way)) for way in (up, down))
        waits = [span for span in self.spans if span.site == site and span.kind == "waiting" and span.start >= first]
        waiting = sum(span.end - span.start for span in waits) / count * self.round_steps
        a_day = _DAY / self.step_seconds if self.step_seconds > 0 else 0.0
        return LinkUse(
            site=site,
            up_round=each_up * self.round_steps,
            down_round=each_down * self.round_steps,
            up_total=total_up + rest * each_up,
            down_total=total_down + rest * each_down,
            up_day=each_up * a_day,
            down_day=each_down * a_day,
            transfer_seconds=self._round_trip(own, first, last),
            waiting_seconds=waiting,
        )

    @staticmethod
    def _round_trip(own: list[Transfer], first: float, last: float) -> float:
        """Seconds from when a push leaves to when the result that answers it has come, on average."""
        pushes = sorted((t for t in own if t.upward and first < t.start <= last), key=lambda t: t.start)
        results = sorted((t for t in own if not t.upward), key=lambda t: t.end)
        found, place = [], 0
        for push in pushes:
            while place < len(results) and results[place].start < push.end:
                place += 1
            if place == len(results):
                break
            found.append(results[place].end - push.start)
            place += 1
        return sum(found) / len(found) if found else 0.0


def _with_waiting(steps: list[Span]) -> list[Span]:
    """The steps of a site, and the waiting between two of them."""
    found: list[Span] = []
    for step in steps:
        if found and step.start - found[-1].end > 1e-9:
            found.append(Span(step.site, "waiting", found[-1].end, step.start))
        found.append(step)
    return found


def crossover_bit_s(scenario: Scenario, strategy: Strategy, prediction: Prediction) -> float | None:
    """The bandwidth above which sending everything as float32 is faster than encoding it; None: nothing is encoded.

    Compression saves bytes and costs the time of the codecs. Both are the same at

        bandwidth = 8 (bytes of float32 - bytes as encoded, both ways) / (seconds of all codecs of a round)
    """
    numel, speed = scenario.layout.numel, scenario.codec_speed
    up, down = strategy.wan_codec("up"), strategy.wan_codec("down")
    seconds = cost.encode_seconds(up, numel, speed) + cost.decode_seconds(up, numel, speed)
    seconds += cost.encode_seconds(down, numel, speed) + cost.decode_seconds(down, numel, speed)
    plain = isinstance(up, Fp32) and isinstance(down, Fp32) and strategy.selector == "all"
    link = max(prediction.links, key=lambda own: own.up_round + own.down_round)
    saved = 8.0 * numel - link.up_round - link.down_round
    return None if plain or saved <= 0 else 8 * saved / seconds
