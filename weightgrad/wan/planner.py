"""`auto`: the server sets the pace from what the sites measured.

A site reports with each push how long its steps take and how long its last push took to be answered. Less
what the server held the round for the others, that is the link: `seconds = delay + bytes / speed`, fitted per
site by medians over its last rounds, so that one disturbed round says nothing. The delay is at least the line's own
round trip, which the site reports too where it knows it. From that the planner takes, in this
order of preference, the first pace whose bytes hide behind the compute between two pushes, and whose answers come
within `reach` steps:

1. nothing encoded, every step, where every link is faster than the codecs are;
2. rounds every `every` steps with the usual `density`;
3. sparser, down to `least`, at the same steps;
4. fewer rounds, up to `at_most` steps apart.

Before them all, rounds twice as often while the sites contradict each other: when fewer than half of the entries that
two of them sent have the same sign (see `agreement`), by more than chance would have it. Then each pulls the base its
own way, and what keeps them together is to hear of each other sooner; more of every push does not help
(`docs/log.md`).

The overlap is what the slowest answer needs, so several rounds may be on their way at a time. It goes to a slower
pace as soon as the present one no longer hides, and back only when the faster one would with room to spare, so it
does not swing; and it slows by a factor of four at most in one round, so that it never starves on a first impression.
Every change is said with its reason.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor

from weightgrad import codecs
from weightgrad.codecs import ErrorFeedback
from weightgrad.codecs.sparse import TopK
from weightgrad.errors import StrategyError
from weightgrad.units import show_bit_s
from weightgrad.wan.agreement import Signs
from weightgrad.wan.pace import Pace, Report
from weightgrad.wan.parts import check, part

CODEC_BYTES_S = 3e9  # float32 encoded and decoded again on one core, until the driver says what it is here
_HIDDEN = 0.8  # of the compute between two rounds may be the exchange
_EAGER = 0.5  # less than that to go back to a faster pace
_STAY = 1.3  # longer than `reach` an answer may take before rounds get fewer
_SLOWER = 4.0  # times fewer bytes, at most, from one pace to the next
_WINDOW = 9  # rounds of a site that the fit goes by
_APART = 1.2  # times as large a round must be to tell speed from delay
_LEAST_S = 1e-9  # a link that takes less says nothing
_ENOUGH = 200  # pairs of signs over the last rounds looked at, to say anything of them
_SELDOM = 4  # of so many rounds one is looked at, after the first few: to unpack pushes again costs as much as to add
_CHANCE = 2.0  # standard errors below one half: sites contradict each other
_AGREE = 0.6  # of the signs are the same: they no longer do
_PROBE = 2.5  # times the usual density in the first round: two sizes tell delay and speed apart


@dataclass(frozen=True)
class Decision:
    """A pace, the codec of the answers, and why."""

    pace: Pace
    down: str
    why: str
    relayed: bool = False  # answers are the pushes, handed on: the codec of answers rests

    def words(self) -> dict[str, Any]:
        """For a ledger."""
        pace, down = self.pace, "the others' pushes" if self.relayed else self.down
        return {"every": pace.every, "overlap": pace.overlap, "up": pace.up, "down": down, "why": self.why}


@part("planner", "fixed")
@dataclass(frozen=True)
class Fixed:
    """The row as it stands."""

    word: ClassVar[str]


@part("planner", "auto")
@dataclass(frozen=True)
class Auto:
    """Rounds, density and overlap from measured steps and links."""

    every: int = 4
    density: float = 0.01
    least: float = 0.0025
    at_most: int = 64
    reach: int = 12
    values: str = "sign()"

    word: ClassVar[str]

    def __post_init__(self) -> None:
        check("auto", "every", self.every, 1, 10**6, whole=True)
        check("auto", "density", self.density, 1e-6, 0.5)
        check("auto", "least", self.least, 1e-6, self.density)
        check("auto", "at_most", self.at_most, self.every, 10**6, whole=True)
        check("auto", "reach", self.reach, 1, 10**6, whole=True)
        if not isinstance(self.values, str):
            raise StrategyError(f"auto: values = {self.values!r}; it is a codec such as 'sign()'")

    def first(self) -> Decision:
        """Before anything is known: soon, and larger than usual, so that the second round tells them apart."""
        probe = min(0.5, _PROBE * self.density)
        down = self.codec(self.down(probe))
        return Decision(Pace(1, 1, self.codec(probe)), down, "nothing is known yet: a first look")

    def down(self, density: float) -> float:
        """Of an answer to pushes of that density: sites choose other entries, and what is held back comes late."""
        return 1.0 if density >= 1 else min(0.5, 2 * density)

    def codec(self, density: float) -> str:
        """Of that density; 1: everything as it is."""
        return "fp32" if density >= 1 else f"ef(topk({density:g}) > {self.values})"

    def ladder(self, *, unlike: bool = False) -> Iterator[tuple[int, float]]:
        """(every, density), the best first, of sites that are alike or not."""
        if unlike and self.every > 1:
            yield self.every // 2, self.density
        yield self.every, self.density
        density = self.density
        while density / 2 >= self.least:
            density /= 2
            yield self.every, density
        every = self.every
        while 2 * every <= self.at_most:
            every *= 2
            yield every, self.density
            if density < self.density:
                yield every, density


def sparse_bits(density: float) -> float:
    """An element, of entries by sign: gaps by Golomb-Rice and the sign; 1: a float32."""
    return 32.0 if density >= 1 else density * (math.log2(1 / density) + 1.6 + 1.0)


@dataclass
class LinkFit:
    """seconds = trip + delay + bytes * slope, by the median of slopes between rounds of different size (Theil and Sen).

    The trip is known, or 0; the rest is fitted. Where the last rounds are all of one size, delay and slope keep their
    proportion and follow what they take.
    """

    rounds: list[tuple[float, float]] = field(default_factory=list)  # (bytes, seconds beyond the trip), the last ones
    delay: float = 0.0
    slope: float = 0.0  # seconds a byte
    trip: float = 0.0

    def add(self, nbytes: float, seconds: float, trip: float = 0.0) -> None:
        """One more round, on a line that takes so long there and back."""
        self.trip = trip
        self.rounds = [*self.rounds, (nbytes, max(0.0, seconds - trip))][-_WINDOW:]
        slopes = [
            (y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.permutations(self.rounds, 2) if x2 > _APART * x1
        ]
        if slopes:
            self.slope = max(0.0, median(slopes))
            self.delay = median(y - self.slope * x for x, y in self.rounds)
            if self.delay < 0:
                self.delay, self.slope = 0.0, median(y / x for x, y in self.rounds if x > 0)
            return
        expected = [self.delay + self.slope * x for x, _ in self.rounds]
        if min(expected) > _LEAST_S:
            factor = median(y / wanted for (_, y), wanted in zip(self.rounds, expected, strict=True))
            self.delay, self.slope = factor * self.delay, factor * self.slope
        else:  # all of one size so far: take all of it for delay, and look closer when the size changes
            self.delay = median(y for _, y in self.rounds)

    def line(self) -> tuple[float, float]:
        """(delay, seconds a byte)."""
        return self.trip + self.delay, self.slope


@dataclass
class Planner:
    """What the server knows of its sites, and the pace it has set."""

    auto: Auto
    numel: int
    now: Decision = field(init=False)
    steps: dict[str, float] = field(default_factory=dict)
    links: dict[str, LinkFit] = field(default_factory=dict)
    looked: int = 0
    others: int | None = None  # whose pushes an answer hands on; None: it has been put together and encoded
    codec_bytes_s: float = CODEC_BYTES_S
    signs: list[Signs] = field(default_factory=list)  # of the last rounds looked at
    unlike: bool = False  # the sites contradict each other

    def __post_init__(self) -> None:
        self.now = self.auto.first()

    def observe(self, site: str, report: Report, network_seconds: float | None, nbytes: int) -> None:
        """A site's report; the time on the network of a round of so many bytes, both ways, where there is one."""
        if report.step_seconds > 0:
            self.steps[site] = report.step_seconds
        if network_seconds is not None:
            self.links.setdefault(site, LinkFit()).add(nbytes, max(network_seconds, 0.0), report.trip_seconds)

    @staticmethod
    def compares(number: int) -> bool:
        """Whether it wants to know how alike the pushes of that round are."""
        return number <= _WINDOW or number % _SELDOM == 0

    def compare(self, signs: Signs) -> None:
        """How alike the pushes of a round were, that is about to be decided on."""
        if not signs.common:
            return
        self.signs = [*self.signs, signs][-_WINDOW:]
        common = sum(found.common for found in self.signs)
        if common >= _ENOUGH:
            self.unlike = self.agreement < (_AGREE if self.unlike else 0.5 - _CHANCE * 0.5 / math.sqrt(common))

    @property
    def agreement(self) -> float:
        """Of the signs that two sites sent in the last rounds, how many are the same."""
        common = sum(found.common for found in self.signs)
        return sum(found.same for found in self.signs) / common if common else 1.0

    def decide(self, present: list[str], *, relayed: bool = False) -> Decision | None:
        """A new pace for these sites, or None to go on as it is. Called as each round closes, with how it did."""
        self.others = max(0, len(present) - 1) if relayed else None
        known = [name for name in present if name in self.steps and name in self.links]
        if not present or len(known) < len(present):
            return self._look()
        found = self._best(known)
        if replace(found, why=self.now.why) == self.now:
            return None
        self.now = found
        return found

    def _look(self) -> Decision | None:
        """Some have not reported: the second look has the usual size, the others wait for what comes."""
        self.looked += 1
        if self.looked != 1:
            return None
        usual, down = self.auto.density, self.auto.down(self.auto.density)
        pace = Pace(2, 2, self.auto.codec(usual))
        self.now = Decision(pace, self.auto.codec(down), "a second look, at the usual size", self.others is not None)
        return self.now

    def _best(self, sites: list[str]) -> Decision:
        step = max(self.steps[name] for name in sites)
        lines = {name: self.links[name].line() for name in sites}
        slowest = max(lines, key=lambda name: lines[name][1])
        slope = lines[slowest][1]
        if 0 < slope < 1 / self.codec_bytes_s:
            seconds = self._seconds(lines, 1.0)
            if seconds <= _HIDDEN * step:
                why = (
                    f"no compression: the link of {slowest} carries {show_bit_s(8 / slope)}, faster than the codec "
                    f"({show_bit_s(8 * self.codec_bytes_s)})"
                )
                return self._decision(1, 1.0, seconds, step, why)
        every, density = self._rung(lines, step)
        seconds, busy = self._seconds(lines, density), self._busy(lines, density)
        why = (
            f"a round takes {seconds:.3f} s on the slowest link, {busy:.3f} s of them for its bytes; a step takes "
            f"{step:.3f} s"
        )
        if every < self.auto.every:
            how = "contradict each other" if self.agreement < 0.5 else "hardly agree"
            why = (
                f"the sites {how}, {100 * self.agreement:.0f} % of the signs that two of them sent are the same: "
                f"rounds twice as often; {why}"
            )
        return self._decision(every, density, seconds, step, why)

    def _rung(self, lines: Mapping[str, tuple[float, float]], step: float) -> tuple[int, float]:
        """The best (every, density) that hides, as far as it may be reached from the present one at once."""
        delay = max(delay for delay, _ in lines.values())
        least = self._rate(self.now.pace.every, self.density) / _SLOWER
        reached = []
        for every, density in self.auto.ladder(unlike=self.unlike):
            rate = self._rate(every, density)
            if rate >= least:
                reached.append((rate, every, density))
            share = _HIDDEN if rate <= _SLOWER * least else _EAGER
            patience = _STAY if every == self.now.pace.every else 1.0
            if (
                self._busy(lines, density) <= share * every * step
                and delay <= patience * max(self.auto.reach, every) * step
            ):
                break
        if rate >= least or not reached:
            return every, density
        _, every, density = min(reached, key=lambda rung: rung[0])
        return every, density

    @property
    def density(self) -> float:
        """Of the present pace."""
        up = codecs.parse(self.now.pace.up)
        inner = up.inner if isinstance(up, ErrorFeedback) else up
        return inner.fraction if isinstance(inner, TopK) else 1.0

    @staticmethod
    def _rate(every: int, density: float) -> float:
        """Bits an element and step."""
        return sparse_bits(density) / every

    def _decision(self, every: int, density: float, seconds: float, step: float, why: str) -> Decision:
        most = max(self.auto.reach, every)
        needed = most if 1.1 * seconds > most * step else math.ceil(1.1 * seconds / step)
        overlap = max(1, needed) if seconds > 0.02 * step else 0
        pace, codec, down = self.now.pace, self.auto.codec(density), self.auto.codec(self.auto.down(density))
        if (pace.every, pace.up) == (every, codec) and overlap <= pace.overlap <= overlap + 1:
            overlap = pace.overlap  # one step more or less is noise
        return Decision(Pace(every, overlap, codec), down, why, self.others is not None and density < 1)

    def _nbytes(self, density: float) -> float:
        up = sparse_bits(density)
        handed_on = self.others is not None and density < 1
        down = (self.others or 0) * up if handed_on else sparse_bits(self.auto.down(density))
        return self.numel * (up + down) / 8

    def _busy(self, lines: Mapping[str, tuple[float, float]], density: float) -> float:
        """Seconds in which the slowest link is full."""
        return max(slope for _, slope in lines.values()) * self._nbytes(density)

    def _seconds(self, lines: Mapping[str, tuple[float, float]], density: float) -> float:
        """Seconds from a push to its answer."""
        return max(delay + slope * self._nbytes(density) for delay, slope in lines.values())

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        text = f"{self.now.pace.every}\n{self.now.pace.overlap}\n{self.now.pace.up}\n{self.now.down}\n{self.now.why}"
        found = {
            "now": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).clone(),
            "looked": torch.tensor(self.looked),
            "relayed": torch.tensor(self.now.relayed),
            "unlike": torch.tensor(self.unlike),
            "signs": torch.tensor(self.signs, dtype=torch.int64),
        }
        for name, seconds in self.steps.items():
            found[f"step.{name}"] = torch.tensor(seconds, dtype=torch.float64)
        for name, fit in self.links.items():
            found[f"link.{name}"] = torch.tensor([(fit.delay, fit.slope), *fit.rounds], dtype=torch.float64)
            found[f"trip.{name}"] = torch.tensor(fit.trip, dtype=torch.float64)
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Become what `state` was of."""
        every, overlap, up, down, why = bytes(state["now"].numpy()).decode().split("\n", 4)
        self.now = Decision(Pace(int(every), int(overlap), up), down, why, bool(state["relayed"]))
        self.looked = int(state["looked"])
        self.unlike = bool(state["unlike"])
        self.signs = [Signs(int(common), int(same)) for common, same in state["signs"].tolist()]
        own = {name: tensor for name, tensor in state.items() if name.startswith("step.")}
        self.steps = {name.removeprefix("step."): float(tensor) for name, tensor in own.items()}
        self.links = {}
        for name, tensor in state.items():
            if name.startswith("link."):
                (delay, slope), *rounds = [(float(x), float(y)) for x, y in tensor]
                site = name.removeprefix("link.")
                self.links[site] = LinkFit(rounds, delay, slope, float(state[f"trip.{site}"]))
