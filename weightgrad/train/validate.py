"""The simulator kept honest: a recipe in both worlds, side by side.

Both run the same recipe, seed and strategy. The simulator is told what this machine's processes cost besides
computing and the network (`step_overhead` of each strategy, `message_overhead`), measured once over links that are
not in the way; everything else is its own prediction.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from weightgrad import ledger
from weightgrad.emulate.network import Network
from weightgrad.errors import RunError
from weightgrad.train import emulated
from weightgrad.train.recipe import Recipe
from weightgrad.train.run import simulate

_FREE = ("links.{}.bandwidth=2 Gbit/s", "links.{}.delay=5 ms")  # without any delay all processes would work at once
_WARM = 0.2  # of the steps are not counted: connections are opened, processes find their pace


@dataclass(frozen=True)
class Clockwork:
    """What a ledger says about time, and what it says was sent."""

    step_s: float
    round_s: float
    waiting_s: float  # of a site, a step
    bytes: tuple[tuple[int, int], ...]  # up and down, of every round


@dataclass(frozen=True)
class Comparison:
    """One strategy over one kind of link, in both worlds."""

    strategy: str
    mbit_s: float
    rtt_ms: float
    simulated_step_s: float
    emulated_step_s: float
    relative_error: float
    simulated_round_s: float
    emulated_round_s: float
    simulated_waiting_s: float
    emulated_waiting_s: float
    bytes_equal: bool
    bases_equal: bool
    trusted: bool
    verdict: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def clockwork(directory: Path, sites: Sequence[str]) -> Clockwork:
    """Of a finished run of either world."""
    book = ledger.read(directory / "ledger.jsonl")
    steps: dict[str, list[float]] = {}
    count = 1
    for name in sites:
        own = directory / "state" / name / "ledger.jsonl"
        lines = ledger.read(own) if own.exists() else book
        times = [entry["t"] for entry in lines if entry["kind"] == "step" and entry["site"] == name]
        # A process writes a step down after it has waited for the WAN, the simulator before: so one step later.
        first, count = int(_WARM * len(times)), max(count, len(times))
        steps[name] = times[first - 1 : -1] if own.exists() and first else times[first:]
    rounds = [entry for entry in book if entry["kind"] == "round"]
    ends = [entry for entry in book if entry["kind"] == "site"]
    return Clockwork(
        step_s=max(_mean_gap(times) for times in steps.values()),
        round_s=_mean_gap([entry["t"] for entry in rounds[int(_WARM * len(rounds)) : -1]]),
        waiting_s=statistics.fmean(entry["waiting_seconds"] for entry in ends) / count,
        bytes=tuple((entry["up_bytes"], entry["down_bytes"]) for entry in rounds),
    )


def _mean_gap(times: list[float]) -> float:
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0


def same_base(one: Path, other: Path) -> bool:
    """Whether two runs ended with the same bits."""
    first, second = (load_file(str(run / "base.safetensors")) for run in (one, other))
    names = {name for name in first if not name.startswith("quantized.")}
    return names == {name for name in second if not name.startswith("quantized.")} and all(
        torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in names
    )


@dataclass
class Validation:
    """Runs both worlds; `kind` and `delay` choose the emulator."""

    recipe: Recipe
    out: Path
    kind: str = "auto"
    delay: str = "auto"
    say: Callable[[str], None] = lambda line: None

    def calibrated(self) -> Recipe:
        """The recipe with this machine's overheads, and with passes that its processes can keep up with."""
        recipe = self._free(self.recipe)
        late, seconds = 1.0, _seconds_per_step(recipe)
        for _ in range(5):
            quiet = recipe.with_settings([f"compute.seconds_per_step={seconds:.4f}", "strategy=baseline"])
            summary, _ = self._emulated(quiet, self.out / "calibration-baseline")
            late = summary["late_steps"]
            if late <= 0.02:
                break
            self.say(f"{late:.0%} of the passes took longer than {1e3 * seconds:.0f} ms: trying half as much again")
            seconds *= 1.5
        else:
            raise RunError(f"this machine cannot keep up: {late:.0%} of the passes were late at {seconds:.3f} s a step")
        # Rounds that cost next to nothing, and hardly any of them: what is left is the step itself.
        step = self._beyond(quiet.with_settings(["strategy={name: diloco, every: 1000000}"]), "calibration-silent")
        # Small messages: what large ones cost besides hides behind a slow link.
        small = ["strategy={name: qsgd, codec: qsgd(bits=2)}", f"compute.step_overhead={step:.6f}"]
        rest = self._beyond(quiet.with_settings(small), "calibration-messages")
        # Four in a row: the site sends, the server receives and sends, the site receives.
        message = rest / 4
        self.say(
            f"on this machine: passes of {1e3 * seconds:.1f} ms, {1e3 * step:.2f} ms more a step, "
            f"{1e3 * message:.2f} ms a message sent or received"
        )
        overheads = [f"compute.step_overhead={step:.6f}", f"compute.message_overhead={message:.6f}"]
        return self.recipe.with_settings([f"compute.seconds_per_step={seconds:.4f}", *overheads])

    def fitted(self, recipe: Recipe, place: str) -> Recipe:
        """The recipe with what a step of its own strategy costs here besides: codecs in Python, several processes."""
        step = self._beyond(self._free(recipe).with_settings(["compute.step_overhead=0"]), f"calibration-{place}")
        self.say(f"{place}: {1e3 * step:.2f} ms more a step")
        return recipe.with_settings([f"compute.step_overhead={step:.6f}"])

    def _beyond(self, recipe: Recipe, place: str) -> float:
        """Seconds a step takes more than the simulator thinks, by the better of two: nothing makes one too fast."""
        real = min(self._emulated(recipe, self.out / place)[1].step_s for _ in range(2))
        return max(0.0, real - self._simulated(recipe, f"{place}-simulated").step_s)

    def compare(self, recipe: Recipe, label: str, place: str) -> Comparison:
        """One recipe in both worlds."""
        summary, real = self._emulated(recipe, self.out / place / "emulated")
        return self._compared(recipe, label, place, summary, real)

    def again(self) -> list[Comparison]:
        """What was emulated in `out` before, in the order of that, beside what the simulator says of it now."""
        found = []
        for path in sorted(self.out.glob("*/emulated/summary.json"), key=lambda path: path.stat().st_mtime):
            place = path.parents[1].name
            recipe = Recipe.load(path.parents[1] / "simulated" / "recipe.yaml")
            real = clockwork(path.parent, self._names(recipe))
            found.append(
                self._compared(recipe, recipe.strategy.name, place, json.loads(path.read_text(encoding="utf-8")), real)
            )
        if not found:
            raise RunError(f"nothing was emulated in {self.out} yet; run `weightgrad validate` without --again first")
        return found

    def _compared(self, recipe: Recipe, label: str, place: str, summary: dict[str, Any], real: Clockwork) -> Comparison:
        directory = self.out / place
        predicted = self._simulated(recipe, f"{place}/simulated")
        near = [x for x in recipe.link_list if recipe.server.name in x.between]
        return Comparison(
            strategy=label,
            mbit_s=min(x.least_bit_s for x in near) / 1e6,
            rtt_ms=2e3 * max(x.delay_seconds for x in near),
            simulated_step_s=predicted.step_s,
            emulated_step_s=real.step_s,
            relative_error=predicted.step_s / real.step_s - 1,
            simulated_round_s=predicted.round_s,
            emulated_round_s=real.round_s,
            simulated_waiting_s=predicted.waiting_s,
            emulated_waiting_s=real.waiting_s,
            bytes_equal=predicted.bytes == real.bytes,
            bases_equal=same_base(directory / "simulated", directory / "emulated"),
            trusted=summary["emulated"]["trusted"],
            verdict=summary["emulated"]["verdict"],
        )

    def _free(self, recipe: Recipe) -> Recipe:
        return recipe.with_settings([text.format(n) for n in range(len(recipe.links)) for text in _FREE])

    def _names(self, recipe: Recipe) -> list[str]:
        return [site.name for site in recipe.site_list]

    def _simulated(self, recipe: Recipe, place: str) -> Clockwork:
        simulate(recipe, self.out / place)
        return clockwork(self.out / place, self._names(recipe))

    def _emulated(self, recipe: Recipe, directory: Path) -> tuple[dict[str, Any], Clockwork]:
        with self._network(recipe) as wan:
            wan.check()
            summary = emulated.emulate(recipe, directory, wan)
        return summary, clockwork(directory, self._names(recipe))

    def _network(self, recipe: Recipe) -> Network:
        return emulated.network(recipe, kind=self.kind, delay=self.delay)


@dataclass(frozen=True)
class Foretold:
    """What the simulator said about a run that has been emulated."""

    simulated: Clockwork
    emulated: Clockwork
    bases_equal: bool


def foretold(recipe: Recipe, directory: Path) -> Foretold:
    """Simulate what was emulated in `directory`."""
    names = [site.name for site in recipe.site_list]
    simulate(recipe, directory / "simulated")
    return Foretold(
        clockwork(directory / "simulated", names),
        clockwork(directory, names),
        same_base(directory / "simulated", directory),
    )


def _seconds_per_step(recipe: Recipe) -> float:
    seconds = recipe.compute.seconds_per_step
    return 0.02 if isinstance(seconds, str) else float(seconds)


def at(recipe: Recipe, mbit_s: float, rtt_ms: float) -> Recipe:
    """The recipe with every link at that speed and round trip."""
    changes = [
        (f"links.{n}.bandwidth={mbit_s} Mbit/s", f"links.{n}.delay={rtt_ms / 2} ms") for n in range(len(recipe.links))
    ]
    return recipe.with_settings([text for pair in changes for text in pair])
