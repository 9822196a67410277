"""Chaos tests in the simulator: random faults, and a conservation audit of every update.

Half of the seeds give up on sites that are away for long (`t_global` of a few rounds), unless the recipe says how long
to wait. The other half waits for every site, and must end with the same bits as a run without faults.
"""

from __future__ import annotations

import dataclasses
import math
import random
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from weightgrad.core.random_streams import RunStream
from weightgrad.errors import RunError
from weightgrad.event_log import EventLog, read
from weightgrad.kernels.noise import derive
from weightgrad.lab.chaos.random_faults import fault_text, random_conditions, random_faults
from weightgrad.lab.chaos.verdict import Verdict, is_deterministic, worst_resume, worst_stall
from weightgrad.lab.recipes import expansion
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.simulation import chosen_strategy, simulation_plan
from weightgrad.lab.run.task import Training
from weightgrad.lab.sim.conservation import AuditResult, ConservationAudit
from weightgrad.lab.sim.plan import Fault, SimulationPlan
from weightgrad.lab.sim.simulator import Simulator
from weightgrad.lab.sim.task import Task
from weightgrad.units import show_seconds

_ALWAYS = ("faults=[]", "strategy.t_global=null", "training.evaluate_every=1000000000")
_TRIES, _SHORTER = 8, 0.7  # to fit all faults into a run that they make shorter
_TIMEOUT = 20  # horizons after which a run counts as stuck


@dataclass(frozen=True)
class UndisturbedRun:
    """The result of the same run without faults."""

    seconds: float
    round_s: float
    version: int
    digest: str  # of the global model


@dataclass
class SimulatedChaos:
    """Chaos tests of one recipe with any seed; runs without faults are kept by their conditions."""

    recipe: Recipe
    task: Task
    _undisturbed_runs: dict[tuple[str, ...], UndisturbedRun] = field(default_factory=dict)

    @staticmethod
    def of(recipe: Recipe) -> SimulatedChaos:
        """For a recipe and its own task; hardly any time is spent on evaluation."""
        torch.set_num_threads(1)  # the same sums as in a worker process, and faster with small batches
        chosen_strategy(recipe)  # report its mistakes first: loading data may take a while
        return SimulatedChaos(recipe, Training(recipe.with_settings(["training.evaluate_on=1"])))

    def run(
        self, seed: int, events: int, *, out: Path | None = None, say: Callable[[str], None] | None = None
    ) -> Verdict:
        """Run one schedule.

        Args:
            seed: Decides conditions and faults.
            events: Number of faults.
            out: Where to leave the event log; None means nowhere.
            say: Called with one line for every fault.
        """
        with tempfile.TemporaryDirectory() as place:
            directory = out or Path(place)
            directory.mkdir(parents=True, exist_ok=True)
            return self._run(seed, events, directory, say)

    def _run(self, seed: int, events: int, out: Path, say: Callable[[str], None] | None) -> Verdict:
        conditions = random_conditions(self.recipe, seed)
        settings = tuple(setting for condition in conditions for setting in condition.settings)
        plan = simulation_plan(self.recipe.with_settings([*settings, *_ALWAYS]), self.task)
        if settings not in self._undisturbed_runs:
            self._undisturbed_runs[settings] = self._undisturbed(plan, out)
        undisturbed = self._undisturbed_runs[settings]
        t_global = self._t_global(seed, undisturbed)
        about = [condition.about for condition in conditions]
        if t_global is not None:
            shown = t_global if isinstance(t_global, str) else show_seconds(round(t_global, 3))
            about.append(f"a site that is away for {shown} is given up")
        horizon = undisturbed.seconds
        for _ in range(_TRIES):
            lines: list[str] = []
            faults = random_faults(self.recipe, seed, events, horizon)
            found = self._verdict(_with(plan, t_global, faults), faults, undisturbed, out, lines)
            horizon *= _SHORTER
            if found.events == events or not found.good:
                break  # otherwise the run ended before the last fault, e.g. because a slow site was given up
        if say is not None:
            for line in lines:
                say(line)
        return dataclasses.replace(found, seed=seed, strategy=plan.strategy.name, conditions=about)

    def _t_global(self, seed: int, undisturbed: UndisturbedRun) -> float | str | None:
        if "t_global" in self.recipe.strategy.overrides:
            found: float | str | None = self.recipe.strategy.overrides["t_global"]
            return found
        draw = random.Random(derive(seed, RunStream.ROUND_DEADLINE))
        return draw.uniform(1.2, 6.0) * undisturbed.round_s if draw.random() < 0.5 else None

    def _undisturbed(self, plan: SimulationPlan, out: Path) -> UndisturbedRun:
        with EventLog(out / "undisturbed.jsonl", replace=True) as event_log_file:
            simulator = Simulator(plan, self.task, event_log_file)
            simulator.run()
        if simulator.status != "finished":
            raise RunError(
                f"{self.recipe.name}: even without faults its status is {simulator.status}; "
                "a chaos test needs a recipe that works"
            )
        global_model = simulator.server.global_model
        return UndisturbedRun(
            simulator.clock.now,
            simulator.clock.now / max(1, simulator.rounds),
            global_model.version,
            global_model.digest(),
        )

    def _verdict(
        self,
        plan: SimulationPlan,
        faults: Sequence[expansion.Fault],
        undisturbed: UndisturbedRun,
        out: Path,
        lines: list[str],
    ) -> Verdict:
        """Run with these faults; `lines` gets one line for each that begins."""
        samples = {place.name: self.task.samples(number) for number, place in enumerate(plan.sites)}
        audit = ConservationAudit(plan.strategy, samples, self.task.initial())
        struck: list[expansion.Fault] = []
        why = ""
        with EventLog(out / "events.jsonl", replace=True) as event_log_file:
            simulator = Simulator(plan, self.task, event_log_file, audit=audit)

            def begins(fault: expansion.Fault) -> None:
                struck.append(fault)
                lines.append(f"{show_seconds(round(fault.at_seconds, 3))}: {fault_text(fault)}")

            def give_up() -> None:
                raise RunError(f"it has not finished after {show_seconds(round(simulator.clock.now, 1))}")

            for fault in faults:
                after = math.nextafter(fault.at_seconds, math.inf)  # after the simulator has begun it
                simulator.clock.at(after, lambda fault=fault: begins(fault))  # type: ignore[misc]
            lasting = sum(fault.for_seconds or 0.0 for fault in faults)
            simulator.clock.at(_TIMEOUT * undisturbed.seconds + lasting, give_up)
            try:
                simulator.run()
            except RunError as error:
                why = str(error)
        if not why and simulator.status != "finished":
            why = f"the run ended as {simulator.status}"
        rounds = [entry["t"] for entry in read(out / "events.jsonl") if entry["kind"] == "round"]
        return verdict_of(simulator, audit.result(simulator.sites, simulator.server), undisturbed, struck, rounds, why)


