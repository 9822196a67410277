"""Validation of the simulator: the same recipe simulated and emulated, side by side.

Both use the same recipe, seed and strategy. The simulator is given what this machine's processes cost apart from
compute and network (`step_overhead` of each strategy, and `message_overhead`), measured once over links so fast that
they do not matter; everything else is its own prediction.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from weightgrad import event_log
from weightgrad.errors import RunError
from weightgrad.lab.emulate.network import Network
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run import emulation
from weightgrad.lab.run.model_file import read_global_model
from weightgrad.lab.run.simulation import simulate

_FAST = (
    "links.{}.bandwidth=2 Gbit/s",
    "links.{}.delay=5 ms",
)  # with no delay at all, all processes would be busy at the same time
_WARM = 0.2  # of the steps are not counted: connections open and caches fill


@dataclass(frozen=True)
class RunTiming:
    """Times and traffic of a run, read from its event logs.

    Attributes:
        step_s: Mean duration of a step, of the slowest site.
        round_s: Mean time between two rounds.
        waiting_s: Mean waiting of a site in a step.
        bytes: Bytes of pushes and of results, for every round.
        lan_bytes: Bytes that the workers of each site sent one another, in the order of the sites.
    """

    step_s: float
    round_s: float
    waiting_s: float
    bytes: tuple[tuple[int, int], ...]
    lan_bytes: tuple[int, ...] = ()


@dataclass(frozen=True)
class ValidationResult:
    """One strategy over one kind of link, simulated and emulated.

    `workers` are those of each site. Of `lan_bytes`, all sites together, what processes tell one another about their
    work is not a part.
    """

    strategy: str
    workers: tuple[int, ...]
    mbit_s: float
    rtt_ms: float
    simulated_step_s: float
    emulated_step_s: float
    relative_error: float
    simulated_round_s: float
    emulated_round_s: float
    simulated_waiting_s: float
    emulated_waiting_s: float
    simulated_lan_bytes: int
    emulated_lan_bytes: int
    bytes_equal: bool
    lan_bytes_equal: bool
    models_equal: bool
    trusted: bool
    verdict: str

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values, for JSON."""
        return asdict(self)


def measure_timing(directory: Path, sites: Sequence[str]) -> RunTiming:
    """Read the timing of a finished run, simulated or emulated."""
    events = event_log.read(directory / "events.jsonl")
    steps: dict[str, list[float]] = {}
    count = 1
    for name in sites:
        own = directory / "state" / name / "events.jsonl"
        lines = event_log.read(own) if own.exists() else events
        times = [entry["t"] for entry in lines if entry["kind"] == "step" and entry["site"] == name]
        # A process records a step after it has waited for the WAN, the simulator before: hence the shift by one step.
        first, count = int(_WARM * len(times)), max(count, len(times))
        steps[name] = times[first - 1 : -1] if own.exists() and first else times[first:]
    rounds = [entry for entry in events if entry["kind"] == "round"]
    ends = [entry for entry in events if entry["kind"] == "site"]
    return RunTiming(
        step_s=max(_mean_gap(times) for times in steps.values()),
        round_s=_mean_gap([entry["t"] for entry in rounds[int(_WARM * len(rounds)) : -1]]),
        waiting_s=statistics.fmean(entry["waiting_seconds"] for entry in ends) / count,
        bytes=tuple((entry["up_bytes"], entry["down_bytes"]) for entry in rounds),
        lan_bytes=tuple(entry.get("lan_bytes", 0) for name in sites for entry in ends if entry["site"] == name),
    )


def _mean_gap(times: list[float]) -> float:
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0


def same_model(one: Path, other: Path) -> bool:
    """Whether two runs ended with the same global model, bit for bit."""
    first, second = (read_global_model(run) for run in (one, other))
    return first.keys() == second.keys() and all(
        torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in first
    )


