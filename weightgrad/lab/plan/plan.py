"""The plan of a run: the model's cost, and what every strategy would take, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from weightgrad.core.controller.decision import Decision
from weightgrad.core.strategies import Strategy
from weightgrad.errors import PlanError, ProtocolError
from weightgrad.lab.plan.data_range import DataRange, depends_on_data, range_of
from weightgrad.lab.plan.decision import auto_decision
from weightgrad.lab.plan.devices import Device
from weightgrad.lab.plan.memory import WorkerMemory, server_bytes, worker_memory
from weightgrad.lab.plan.model_cost import ModelCost
from weightgrad.lab.plan.operations import PHASES
from weightgrad.lab.plan.prediction import Prediction, crossover_bit_s, predict
from weightgrad.lab.plan.prices import Prices
from weightgrad.lab.plan.scenario import Scenario
from weightgrad.lab.plan.step_times import StepTimes
from weightgrad.lab.sim.plan import SiteSpec
from weightgrad.lab.sim.task import Task
from weightgrad.units import show_bytes, show_seconds


@dataclass(frozen=True)
class StrategyPlan:
    """One strategy in a scenario.

    Attributes:
        prediction: time and bytes.
        memory: of one worker of each site.
        server_kept: bytes that the global server keeps.
        server_peak: the most it has.
        dollars: what the traffic of the whole run costs.
        dollars_day: what that of a day costs.
        crossover_bit_s: the bandwidth above which float32 would be faster than the codecs; None: nothing is encoded.
        samples_seconds: the time to the samples that were asked for.
        by_data: whether how much is sent depends on the data, which a stand-in does not know.
        data_range: the least and the most bytes and seconds of the run with gradients of other kinds; None: neither
            depends on the data.
    """

    prediction: Prediction
    memory: tuple[WorkerMemory, ...]
    server_kept: float
    server_peak: float
    dollars: float
    dollars_day: float
    crossover_bit_s: float | None
    samples_seconds: float
    by_data: bool
    data_range: DataRange | None = None

    @property
    def wan_text(self) -> str:
        """The WAN bytes of the run for a reader, with the ends of their range where they depend on the data."""
        found = show_bytes(self.prediction.wan_bytes)
        if self.data_range is None:
            return found
        return f"{found} ({' to '.join(map(show_bytes, self.data_range.wan_bytes))})"

    @property
    def samples_range(self) -> tuple[float, ...]:
        """Between what the time to the samples lies where it depends on the data."""
        share = self.samples_seconds / self.prediction.seconds if self.prediction.seconds else 1.0
        return tuple(share * own for own in self.data_range.seconds) if self.data_range is not None else ()

    @property
    def time_text(self) -> str:
        """The time to the samples for a reader, with its range where it depends on the data."""
        found = show_seconds(self.samples_seconds)
        return f"{found} ({' to '.join(map(show_seconds, self.samples_range))})" if self.data_range else found


@dataclass(frozen=True)
class Plan:
    """Everything that `weightgrad plan` says.

    Attributes:
        scenario: what was planned.
        cost: of one worker's step; None where the model's inputs are not known.
        times: of a worker's step, by the name of a site.
        devices: of each site, by name, where it is known.
        samples: how many samples the run is to see.
        strategies: every strategy, by name.
        decision: what `auto` would decide, and why.
        measured: whether a real step was measured on this machine.
    """

    scenario: Scenario
    cost: ModelCost
    times: Mapping[str, StepTimes]
    devices: Mapping[str, Device]
    samples: int
    strategies: Mapping[str, StrategyPlan]
    decision: Decision
    measured: bool = False

    @property
    def kinds(self) -> list[tuple[str, StepTimes]]:
        """The kinds of workers: a site that has such, and how long its steps take."""
        found: list[tuple[str, StepTimes]] = []
        for site in self.scenario.sites:
            own = self.times[site.name]
            if all(own != other for _, other in found):
                found.append((site.name, own))
        return found

    @property
    def alike(self) -> list[tuple[str, SiteSpec]]:
        """The sites; neighbours that differ in their names only are one, with the names of both ends."""
        found: list[tuple[str, SiteSpec]] = []
        for site in self.scenario.sites:
            if found and self._kind(found[-1][1]) == self._kind(site):
                first = found[-1][0].removeprefix("each of ").partition(" to ")[0]
                found[-1] = (f"each of {first} to {site.name}", found[-1][1])
            else:
                found.append((site.name, site))
        return found

    @property
    def memory(self) -> list[tuple[str, WorkerMemory]]:
        """The memory of a worker of each kind of site, with the strategy to take."""
        by_site = {own.site: own for own in self.strategies[self.chosen].memory}
        return [(label, by_site[site.name]) for label, site in self.alike]

    def _kind(self, site: SiteSpec) -> tuple[object, ...]:
        link = replace(self.scenario.link_of(site.name), between=("", ""))
        rates = self.scenario.rates(site.name)
        return replace(site, name=""), link, rates, id(self.devices.get(site.name)), site.compute.stragglers

    @property
    def chosen(self) -> str:
        """The strategy to take: `auto`, if it is planned; otherwise the fastest."""
        if "auto" in self.strategies:
            return "auto"
        return min(self.strategies, key=lambda name: self.strategies[name].prediction.step_seconds)

    @property
    def why(self) -> str:
        """Why."""
        if self.chosen != "auto":
            return "the shortest step of those that were planned"
        schedule = self.decision.schedule
        every = "every step" if schedule.every == 1 else f"every {schedule.every} steps"
        down = "the others' pushes" if self.decision.relayed else self.decision.down
        late = "a step late" if schedule.overlap == 1 else f"{schedule.overlap} steps late"
        return f"a round {every}, {schedule.up} up and {down} down, results {late}: {self.decision.why}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        scenario = self.scenario
        return {
            "name": scenario.name,
            "parameters": scenario.layout.numel,
            "batch": scenario.batch,
            "steps": scenario.steps,
            "samples": self.samples,
            "measured": self.measured,
            "sites": {
                site.name: {
                    "workers": site.workers,
                    "sharded": site.sharded,
                    "seconds_per_step": site.compute.seconds_per_step,
                }
                for site in scenario.sites
            },
            "step": {
                "flops": {phase: self.cost.work(phase).flops for phase in PHASES},
                "seconds": {name: dict(own.phases) for name, own in self.times.items()},
                "layers": [
                    {
                        "name": layer.name,
                        "parameters": layer.parameters,
                        "flops": {phase: work.flops for phase, work in layer.work.items()},
                        "bytes": {phase: work.nbytes for phase, work in layer.work.items()},
                        "seconds": {name: own.of_layer(self.cost, layer) for name, own in self.times.items()},
                    }
                    for layer in self.cost.layers
                ],
                "parameter_bytes": self.cost.parameter_bytes,
                "gradient_bytes": self.cost.gradient_bytes,
                "optimizer_bytes": self.cost.optimizer_bytes,
                "activation_bytes": self.cost.activation_bytes,
                "peak_bytes": self.cost.peak_bytes,
            },
            "chosen": {"strategy": self.chosen, "why": self.why},
            "strategies": {name: _strategy_dict(own) for name, own in self.strategies.items()},
        }


def _strategy_dict(own: StrategyPlan) -> dict[str, Any]:
    found = own.prediction
    return {
        "seconds": found.seconds,
        "step_seconds": found.step_seconds,
        "compute_seconds": found.compute_seconds,
        "steps_between_rounds": found.round_steps,
        "wan_bytes": found.wan_bytes,
        "samples_seconds": own.samples_seconds,
        "dollars": own.dollars,
        "dollars_day": own.dollars_day,
        "crossover_bit_s": own.crossover_bit_s,
        "depends_on_data": own.by_data,
        "wan_bytes_range": own.data_range.wan_bytes if own.data_range else None,
        "seconds_range": own.data_range.seconds if own.data_range else None,
        "schedule": found.schedule,
        "lost": found.lost,
        "links": [{**asdict(link), "hidden": link.hidden} for link in found.links],
        "workers": [asdict(memory) for memory in own.memory],
        "server": {"kept_bytes": own.server_kept, "peak_bytes": own.server_peak},
    }


def make_plan(
    scenario: Scenario,
    cost: ModelCost,
    strategies: Sequence[tuple[str, Strategy]],
    *,
    times: Mapping[str, StepTimes],
    devices: Mapping[str, Device],
    prices: Prices,
    samples: int | None = None,
    task: Task | None = None,
    overheads: Mapping[str, float] | None = None,
    watch: Callable[[str], None] = lambda name: None,
) -> Plan:
    """Plan some strategies.

    Args:
        scenario: what is planned.
        cost: of one worker's step.
        strategies: labels and strategies.
        times: of a worker's step, by the name of a site.
        devices: what the sites compute on, by the name of the site, where it is known.
        prices: of traffic.
        samples: what the time is asked for; None: those of the whole run.
        task: a real task to play through instead of a stand-in.
        overheads: seconds of a step besides compute, codecs and networks, by the label of a strategy; None: those of
            the scenario.
        watch: called with the label of each strategy before its turn.

    Raises:
        PlanError: a round would take years.
    """
    wanted = samples if samples is not None else scenario.steps * scenario.batch
    planned = {}
    for label, strategy in strategies:
        watch(label)
        own = replace(scenario, step_overhead=(overheads or {}).get(label, scenario.step_overhead))
        with _years(label):
            found = predict(own, strategy, task=task)
        kept, peak = server_bytes(scenario, found.strategy, found)
        memory = tuple(worker_memory(scenario, cost, found, site, devices.get(site.name)) for site in scenario.sites)
        up = {link.site: link for link in found.links}
        dollars = sum(
            prices.dollars(name, link.up_total) + prices.dollars(scenario.server, link.down_total)
            for name, link in up.items()
        )
        a_day = sum(
            prices.dollars(name, link.up_day) + prices.dollars(scenario.server, link.down_day)
            for name, link in up.items()
        )
        rest = max(0.0, wanted / scenario.batch - scenario.steps)
        share = min(1.0, wanted / (scenario.steps * scenario.batch))
        planned[label] = StrategyPlan(
            prediction=found,
            memory=memory,
            server_kept=kept,
            server_peak=peak,
            dollars=dollars,
            dollars_day=a_day,
            crossover_bit_s=crossover_bit_s(scenario, found.strategy, found),
            samples_seconds=share * found.seconds + rest * found.step_seconds,
            by_data=task is None and depends_on_data(found.strategy),
            data_range=range_of(own, strategy, found) if task is None else None,
        )
    first = planned.get("auto") or next(iter(planned.values()))
    with _years("auto"):
        decision = auto_decision(scenario, first.prediction.compute_seconds)
    return Plan(scenario, cost, times, devices, wanted, planned, decision, measured=task is not None)


@contextmanager
def _years(label: str) -> Iterator[None]:
    """A round that takes years makes reports that no server accepts: say so."""
    try:
        yield
    except ProtocolError as error:
        raise PlanError(f"{label} cannot be planned, the links are too slow for this model: {error}") from error