def verdict_of(
    simulator: Simulator,
    audit: AuditResult,
    undisturbed: UndisturbedRun,
    struck: Sequence[expansion.Fault],
    rounds: Sequence[float],
    why: str,
) -> Verdict:
    """The verdict on a simulated run that has ended."""
    global_model, complaints = simulator.server.global_model, [why] if why else []
    complaints += [f"the sums of {name} do not add up" for name in audit.unbalanced]
    complaints += [f"the push of {site} for round {number} is lost" for site, number in audit.lost[:3]]
    complaints += [f"the push of {site} for round {number} was applied twice" for site, number in audit.twice[:3]]
    other = [
        s.place.name
        for s in simulator.sites
        if (s.state.version, s.state.digest()) != (global_model.version, global_model.digest())
    ]
    complaints += [f"{name} has another global model than the server" for name in other]
    identical = None
    if is_deterministic(simulator.plan.strategy) and not simulator.plan.absent:
        identical = (global_model.version, global_model.digest()) == (undisturbed.version, undisturbed.digest)
        complaints += [] if identical else ["the global model is not that of a run without faults"]
    return Verdict(
        events=len(struck),
        updates_lost=len(audit.lost) + len(audit.unbalanced),
        models_equal=not other and identical is not False,
        worst_resume_s=worst_resume([f.at_seconds + (f.for_seconds or 0.0) for f in struck], rounds),
        worst_stall_s=worst_stall(rounds),
        updates=audit.pushes,
        updates_twice=len(audit.twice),
        rounds=len(rounds),
        environment="simulated",
        identical=identical,
        why="; ".join(complaints),
    )


def _with(plan: SimulationPlan, t_global: float | str | None, faults: Sequence[expansion.Fault]) -> SimulationPlan:
    return dataclasses.replace(
        plan,
        strategy=dataclasses.replace(plan.strategy, t_global=t_global),
        faults=tuple(_simulator_fault(fault) for fault in faults),
        absent=frozenset(fault.where[0] for fault in faults if fault.what == "join"),
    )


def _simulator_fault(fault: expansion.Fault) -> Fault:
    """As a fault of the simulator, in which a site or a server dies as a whole and returns as it was."""
    parts = fault.what in ("kill-worker", "resize")
    what, where = ("kill", fault.where[:1]) if parts else (fault.what, fault.where)
    return Fault(fault.at_seconds, what, where, fault.for_seconds, fault.factor or 0.0, fault.period_seconds or 1.0)


def replay(recipe: str, seed: int, events: int, *options: str) -> str:
    """The command that repeats a chaos test."""
    return shlex.join(["weightgrad", "chaos", recipe, "--seed", str(seed), "--events", str(events), *options])