@dataclass
class Validation:
    """Simulates and emulates a recipe; `kind` and `delay` are those of `open_wan`."""

    recipe: Recipe
    out: Path
    kind: str = "auto"
    delay: str = "auto"
    say: Callable[[str], None] = lambda line: None

    def calibrate(self) -> Recipe:
        """The recipe with this machine's overheads, and with compute times that its processes can keep.

        Raises:
            RunError: This machine is too slow.
        """
        recipe = self._with_fast_links(self.recipe)
        late, seconds = 1.0, _seconds_per_step(recipe)
        for _ in range(5):
            quiet = recipe.with_settings([f"compute.seconds_per_step={seconds:.4f}", "strategy=baseline"])
            summary, _ = self._emulated(quiet, self.out / "calibration-baseline")
            late = summary["late_steps"]
            if late <= 0.02:
                break
            self.say(
                f"{late:.0%} of the passes took longer than {1e3 * seconds:.0f} ms; trying {1.5e3 * seconds:.0f} ms"
            )
            seconds *= 1.5
        else:
            raise RunError(f"this machine is too slow: {late:.0%} of the passes took longer than {seconds:.3f} s")
        # Hardly any rounds: what is left is the overhead of the step itself.
        step = self._overhead(quiet.with_settings(["strategy={name: diloco, every: 1000000}"]), "calibration-silent")
        # Small messages: the overhead of large ones is hidden behind a slow link.
        small = ["strategy={name: qsgd, codec: qsgd(bits=2)}", f"compute.step_overhead={step:.6f}"]
        rest = self._overhead(quiet.with_settings(small), "calibration-messages")
        # Four of them in a round: the site sends, the server receives and sends, the site receives.
        message = rest / 4
        self.say(
            f"on this machine: passes of {1e3 * seconds:.1f} ms, overhead of {1e3 * step:.2f} ms for a step and "
            f"{1e3 * message:.2f} ms to send or receive a message"
        )
        overheads = [f"compute.step_overhead={step:.6f}", f"compute.message_overhead={message:.6f}"]
        return self.recipe.with_settings([f"compute.seconds_per_step={seconds:.4f}", *overheads])

    def fit(self, recipe: Recipe, place: str) -> Recipe:
        """The recipe with the overhead of a step of its own strategy on this machine."""
        step = self._overhead(
            self._with_fast_links(recipe).with_settings(["compute.step_overhead=0"]), f"calibration-{place}"
        )
        self.say(f"{place}: overhead of {1e3 * step:.2f} ms for a step")
        return recipe.with_settings([f"compute.step_overhead={step:.6f}"])

    def _overhead(self, recipe: Recipe, place: str) -> float:
        """Seconds by which a step takes longer than simulated: the smaller of two measurements."""
        real = min(self._emulated(recipe, self.out / place)[1].step_s for _ in range(2))
        return max(0.0, real - self._simulated(recipe, f"{place}-simulated").step_s)

    def compare(self, recipe: Recipe, label: str, place: str) -> ValidationResult:
        """Emulate and simulate one recipe."""
        summary, real = self._emulated(recipe, self.out / place / "emulated")
        return self._compared(recipe, label, place, summary, real)

    def resimulate(self) -> list[ValidationResult]:
        """Simulate again what was emulated in `out` before, in the same order.

        Raises:
            RunError: Nothing was emulated there.
        """
        found = []
        for path in sorted(self.out.glob("*/emulated/summary.json"), key=lambda path: path.stat().st_mtime):
            place = path.parents[1].name
            recipe = Recipe.load(path.parents[1] / "simulated" / "recipe.yaml")
            real = measure_timing(path.parent, self._names(recipe))
            found.append(
                self._compared(recipe, recipe.strategy.name, place, json.loads(path.read_text(encoding="utf-8")), real)
            )
        if not found:
            raise RunError(f"nothing was emulated in {self.out} yet; run `weightgrad validate` without --again first")
        return found

    def _compared(
        self, recipe: Recipe, label: str, place: str, summary: dict[str, Any], real: RunTiming
    ) -> ValidationResult:
        directory = self.out / place
        predicted = self._simulated(recipe, f"{place}/simulated")
        near = [x for x in recipe.link_list if recipe.server.name in x.between]
        return ValidationResult(
            strategy=label,
            workers=tuple(site.workers for site in recipe.site_list),
            mbit_s=min(x.least_bit_s for x in near) / 1e6,
            rtt_ms=2e3 * max(x.delay_seconds for x in near),
            simulated_step_s=predicted.step_s,
            emulated_step_s=real.step_s,
            relative_error=predicted.step_s / real.step_s - 1,
            simulated_round_s=predicted.round_s,
            emulated_round_s=real.round_s,
            simulated_waiting_s=predicted.waiting_s,
            emulated_waiting_s=real.waiting_s,
            simulated_lan_bytes=sum(predicted.lan_bytes),
            emulated_lan_bytes=sum(real.lan_bytes),
            bytes_equal=predicted.bytes == real.bytes,
            lan_bytes_equal=predicted.lan_bytes == real.lan_bytes,
            models_equal=same_model(directory / "simulated", directory / "emulated"),
            trusted=summary["emulated"]["trusted"],
            verdict=summary["emulated"]["verdict"],
        )

    def _with_fast_links(self, recipe: Recipe) -> Recipe:
        return recipe.with_settings([text.format(n) for n in range(len(recipe.links)) for text in _FAST])

    def _names(self, recipe: Recipe) -> list[str]:
        return [site.name for site in recipe.site_list]

    def _simulated(self, recipe: Recipe, place: str) -> RunTiming:
        simulate(recipe, self.out / place)
        return measure_timing(self.out / place, self._names(recipe))

    def _emulated(self, recipe: Recipe, directory: Path) -> tuple[dict[str, Any], RunTiming]:
        with self._network(recipe) as wan:
            wan.check()
            summary = emulation.emulate(recipe, directory, wan)
        return summary, measure_timing(directory, self._names(recipe))

    def _network(self, recipe: Recipe) -> Network:
        return emulation.network(recipe, kind=self.kind, delay=self.delay)


@dataclass(frozen=True)
class Prediction:
    """The timing that the simulator predicted for a run, and the timing that was measured."""

    simulated: RunTiming
    emulated: RunTiming
    models_equal: bool


def check_prediction(recipe: Recipe, directory: Path) -> Prediction:
    """Simulate a recipe that was emulated in `directory`, and compare."""
    names = [site.name for site in recipe.site_list]
    simulate(recipe, directory / "simulated")
    return Prediction(
        measure_timing(directory / "simulated", names),
        measure_timing(directory, names),
        same_model(directory / "simulated", directory),
    )


def _seconds_per_step(recipe: Recipe) -> float:
    seconds = recipe.compute.seconds_per_step
    return 0.02 if isinstance(seconds, str) else float(seconds)


def with_links(recipe: Recipe, mbit_s: float, rtt_ms: float) -> Recipe:
    """The recipe with every link at this rate and round trip."""
    changes = [
        (f"links.{n}.bandwidth={mbit_s} Mbit/s", f"links.{n}.delay={rtt_ms / 2} ms") for n in range(len(recipe.links))
    ]
    return recipe.with_settings([text for pair in changes for text in pair])


def with_workers(recipe: Recipe, workers: int) -> Recipe:
    """The recipe with so many workers at every site."""
    return recipe.with_settings([f"sites.{n}.workers={workers}" for n in range(len(recipe.sites))])
