"""A plan as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weightgrad.lab.plan import plan_rows
from weightgrad.lab.plan.operations import PHASES
from weightgrad.lab.plan.plan import Plan, StrategyPlan
from weightgrad.lab.plan.prices import show_dollars
from weightgrad.units import show_bit_s, show_bytes, show_seconds

_LAYERS = 12  # that are shown; JSON has all
_WIDEST = 400


def show(plan: Plan, console: Console) -> None:
    """Print a plan."""
    scenario, cost = plan.scenario, plan.cost
    console.print(f"[bold]{escape(scenario.name)}[/]: {plan_rows.title(plan)}", soft_wrap=True)
    steps, memory, compared, links = (make(plan) for make in (_step_table, _memory_table, _strategy_table, _link_table))
    ranges = _range_table(plan)
    console.width = _wide_enough(console, steps, memory, compared, ranges, links)  # a cut table would say nothing
    console.print()
    console.print(steps)
    console.print(plan_rows.step_note(plan), markup=False)
    console.print()
    console.print(memory)
    for note in _memory_notes(plan):
        console.print(note, markup=False)
    console.print()
    console.print(compared)
    if ranges.row_count:
        console.print("* how much is sent depends on the data: an estimate (see --measure), which lies in:")
        console.print(ranges)
    for note in plan_rows.lost_notes(plan):
        console.print(note, markup=False, soft_wrap=True)
    console.print()
    console.print(links)
    console.print()
    flops = sum(cost.work(phase).flops for phase in PHASES)
    console.print(f"A worker's step is {flops:.3g} operations for {cost.batch} sample{'' if cost.batch == 1 else 's'}.")
    console.print(f"Take [bold]{escape(plan.chosen)}[/]: {escape(plan.why)}", soft_wrap=True)


def _wide_enough(console: Console, *tables: Table) -> int:
    options = console.options.update(width=_WIDEST)
    return max(console.width, *(console.measure(table, options=options).maximum for table in tables))


def _step_table(plan: Plan) -> Table:
    table = _table(*("\n".join(filter(None, head)) for head in plan_rows.step_heads(plan)))
    rows = [row for row in plan_rows.step_rows(plan) if row.shown]
    least = sorted((row.flops for row in rows), reverse=True)[:_LAYERS][-1]
    for row in [row for row in rows if row.flops >= least][:_LAYERS]:
        table.add_row(*map(escape, row.cells))
    table.add_row(*map(escape, plan_rows.step_total(plan)), style="bold")
    return table


def _memory_table(plan: Plan) -> Table:
    table = _table("a worker of", "parameters", "gradients", "optimizer", "activations", "peak", "fits")
    for column in ("host: kept", "host: peak"):
        table.add_column(column, justify="right", no_wrap=True)
    for label, own in plan.memory:
        fits = "" if own.fits is None else "yes" if own.fits else "NO"
        values = (own.parameters, own.gradients, own.optimizer, own.activations, own.device_peak)
        host = (own.host_kept, own.host_peak)
        table.add_row(escape(label), *map(show_bytes, values), fits, *map(show_bytes, host))
    return table


def _memory_notes(plan: Plan) -> Iterator[str]:
    chosen = plan.strategies[plan.chosen]
    yield (
        f"Host: what {plan.chosen} adds. The global server keeps {show_bytes(chosen.server_kept)}, at most "
        f"{show_bytes(chosen.server_peak)}."
    )
    for label, own in plan.memory:
        if own.fits is False:
            yield (
                f"{label}: {show_bytes(own.device_peak)} do not fit into "
                f"{show_bytes(plan.devices[own.site].memory_gb * 1e9)}; try --sharding fsdp2, --checkpointing, "
                "--dtype bfloat16, a smaller --batch, or more devices"
            )


def _strategy_table(plan: Plan) -> Table:
    table = _table("strategy", "a step", "x without WAN", "round every", "waiting a step", f"{plan.samples:,} samples")
    for column in ("WAN bytes", "a day", "dollars", "a day", "no gain above"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, own in plan.strategies.items():
        table.add_row(*map(escape, _strategy_row(plan, name, own)), style="bold" if name == plan.chosen else None)
    return table


def _strategy_row(plan: Plan, name: str, own: StrategyPlan) -> list[str]:
    del plan
    found = own.prediction
    waiting = max(link.waiting_seconds for link in found.links) / found.round_steps
    return [
        name + ("*" if own.by_data else ""),
        show_seconds(found.step_seconds),
        f"{found.slowdown:.2f}",
        f"{found.round_steps:.3g}",
        show_seconds(waiting),
        show_seconds(own.samples_seconds),
        show_bytes(found.wan_bytes),
        show_bytes(sum(link.up_day + link.down_day for link in found.links)),
        show_dollars(own.dollars),
        show_dollars(own.dollars_day),
        "" if own.crossover_bit_s is None else show_bit_s(own.crossover_bit_s),
    ]


def _range_table(plan: Plan) -> Table:
    table = _table("strategy", f"{plan.samples:,} samples", "WAN bytes")
    for name, own in plan.strategies.items():
        if own.data_range is not None:
            seconds, nbytes = own.samples_range, own.data_range.wan_bytes
            table.add_row(escape(name), " to ".join(map(show_seconds, seconds)), " to ".join(map(show_bytes, nbytes)))
    return table


def _link_table(plan: Plan) -> Table:
    table = _table(
        f"link to {plan.scenario.server}", "strategy", "up a round", "down a round", "up a day", "down a day"
    )
    for column in ("exchange", "waiting", "hidden"):
        table.add_column(column, justify="right", no_wrap=True)
    for label, site in plan.alike:
        for name, own in plan.strategies.items():
            link = next(one for one in own.prediction.links if one.site == site.name)
            table.add_row(
                escape(label),
                escape(name),
                *map(show_bytes, (link.up_round, link.down_round, link.up_day, link.down_day)),
                show_seconds(link.transfer_seconds),
                show_seconds(link.waiting_seconds),
                f"{100 * link.hidden:.0f} %",
            )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        side, style = ("right", None) if number else ("left", "bold")
        table.add_column(escape(column), justify=side, style=style, no_wrap=True)  # type: ignore[arg-type]
    return table
