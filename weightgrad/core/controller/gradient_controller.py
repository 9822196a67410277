"""The controller of `auto` where gradients are shared: the codec and how late results may be.

A step of the whole run takes as long as the slowest of three things: a step of compute; the bytes of a push, or of a
result, on the slowest link; and the round, from the gradient to its mean, divided by the steps that may be under way:

    seconds = max(step, busy, (step + round) / (overlap + 1))

What is late is paid for in steps: a site that goes on without the mean computes its next gradients at weights that are
not quite those of the others (`core/site/ahead_model.py`), and a coarser codec adds noise. Both are written as the part
by which a run needs more steps for the same loss, measured once (`docs/log.md`). The controller takes the codec and the
overlap with which `seconds x steps` is least. So a line that carries more for free is used for it, and a site waits for
the answer where that is worth its time.

The price of lateness grows with its square, and with the learning rate, as a part of the largest so far: a site's
weights are away from the others' by its steps in flight. So at the end of a schedule results may be later.

Lines without any distance are waited for as long as a run is short (`near_line`).

The choice changes only where that saves more than a few percent, so it does not swing. Every change is recorded with
its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from weightgrad.core.controller.agreement import Signs
from weightgrad.core.controller.decision import Decision
from weightgrad.core.controller.measurements import Measurements
from weightgrad.core.controller.near_line import near_schedule
from weightgrad.core.controller.update_controller import CODEC_BYTES_S
from weightgrad.core.parts import check, part
from weightgrad.units import show_bit_s
from weightgrad.wire.sync_schedule import Report, SyncSchedule

_ROUNDS = 3  # of each site, before anything is decided: the first may be disturbed by those that still join
_BETTER = 0.95  # times the present cost: what another choice must come below


class Choice(NamedTuple):
    """A codec of pushes and results.

    Attributes:
        codec: as text.
        bits: of an element, each way.
        price: the part by which a run needs more steps for the same loss than with exact gradients.
    """

    codec: str
    bits: float
    price: float


CHOICES = (
    Choice("fp32", 32.0, 0.0),
    Choice("ef(qsgd(bits=8))", 8.1, 0.0),
    Choice("ef(qsgd(bits=4, bucket=64, rounding='nearest'))", 4.5, 0.0),
    Choice("ef(qsgd(bits=3, bucket=64, rounding='nearest'))", 3.5, 0.05),
)


@part("controller", "gradients")
@dataclass(frozen=True)
class Gradients:
    """Sets codec and overlap of shared gradients from measured steps and links, for the least time to a loss.

    Attributes:
        reach: the most steps that a result may be late.
        late: the part by which a run needs more steps if results are one step late, at the largest learning rate.
    """

    reach: int = 8
    late: float = 0.25

    word: ClassVar[str]
    every: ClassVar[int] = 1
    at_most: ClassVar[int] = 1
    """The most steps between two rounds: gradients are shared at every step."""

    def __post_init__(self) -> None:
        check("gradients", "reach", self.reach, 0, 10**6, whole=True)
        check("gradients", "late", self.late, 0, 10**3)

    def controller(self, numel: int) -> GradientController:
        """The controller of a model of so many elements."""
        return GradientController(self, numel)

    def first(self) -> Decision:
        """The decision before anything is measured: 8 bits. The second round has 4, which tells delay from speed."""
        codec = CHOICES[1].codec
        return Decision(SyncSchedule(1, min(1, self.reach), codec), codec, "nothing is measured yet: a first probe")


@dataclass
class GradientController:
    """What the server knows about its sites, and the sync schedule it has set.

    Attributes:
        options: the part of the strategy.
        numel: the elements of the model.
        now: the decision in force.
        codec_bytes_s: the speed of the codecs on this machine.
    """

    options: Gradients
    numel: int
    now: Decision = field(init=False)
    measured: Measurements = field(default_factory=Measurements)
    probes: int = 0
    decided: bool = False  # from measurements; the probes before are none
    codec_bytes_s: float = CODEC_BYTES_S
    peak: float = 0.0  # the largest learning rate so far
    share: float = 1.0  # the present one, as a part of it

    def __post_init__(self) -> None:
        self.now = self.options.first()

    def observe(self, site: str, report: Report, network_seconds: float | None, nbytes: int) -> None:
        """Take note of a site's report; see `Measurements.observe`."""
        self.measured.observe(site, report, network_seconds, nbytes)

    @staticmethod
    def compares(number: int) -> bool:
        """Signs are not compared: dense pushes do not choose their entries."""
        del number
        return False

    def compare(self, signs: Signs) -> None:
        """Nothing: see `compares`."""
        del signs

    def decide(self, present: list[str], *, relayed: bool = False, rate: float | None = None) -> Decision | None:
        """Decide on the sync schedule when a round closes.

        Args:
            present: the sites that rounds wait for.
            relayed: never, where gradients are shared.
            rate: the learning rate of the round; None if it had no gradient.

        Returns:
            A new decision, or None to go on as before.
        """
        del relayed
        if rate is not None and rate >= 0:
            self.peak = max(self.peak, rate)
            self.share = rate / self.peak if self.peak > 0 else 1.0
        near = self._near(present)
        measured = near is not None or self.measured.has_all(present, _ROUNDS)
        found = near if near is not None else self._best(present) if measured else self._probe()
        if found is None or (self.decided and replace(found, why=self.now.why) == self.now):
            return None
        self.now, self.decided = found, measured
        return found

    def _near(self, sites: list[str]) -> Decision | None:
        """Waiting for each result while a run on lines without distance is short."""
        found = near_schedule(
            *(self.measured, sites, self.numel, self.now.schedule), at_most=1, codec_bytes_s=self.codec_bytes_s
        )
        if found is None or found.density < 1:
            return None
        return Decision(SyncSchedule(1, 0, found.codec), found.codec, found.why)

    def _probe(self) -> Decision | None:
        """Some sites have not reported: make the second round of another size, then wait for reports."""
        self.probes += 1
        if self.probes != 1:
            return None
        codec = CHOICES[2].codec
        return Decision(SyncSchedule(1, self.now.schedule.overlap, codec), codec, "a second probe, of another size")

    def _best(self, sites: list[str]) -> Decision:
        lines, step = self.measured.lines(sites), self.measured.step(sites)
        slope = max(slope for _, slope in lines.values())
        costs = {
            (choice, overlap): self._seconds(choice, overlap, lines, step) * self._steps(choice, overlap)
            for choice in CHOICES
            for overlap in range(self.options.reach + 1)
        }
        best = min(costs, key=lambda one: costs[one])
        present = next((one for one in costs if self._is_now(*one)), None)
        if present is not None and costs[best] > _BETTER * costs[present]:
            best = present
        choice, overlap = best
        round_ = max(delay + slope * self._nbytes(choice) for delay, slope in lines.values())
        seconds = self._seconds(choice, overlap, lines, step)
        line = f", on a line of {show_bit_s(8 / slope)}" if slope > 0 else ""
        late = f"results {overlap} steps late" if overlap else "waiting for each result"
        why = (
            f"a gradient and its mean take {round_:.3f} s at {choice.bits:.0f} bits{line}; a step takes {step:.3f} s: "
            f"with {late} {seconds:.3f} s, for an estimated {100 * (self._steps(choice, overlap) - 1):.0f} % more steps"
        )
        return Decision(SyncSchedule(1, overlap, choice.codec), choice.codec, why)

    def _is_now(self, choice: Choice, overlap: int) -> bool:
        return (choice.codec, overlap) == (self.now.schedule.up, self.now.schedule.overlap)

    def _seconds(self, choice: Choice, overlap: int, lines: Mapping[str, tuple[float, float]], step: float) -> float:
        """Seconds of a step of the whole run."""
        nbytes = self._nbytes(choice)
        coding = 0.0 if choice.bits >= 32 else 8 * self.numel / self.codec_bytes_s
        round_ = max(delay + slope * nbytes for delay, slope in lines.values()) + coding
        busy = max(slope * nbytes / 2 for _, slope in lines.values())  # both directions are used at a time
        return max(step, busy, (step + round_) / (overlap + 1))

    def _steps(self, choice: Choice, overlap: int) -> float:
        """The steps of a run to the same loss, as a multiple of those with exact gradients that are waited for."""
        return (1 + choice.price) * (1 + self.options.late * self.share * overlap**2)

    def _nbytes(self, choice: Choice) -> float:
        """Bytes of a push and its result."""
        return 2 * self.numel * choice.bits / 8

    def state(self) -> dict[str, Tensor]:
        """The measurements and the decision in force, for a checkpoint."""
        found = {
            "now": self.now.to_tensor(),
            "probes": torch.tensor([self.probes, int(self.decided)]),
            "rate": torch.tensor([self.peak, self.share], dtype=torch.float64),
        }
        return found | self.measured.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self.now = Decision.from_tensor(state["now"])
        self.probes, self.decided = int(state["probes"][0]), bool(state["probes"][1])
        self.peak, self.share = (float(number) for number in state["rate"])
        self.measured.load(state)
