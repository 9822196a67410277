"""A plan as one HTML file: tables, and the timeline of a round of every strategy, drawn to scale. It loads nothing."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from weightgrad.errors import PlanError
from weightgrad.lab.plan import plan_rows, timeline
from weightgrad.lab.plan.plan import Plan
from weightgrad.lab.plan.prices import show_dollars
from weightgrad.units import show_bit_s, show_bytes, show_seconds

_STYLE = (Path(__file__).parent / "plan.css").read_text(encoding="utf-8")


def write(plan: Plan, path: Path) -> None:
    """Write the page.

    Raises:
        PlanError: it cannot be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html(plan), encoding="utf-8")
    except OSError as error:
        raise PlanError(f"--page {path} cannot be written: {error.strerror or error}; choose another file") from error


def html(plan: Plan) -> str:
    """The page as text."""
    scenario = plan.scenario
    pictures = "".join(
        f"<h3>{escape(name)}</h3><div class=card>{timeline.draw(own.prediction)}</div>"
        for name, own in plan.strategies.items()
    )
    colours = (("step", "a step"), ("wait", "waiting"), ("up", "push"), ("down", "result"))
    key = "".join(f'<span><i style="background:var(--{name})"></i>{text}</span>' for name, text in colours)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Plan of {escape(scenario.name)}</title><style>{_STYLE}</style></head><body><main>"
        f"<h1>Plan of {escape(scenario.name)}</h1><p class=lead>{escape(plan_rows.title(plan))}</p>"
        f'<div class="card take"><b>Take {escape(plan.chosen)}.</b> {escape(plan.why)}</div>'
        f"<h2>Strategies</h2>{_strategies(plan)}"
        f"<h2>Rounds, drawn to scale</h2><p class=key>{key}</p>{pictures}"
        f"<h2>Links</h2>{_links(plan)}<h2>Memory</h2>{_memory(plan)}"
        f"<h2>One step of a worker</h2>{_step(plan)}</main></body></html>"
    )


def _strategies(plan: Plan) -> str:
    heads = (
        "strategy",
        "a step",
        "x without WAN",
        "round every",
        f"{plan.samples:,} samples",
        "WAN bytes",
        "dollars",
        "dollars a day",
        "no gain above",
    )
    rows = []
    for name, own in plan.strategies.items():
        found = own.prediction
        above = "" if own.crossover_bit_s is None else show_bit_s(own.crossover_bit_s)
        cells = (
            name + ("*" if own.by_data else ""),
            show_seconds(found.step_seconds),
            f"{found.slowdown:.2f}",
            "1 step" if found.round_steps == 1 else f"{found.round_steps:.3g} steps",
            own.time_text,
            own.wan_text,
            show_dollars(own.dollars),
            show_dollars(own.dollars_day),
            above,
        )
        rows.append((cells, name == plan.chosen))
    notes = [
        "x without WAN: how many times as long a step takes as without a WAN. No gain above: the bandwidth above which "
        "float32 would be sent faster than it is encoded."
    ]
    notes += plan_rows.lost_notes(plan)
    if any(own.by_data for own in plan.strategies.values()):
        notes.insert(0, "* how much is sent depends on the data: an estimate, and in brackets its range.")
    return _card(heads, rows) + "".join(f"<p class=lead>{escape(note)}</p>" for note in notes)


def _links(plan: Plan) -> str:
    heads = (
        "site",
        "strategy",
        "up a round",
        "down a round",
        "up a day",
        "down a day",
        "exchange",
        "waiting",
        "hidden",
    )
    rows = []
    for label, site in plan.alike:
        for name, own in plan.strategies.items():
            link = next(one for one in own.prediction.links if one.site == site.name)
            sizes = map(show_bytes, (link.up_round, link.down_round, link.up_day, link.down_day))
            times = map(show_seconds, (link.transfer_seconds, link.waiting_seconds))
            rows.append(((label, name, *sizes, *times, f"{100 * link.hidden:.0f} %"), name == plan.chosen))
    note = (
        "Exchange: from a push to its result, waiting for the other sites included. Hidden: the share of it in which "
        "the site computes."
    )
    return f"{_card(heads, rows)}<p class=lead>{escape(note)}</p>"


def _memory(plan: Plan) -> str:
    heads = (
        "a worker of",
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "peak",
        "fits",
        "host kept",
        "host peak",
    )
    rows = []
    for label, own in plan.memory:
        values = (own.parameters, own.gradients, own.optimizer, own.activations, own.device_peak)
        fits = "not known" if own.fits is None else "yes" if own.fits else "NO"
        host = map(show_bytes, (own.host_kept, own.host_peak))
        rows.append(((label, *map(show_bytes, values), fits, *host), False))
    return _card(heads, rows)


def _step(plan: Plan) -> str:
    heads = [" ".join(filter(None, head)) for head in plan_rows.step_heads(plan)]
    rows = [(row.cells, False) for row in plan_rows.step_rows(plan) if row.shown]
    return _card(heads, [*rows, (plan_rows.step_total(plan), True)]) + (
        f"<p class=lead>{escape(plan_rows.step_note(plan))}</p>"
    )


def _card(heads: Iterable[str], rows: Iterable[tuple[Iterable[str], bool]]) -> str:
    """A table; on a telephone, where a row is a block, its cells have their heads."""
    names = list(heads)
    head = "".join(f"<th>{escape(text)}</th>" for text in names)
    body = "".join(
        f"<tr{' class=chosen' if chosen else ''}>"
        + "".join(
            f'<td data-head="{escape(name)}">{escape(cell)}</td>' for name, cell in zip(names, cells, strict=True)
        )
        + "</tr>"
        for cells, chosen in rows
    )
    return f"<div class=card><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
