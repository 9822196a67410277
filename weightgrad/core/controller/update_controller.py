"""The controller of `auto`: the server sets the sync schedule from what the sites measure.

With each push a site reports how long its steps take and how long its last push took to come back as a result. Less
the time that the server held the round for the other sites, that is the time on the link: `seconds = delay + bytes /
speed`, fitted for each site by medians over its last rounds, so that one disturbed round changes nothing. The delay is
at least the round trip time of the link, which the site reports too if it knows it. From these fits the controller
takes the first of the following schedules whose bytes hide behind the compute between two pushes, and whose results
come within `reach` steps:

1. nothing encoded, a round every step, where every link is faster than the codecs are;
2. a round every `every` steps with the usual `density`, or denser while the run is young;
3. sparser pushes, down to `least`, at the same steps;
4. fewer rounds, up to `at_most` steps apart.

With a density of d an entry waits 1/d rounds on average. In a young run that is most of the run: what has been learnt
so far has hardly been shared. So pushes are denser at first, and as rounds go by the density falls to the usual one: an
entry waits for no more than `lag` of the rounds so far.

So what a line carries for free is used. With a `budget` a schedule must also keep within that. Lines without any
distance carry everything (`near_line`).

Of the entries that two sites sent, some have the same sign at both (see `agreement`). While nearly all of them do, the
sites pull the global model the same way, and what they leave behind is missing: pushes have the density `alike`. While
fewer than half do, by more than chance explains, each site pulls its own way. Then rounds come twice as often, because
hearing of each other sooner keeps the sites together; sending more harms them (`docs/log.md`).

The overlap is what the slowest result needs, so several rounds may be under way at a time. The controller goes to a
slower schedule when the present one no longer hides, and back to a faster one only when that one would hide with a
margin, so it does not oscillate. It slows down by a factor of four at most in one round, so that a first impression
never starves the training. Every change is recorded with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from weightgrad.core.controller.agreement import Signs
from weightgrad.core.controller.decision import Decision
from weightgrad.core.controller.encodings import EXACT, Encoding, codec_bits, sparse
from weightgrad.core.controller.link_fit import WINDOW
from weightgrad.core.controller.measurements import Measurements
from weightgrad.core.controller.near_line import near_schedule
from weightgrad.core.parts import check, part
from weightgrad.errors import StrategyError, UnitError
from weightgrad.units import bytes_s, show_bit_s, show_bytes
from weightgrad.wire.sync_schedule import Report, SyncSchedule

CODEC_BYTES_S = 3e9  # float32 encoded and decoded on one core, until the driver measures it
_HIDDEN = 0.8  # the part of the compute between two rounds that the exchange may take
_EAGER = 0.5  # the same, to go back to a faster schedule
_STAY = 1.3  # times `reach`: how late results may be before rounds get fewer
_SLOWER = 4.0  # times fewer bytes, at most, from one schedule to the next
_ENOUGH = 200  # pairs of signs over the last compared rounds, before they count
_SELDOM = 4  # one of so many rounds is compared, after the first few: comparing costs as much as adding
_CHANCE = 2.0  # so many standard errors below one half, the sites contradict each other
_AGREE = 0.6  # when this part of the signs is the same, they no longer do
_ALIKE = 0.9  # when this part is the same, the sites pull the same way
_STILL_ALIKE = 0.8  # until it is less than this
_PROBE = 2.5  # times the usual density in the first round: two sizes tell delay from speed
_DENSEST = 0.5  # of the entries: beyond that, naming them is not worth it
_MOST_PROBED = 0.25  # of the entries, on a line of which nothing is known


@part("controller", "fixed")
@dataclass(frozen=True)
class Fixed:
    """No controller: the strategy stays as it is."""

    word: ClassVar[str]


@part("controller", "auto")
@dataclass(frozen=True)
class Auto:
    """Sets rounds, density and overlap from measured steps and links.

    Attributes:
        every: the usual steps between two rounds.
        density: the usual fraction of entries in a push.
        alike: the fraction while the sites agree.
        lag: for which part of the rounds so far an entry may wait, on average; 0: pushes of a young run are as others.
        least: the smallest density.
        at_most: the most steps between two rounds.
        reach: the steps within which a result should come.
        values: the codec of the values of a sparse push.
        budget: the most bytes of all sites in a time, both directions together, such as "5 GB/day"; "": what hides.
    """

    every: int = 4
    density: float = 0.01
    alike: float = 0.05
    lag: float = 0.0
    least: float = 0.0025
    at_most: int = 64
    reach: int = 12
    values: str = "sign()"
    budget: str = ""

    word: ClassVar[str]

    def __post_init__(self) -> None:
        check("auto", "every", self.every, 1, 10**6, whole=True)
        check("auto", "density", self.density, 1e-6, 0.5)
        check("auto", "alike", self.alike, 0, 0.5)
        check("auto", "lag", self.lag, 0, 1)
        check("auto", "least", self.least, 1e-6, self.density)
        check("auto", "at_most", self.at_most, self.every, 10**6, whole=True)
        check("auto", "reach", self.reach, 1, 10**6, whole=True)
        if not isinstance(self.values, str):
            raise StrategyError(f"auto: values = {self.values!r}; wanted a codec such as 'sign()'")
        try:
            good = self.budget == "" or self.budget_bytes_s > 0
        except UnitError as error:
            raise StrategyError(f"auto: budget: {error}") from None
        if not good:
            raise StrategyError(f"auto: budget = {self.budget!r}; wanted more than nothing, such as '5 GB/day'")

    @property
    def budget_bytes_s(self) -> float:
        """The budget in bytes a second; no limit without one."""
        return bytes_s(self.budget) if self.budget else math.inf

    def controller(self, numel: int) -> Controller:
        """The controller of a model of so many elements."""
        return Controller(self, numel)

    def first(self) -> Decision:
        """The decision before anything is measured: a round at once and larger than usual.

        The second round has another size, and the two tell delay from speed.
        """
        probe = sparse(min(_MOST_PROBED, _PROBE * self.density), self.values)
        return Decision(SyncSchedule(1, 1, probe.up), probe.down, "nothing is measured yet: a first probe")

    @property
    def usual(self) -> Encoding:
        """The encoding with the usual density."""
        return sparse(self.density, self.values)

    @property
    def young_rounds(self) -> int:
        """The rounds after which pushes have the usual density, however much they began with."""
        return math.floor(1 / (2 * self.density * self.lag)) if self.lag else 0

    def early_density(self, rounds: int) -> float:
        """The density after so many rounds: the usual one, doubled as often as `lag` asks for."""
        density = self.density
        while self.lag and 2 * density <= min(_DENSEST, 1 / (self.lag * max(1, rounds))):
            density *= 2
        return density

    def ladder(self, *, rounds: int, alike: bool = False, unlike: bool = False) -> Iterator[Rung]:
        """The schedules to choose from, the best first.

        Args:
            rounds: how many have closed.
            alike: whether the sites agree.
            unlike: whether they contradict each other.
        """
        if unlike and self.every > 1:
            yield Rung(self.every // 2, self.usual)
        early = max(self.early_density(rounds), self.alike if alike else 0.0)
        while early > self.density:
            yield Rung(self.every, sparse(early, self.values))
            early /= 2
        yield Rung(self.every, self.usual)
        density = self.density
        while density / 2 >= self.least:
            density /= 2
            yield Rung(self.every, sparse(density, self.values))
        every = self.every
        while 2 * every <= self.at_most:
            every *= 2
            yield Rung(every, self.usual)
            if density < self.density:
                yield Rung(every, sparse(density, self.values))


class Rung(NamedTuple):
    """One of the schedules to choose from: what is sent, and after how many steps."""

    every: int
    encoding: Encoding

    @property
    def rate(self) -> float:
        """Bits of a push by element and step."""
        return self.encoding.up_bits / self.every


@dataclass
class Controller:
    """What the server knows about its sites, and the sync schedule it has set.

    Attributes:
        auto: the options.
        numel: the elements of the model.
        now: the decision in force.
    """

    auto: Auto
    numel: int
    now: Decision = field(init=False)
    measured: Measurements = field(default_factory=Measurements)
    probes: int = 0
    rounds: int = 0  # that have closed
    others: int | None = None  # how many pushes of others a result relays; None: it is encoded anew
    codec_bytes_s: float = CODEC_BYTES_S
    signs: list[Signs] = field(default_factory=list)  # of the last compared rounds
    unlike: bool = False  # the sites contradict each other
    alike: bool = False  # the sites agree

    def __post_init__(self) -> None:
        self.now = self.auto.first()

    def observe(self, site: str, report: Report, network_seconds: float | None, nbytes: int) -> None:
        """Take note of a site's report.

        Args:
            site: the site.
            report: what it measured.
            network_seconds: the time on the link of its last round, or None if that is not known.
            nbytes: the bytes of that round, both ways.
        """
        self.measured.observe(site, report, network_seconds, nbytes)

    @staticmethod
    def compares(number: int) -> bool:
        """Whether the pushes of that round are to be compared."""
        return number <= WINDOW or number % _SELDOM == 0

    def compare(self, signs: Signs) -> None:
        """Take note of how alike the pushes of a round were, before `decide`."""
        if not signs.common:
            return
        self.signs = [*self.signs, signs][-WINDOW:]
        common = sum(found.common for found in self.signs)
        if common >= _ENOUGH:
            self.unlike = self.agreement < (_AGREE if self.unlike else 0.5 - _CHANCE * 0.5 / math.sqrt(common))
            self.alike = self.agreement >= (_STILL_ALIKE if self.alike else _ALIKE)

    @property
    def agreement(self) -> float:
        """The fraction of equal signs among the entries that two sites sent in the last rounds."""
        common = sum(found.common for found in self.signs)
        return sum(found.same for found in self.signs) / common if common else 1.0

    def decide(self, present: list[str], *, relayed: bool = False, rate: float | None = None) -> Decision | None:
        """Decide on the sync schedule when a round closes.

        Args:
            present: the sites that rounds wait for.
            relayed: whether the round relayed its pushes.
            rate: the learning rate of shared gradients; None where updates are shared.

        Returns:
            A new decision, or None to go on as before.
        """
        del rate
        self.rounds += 1
        self.others = max(0, len(present) - 1) if relayed else None
        near = self._near(present)
        if near is None and not self.measured.has_all(present):
            return self._probe()
        found = self._best(present) if near is None else near
        if replace(found, why=self.now.why) == self.now:
            return None
        self.now = found
        return found

    def _near(self, sites: list[str]) -> Decision | None:
        """Everything, waited for, where no line has a distance and a budget does not forbid it."""
        found = near_schedule(
            *(self.measured, sites, self.numel, self.now.schedule),
            at_most=self.auto.at_most,
            codec_bytes_s=self.codec_bytes_s,
        )
        if found is None or self.auto.budget:
            return None
        if found.density < 1:
            part = sparse(found.density, self.auto.values)
            return Decision(SyncSchedule(1, 1, part.up), part.down, found.why, self.others is not None)
        return Decision(SyncSchedule(found.every, 0, found.codec), found.codec, found.why)

    def _probe(self) -> Decision | None:
        """Some sites have not reported: make the second round of the usual size, then wait for reports."""
        self.probes += 1
        if self.probes != 1:
            return None
        usual = self.auto.usual
        why = "a second probe, at the usual size"
        self.now = Decision(SyncSchedule(2, 2, usual.up), usual.down, why, self.others is not None)
        return self.now

    def _best(self, sites: list[str]) -> Decision:
        step, lines = self.measured.step(sites), self.measured.lines(sites)
        slowest = max(lines, key=lambda name: lines[name][1])
        slope = lines[slowest][1]
        if 0 < slope < 1 / self.codec_bytes_s:
            seconds, rung = self._seconds(lines, EXACT), Rung(1, EXACT)
            if seconds <= _HIDDEN * step and self._spent(rung, lines, step) <= self.auto.budget_bytes_s:
                why = (
                    f"no compression: the link of {slowest} carries {show_bit_s(8 / slope)}, faster than the codec "
                    f"({show_bit_s(8 * self.codec_bytes_s)})"
                )
                return self._decision(rung, seconds, step, why)
        rung = self._rung(lines, step)
        seconds, busy = self._seconds(lines, rung.encoding), self._busy(lines, rung.encoding)
        why = (
            f"a round takes {seconds:.3f} s on the slowest link, {busy:.3f} s of them for its bytes; a step takes "
            f"{step:.3f} s"
        )
        if self.auto.budget:
            spent, day = self._spent(rung, lines, step), 86400
            more = "" if spent <= self.auto.budget_bytes_s else ", more than that: this is the least of the schedules"
            why = f"{why}; all sites together send {show_bytes(spent * day)} a day of {self.auto.budget}{more}"
        if rung.every < self.auto.every:
            how = "contradict each other" if self.agreement < 0.5 else "hardly agree"
            why = (
                f"the sites {how}, {100 * self.agreement:.0f} % of the signs that two of them sent are the same: "
                f"rounds twice as often; {why}"
            )
        if rung.encoding.up_bits > self.auto.usual.up_bits:
            if self.alike and self.auto.early_density(self.rounds) < self.auto.alike:
                reason = f"the sites agree on {100 * self.agreement:.0f} % of the signs that two of them sent"
            else:
                reason = f"the run is young, with {self.rounds} rounds"
            why = f"{reason}: denser; {why}"
        return self._decision(rung, seconds, step, why)

    def _rung(self, lines: Mapping[str, tuple[float, float]], step: float) -> Rung:
        """The best rung that hides, within what may be reached from the present one in one round."""
        now = self.now.schedule
        least = Rung(now.every, self.encoding).rate / _SLOWER
        reached = []
        for rung in self.auto.ladder(rounds=self.rounds, alike=self.alike, unlike=self.unlike):
            if rung.rate >= least:
                reached.append(rung)
            share = _HIDDEN if rung.rate <= _SLOWER * least else _EAGER
            tolerance = _STAY if rung.every == now.every else 1.0
            if (
                self._busy(lines, rung.encoding) <= share * rung.every * step
                and self._spent(rung, lines, step) <= self.auto.budget_bytes_s
                and self._seconds(lines, rung.encoding) <= tolerance * self._latest(rung) * step
            ):
                break
        return rung if rung.rate >= least or not reached else min(reached, key=lambda found: found.rate)

    @property
    def encoding(self) -> Encoding:
        """The encoding of the present schedule."""
        up, down = self.now.schedule.up, self.now.down
        return Encoding(up, down, codec_bits(up), codec_bits(down))

    def _decision(self, rung: Rung, seconds: float, step: float, why: str) -> Decision:
        every, encoding = rung
        most = self._latest(rung)
        needed = most if 1.1 * seconds > most * step else math.ceil(1.1 * seconds / step)
        overlap = max(1, needed) if seconds > 0.02 * step else 0
        schedule = self.now.schedule
        if (schedule.every, schedule.up) == (every, encoding.up) and overlap <= schedule.overlap <= overlap + 1:
            overlap = schedule.overlap  # one step more or less is noise
        relayed = self.others is not None and not encoding.exact
        return Decision(SyncSchedule(every, overlap, encoding.up), encoding.down, why, relayed)

    def _latest(self, rung: Rung) -> int:
        """The steps within which a result should come."""
        return max(self.auto.reach, rung.every)

    def _nbytes(self, encoding: Encoding) -> float:
        relayed = self.others is not None and not encoding.exact
        down = (self.others or 0) * encoding.up_bits if relayed else encoding.down_bits
        return self.numel * (encoding.up_bits + down) / 8

    def _spent(self, rung: Rung, lines: Mapping[str, tuple[float, float]], step: float) -> float:
        """Bytes a second of all sites, both ways."""
        return len(lines) * self._nbytes(rung.encoding) / (rung.every * step) if step > 0 else math.inf

    def _busy(self, lines: Mapping[str, tuple[float, float]], encoding: Encoding) -> float:
        """Seconds for which the bytes of a round fill the slowest link."""
        return max(slope for _, slope in lines.values()) * self._nbytes(encoding)

    def _seconds(self, lines: Mapping[str, tuple[float, float]], encoding: Encoding) -> float:
        """Seconds from a push to its result on the slowest link."""
        return max(delay + slope * self._nbytes(encoding) for delay, slope in lines.values())

    def state(self) -> dict[str, Tensor]:
        """The measurements and the decision in force, for a checkpoint."""
        found = {
            "now": self.now.to_tensor(),
            "probes": torch.tensor(self.probes),
            "rounds": torch.tensor(self.rounds),
            "relayed": torch.tensor(self.now.relayed),
            "unlike": torch.tensor(self.unlike),
            "alike": torch.tensor(self.alike),
            "signs": torch.tensor(self.signs, dtype=torch.int64),
        }
        return found | self.measured.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self.now = Decision.from_tensor(state["now"], relayed=bool(state["relayed"]))
        self.probes, self.rounds = int(state["probes"]), int(state["rounds"])
        self.unlike, self.alike = bool(state["unlike"]), bool(state["alike"])
        self.signs = [Signs(int(common), int(same)) for common, same in state["signs"].tolist()]
        self.measured.load(state)
