"""What the tables of a plan have in common, in a terminal and on a page: its title, and the rows of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weightgrad.lab.plan.operations import PHASES
from weightgrad.lab.plan.plan import Plan, StrategyPlan
from weightgrad.lab.plan.step_times import PASS
from weightgrad.units import show_seconds


def title(plan: Plan) -> str:
    """The model and the run in a few words."""
    scenario = plan.scenario
    return (
        f"{scenario.layout.numel:,} parameters, {scenario.batch:,} samples a step over "
        f"{_count(scenario.workers, 'worker')} in {_count(len(scenario.sites), 'site')}, "
        f"{_count(scenario.steps, 'step')}"
    )


@dataclass(frozen=True)
class StepRow:
    """A layer, or neighbours that are alike; `flops` are of one, and `shown` says whether it does anything."""

    cells: list[str]
    flops: float
    shown: bool


def step_heads(plan: Plan) -> list[tuple[str, str]]:
    """The columns: above, and below."""
    alone = len(plan.kinds) == 1
    heads = [("", "layer"), ("", "parameters"), *((phase, "GFLOP") for phase in PASS)]
    return heads + [("a step" if alone else name, phase) for name, own in plan.kinds for phase in own.phases]


def step_rows(plan: Plan) -> list[StepRow]:
    """The layers in order."""
    cost, found = plan.cost, []
    for label, layer in cost.alike():
        cells = [label, f"{layer.parameters:,}"]
        cells += [f"{layer.work[phase].flops / 1e9:,.4g}" if phase in layer.work else "" for phase in PASS]
        for _, times in plan.kinds:
            cells += [show_seconds(seconds) if seconds else "" for seconds in times.of_layer(cost, layer).values()]
        flops = sum(work.flops for work in layer.work.values())
        shown = bool(layer.parameters) or any(work.flops or work.nbytes for work in layer.work.values())
        found.append(StepRow(cells, flops, shown))
    return found


def step_total(plan: Plan) -> list[str]:
    """The row of the whole model."""
    cells = ["all", f"{plan.scenario.layout.numel:,}", *(f"{plan.cost.work(p).flops / 1e9:,.4g}" for p in PASS)]
    return cells + [show_seconds(seconds) for _, own in plan.kinds for seconds in own.phases.values()]


def step_note(plan: Plan) -> str:
    """Where the times are from, and what they leave out."""
    alone = len(plan.kinds) == 1
    sources = [own.source if alone else f"{name} {own.source}" for name, own in plan.kinds]
    note = f"Times: {'; '.join(sources)}; a layer has its share by counted operations and bytes."
    if any(len(own.phases) < len(PHASES) for _, own in plan.kinds):
        note += " A recipe's time of a step is that of forward and backward."
    return note


def lost_notes(plan: Plan) -> Iterator[str]:
    """The strategies with which a run would go on without a site, as it waits only so long for its pushes."""
    for label, own in plan.strategies.items():
        if lost := own.prediction.lost:
            yield (
                f"{label}: {', '.join(lost)} would be lost, with pushes later than t_global ({_deadline(own)}) allows; "
                "the figures are those of a run that waits. Set t_global of the strategy to a longer time."
            )


def _deadline(own: StrategyPlan) -> str:
    strategy = own.prediction.strategy
    first = show_seconds(strategy.for_server().t_global or 0.0)
    return f"{strategy.t_global}, {first} at first" if isinstance(strategy.t_global, str) else first


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
