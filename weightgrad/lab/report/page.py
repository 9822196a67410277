"""Runs as one HTML file that needs nothing else: tables, charts, recipes, and how to repeat them.

The JavaScript of plotly comes from its wheel and is part of the page. The page's content security policy allows no
network and no script except the two in the page, by their hashes; everything that comes from files is also escaped.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from weightgrad.errors import WeightGradError
from weightgrad.lab.report.comparison import Comparison, Row, compare, differing, is_own_strategy
from weightgrad.lab.report.comparison_table import headers, notes, seeds_text, table_rows
from weightgrad.lab.report.number_text import bytes_text, percent_text, ratio_text, seconds_text
from weightgrad.lab.report.page_charts import charts
from weightgrad.lab.report.runs import Run

_RECIPES = 24  # shown at most
_DECISIONS = 40  # of a strategy, shown at most
_EPOCHS = 50  # rows of a table of thresholds


def _file(name: str) -> str:
    return resources.files("weightgrad.lab.report").joinpath(name).read_text(encoding="utf-8")


def plotly_javascript() -> str:
    """The JavaScript of plotly, from its wheel.

    Raises:
        WeightGradError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise WeightGradError("the report needs plotly; pip install 'weightgrad[demo]'") from None
    return str(get_plotlyjs())


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _for_json(value: object) -> object:
    """A value without the numbers that JSON cannot represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _for_json(inside) for key, inside in value.items()}
    if isinstance(value, (list, tuple)):
        return [_for_json(inside) for inside in value]
    return value


def _data(value: object) -> str:
    """JSON that cannot end the HTML element around it."""
    return json.dumps(_for_json(value), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _tile(value: str, what: str, *, highlight: bool = False) -> str:
    return f"<div class='tile{' highlight' if highlight else ''}'><b>{html.escape(value)}</b>{html.escape(what)}</div>"


def _shown_row(comparison: Comparison) -> Row:
    """The row of the tiles: the fastest own strategy, or else the fastest that is not the reference."""
    others = [row for row in comparison.rows if row.strategy != comparison.reference] or list(comparison.rows)
    own = [row for row in others if is_own_strategy(row.strategy)]
    return max(own or others, key=lambda row: (row.speedup_to_accuracy or 0, row.wan_ratio or 0))


def _tiles(comparison: Comparison) -> str:
    row, reference = _shown_row(comparison), comparison.reference
    highlight = is_own_strategy(row.strategy)
    if row.strategy == reference:
        made = [
            _tile(f"{percent_text(row.accuracy_mean)} %", "test accuracy", highlight=highlight),
            _tile(seconds_text(row.virtual_seconds), "virtual time"),
            _tile(bytes_text(row.wan_bytes), "WAN traffic"),
            _tile(f"{percent_text(row.waiting_share, 1)} %", "of the time sites wait for the WAN"),
        ]
    else:
        points = "–" if row.difference_points is None else f"{row.difference_points:+.2f}"  # noqa: RUF001
        fast = ratio_text(row.speedup_to_accuracy) if row.speedup_to_accuracy else "not reached"
        made = [
            _tile(fast, f"speedup of {row.strategy} to {reference}'s accuracy", highlight=highlight),
            _tile(ratio_text(row.wan_ratio), f"less WAN traffic than {reference}", highlight=highlight),
            _tile(
                points,
                f"points of accuracy relative to {reference}'s {percent_text(comparison.rows[0].accuracy_mean)} %",
            ),
            _tile(f"{percent_text(row.waiting_share, 1)} %", "of the time sites wait for the WAN"),
        ]
    return f"<div class='tiles'>{''.join(made)}</div>"


def _summary(comparison: Comparison) -> str:
    extra = [
        (title, [percent_text(getattr(row, key)) for row in comparison.rows])
        for title, key in (("quantized %", "quantized_accuracy"), ("EMA %", "ema_accuracy"))
        if any(getattr(row, key) is not None for row in comparison.rows)
    ]
    head = "".join(
        f"<th scope='col'>{html.escape(text)}</th>" for text in (*headers(comparison), *(title for title, _ in extra))
    )
    body = []
    for place, (row, texts) in enumerate(zip(comparison.rows, table_rows(comparison), strict=True)):
        first, *rest = (*texts, *(column[place] for _, column in extra))
        highlight = " class='highlight'" if is_own_strategy(row.strategy) else ""
        body.append(
            f"<tr{highlight}><th scope='row'>{html.escape(first)}</th>"
            + "".join(f"<td>{html.escape(cell)}</td>" for cell in rest)
            + "</tr>"
        )
    remarks = [*notes(comparison), "Times are virtual: they follow from the recipe's links and compute times."]
    if extra and extra[0][0].startswith("quantized"):
        remarks.append("quantized: the accuracy of the weights the workers train on, not of the master weights.")
    return (
        f"<section class='card'><h2>Summary</h2><div class='scroll'><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
        f"<ul class='notes'>{''.join(f'<li>{html.escape(note)}</li>' for note in remarks)}</ul></section>"
    )


def _switch(sets: str, options: Sequence[tuple[str, str]], chosen: str) -> str:
    buttons = "".join(
        f"<button type='button' value='{value}' aria-pressed='{str(value == chosen).lower()}'>{text}</button>"
        for value, text in options
    )
    return f"<div class='switch' role='group' data-sets='{sets}'>{buttons}</div>"


def _card(chart: str, title: str, text: str, control: str = "") -> str:
    return (
        f"<section class='card'><div class='top'><h2>{title}</h2>{control}</div><p class='soft'>{text}</p>"
        f"<div class='chart' id='chart-{chart}'></div></section>"
    )


def _charts(groups: Mapping[str, Sequence[Run]], comparison: Comparison) -> str:
    runs = [run for members in groups.values() for run in members]
    several = any(len(members) > 1 for members in groups.values())
    band = " Bands show the range over the seeds." if several else ""
    axes = _switch("axis", (("step", "steps"), ("time", "time"), ("bytes", "WAN bytes")), "time")
    made = [
        f"<div class='bar'><div class='legend' id='legend'></div>{axes}</div>",
        "<div class='pair'>",
        _card("accuracy", "Accuracy", f"On the test data.{band}"),
        _card("loss", "Training loss", "Mean over the sites; in long runs, also over several steps."),
        "</div>",
    ]
    if any(run.faults for run in runs):
        text = "Bars: rounds of the first seed. Shaded: a fault. Dotted: a fault or an event without an end."
        made.append(_card("timeline", "Rounds and faults", text))
    pair = []
    if len(comparison.rows) > 1:
        pair.append(
            _card(
                "speedup",
                "Speedup to the same accuracy",
                "Virtual time of the reference divided by that of each strategy.",
            )
        )
    if any(run.sites for run in runs):
        select = "<select id='site' aria-label='site'></select>"
        pair.append(_card("sites", "Where the time goes", "Virtual time of a site by activity.", select))
    made += ["<div class='pair'>", *pair, "</div>"]
    if any(run.links for run in runs):
        choice = _switch("links", (("bytes", "bytes"), ("share", "share")), "bytes")
        made.append(_card("links", "Bytes per link", "Of every WAN link, over the whole run.", choice))
    return "\n".join(made)


def _schedules(groups: Mapping[str, Sequence[Run]]) -> str:
    """The decisions of `auto`: one table for each strategy that changed its sync schedule."""
    made = []
    for strategy, runs in groups.items():
        lines = runs[0].schedules if runs else ()
        if not lines:
            continue
        rows = "".join(
            f"<tr><th>{html.escape(seconds_text(float(line['t'])))}</th><td>{line['every']}</td><td>{line['overlap']}</td>"
            f"<td>{html.escape(str(line['up']))}</td><td>{html.escape(str(line['down']))}</td>"
            f"<td class='why'>{html.escape(str(line['why']))}</td></tr>"
            for line in lines[:_DECISIONS]
        )
        rest = (
            f"<p class='soft'>{len(lines) - _DECISIONS} more are in the event log</p>"
            if len(lines) > _DECISIONS
            else ""
        )
        head = "".join(f"<th>{name}</th>" for name in ("time", "every", "overlap", "push codec", "result codec"))
        made.append(
            f"<section class='card'><h2>What {html.escape(strategy)} decided</h2>"
            "<p class='soft'>Sync schedule over time, for the first seed: steps between two rounds, steps until the "
            "result is applied (overlap), and the codecs of pushes and results.</p><div class='scroll'><table>"
            f"<thead><tr>{head}<th class='why'>why</th></tr></thead>"
            f"<tbody>{rows}</tbody></table></div>{rest}</section>"
        )
    return "".join(made)


def _thresholds(groups: Mapping[str, Sequence[Run]]) -> str:
    """The significance threshold G over the epochs: one table for each strategy that has one."""
    made = []
    for strategy, runs in groups.items():
        lines = runs[0].thresholds if runs else ()
        if not lines:
            continue
        sites = list(dict.fromkeys(str(line["site"]) for line in lines))
        by_step: dict[int, dict[str, float]] = {}
        for line in lines:
            by_step.setdefault(int(line["step"]), {})[str(line["site"])] = float(line["value"])
        rows = "".join(
            f"<tr><th>{step}</th>" + "".join(f"<td>{_threshold(values.get(site))}</td>" for site in sites) + "</tr>"
            for step, values in sorted(by_step.items())[:_EPOCHS]
        )
        head = "".join(f"<th>{html.escape(name)}</th>" for name in ("step", *sites))
        rest = (
            f"<p class='soft'>{len(by_step) - _EPOCHS} more are in the event log</p>" if len(by_step) > _EPOCHS else ""
        )
        made.append(
            f"<section class='card'><h2>The threshold of {html.escape(strategy)}</h2>"
            "<p class='soft'>G at the start and after each epoch, for the first seed: a site sends when its update "
            "since the last push is at least G times that of one step.</p><div class='scroll'><table>"
            f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{rest}</section>"
        )
    return "".join(made)


def _threshold(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _recipes(groups: Mapping[str, Sequence[Run]], command: str | None) -> str:
    made = []
    if command:
        made.append(f"<p>To repeat all runs:</p><pre class='command'>{html.escape(command)}</pre>")
    made.append("<p>To repeat one run, save its recipe and run</p><pre>weightgrad simulate recipe.yaml --out DIR</pre>")
    for label, runs in list(groups.items())[:_RECIPES]:
        seeds = ", ".join(str(run.seed) for run in runs)
        others = (
            f"; for other seeds add <code>--set seed=N</code> with N from {html.escape(seeds)}" if len(runs) > 1 else ""
        )
        made.append(
            f"<details><summary>{html.escape(label)} <span class='soft'>recipe of seed {runs[0].seed}{others}</span>"
            f"</summary><p class='soft'>{html.escape(shlex.quote(str(runs[0].directory)))}</p>"
            f"<pre>{html.escape(runs[0].recipe_text())}</pre></details>"
        )
    if len(groups) > _RECIPES:
        made.append(f"<p class='soft'>{len(groups) - _RECIPES} more recipes are in the directories of the runs.</p>")
    return f"<section class='card'><h2>How to repeat these runs</h2>{''.join(made)}</section>"


def _warnings(runs: Sequence[Run], skipped: Sequence[str]) -> str:
    said = list(skipped)
    keys = differing(runs)
    if keys:
        said.insert(0, f"These runs have different recipes; they differ in {', '.join(keys)}. Compare with care.")
    if not said:
        return ""
    return f"<section class='card warn'>{''.join(f'<p>{html.escape(text)}</p>' for text in said)}</section>"


def _measured(runs: Sequence[Run]) -> str:
    """When and on which machine the runs were made, as far as `wall.json` says."""
    said: dict[str, None] = {}
    for run in runs:
        facts = [str(run.wall[key]) for key in ("machine",) if run.wall.get(key)]
        facts += [f"{run.wall['cores']} cores"] if run.wall.get("cores") else []
        facts += [f"torch {run.wall['torch']}"] if run.wall.get("torch") else []
        facts += [str(run.wall["date"])[:10]] if run.wall.get("date") else []
        said[", ".join(facts)] = None
    return "; ".join(list(said)[:4])


def page(
    groups: Mapping[str, Sequence[Run]],
    *,
    target: float | None = None,
    command: str | None = None,
    skipped: Sequence[str] = (),
) -> str:
    """The page as HTML.

    Args:
        groups: Runs by strategy.
        target: The accuracy to compare times to; None means 99 % of the reference's.
        command: The command that made the runs.
        skipped: Warnings to show.
    """
    comparison = compare(groups, target=target)
    groups = {row.strategy: groups[row.strategy] for row in comparison.rows}
    runs = [run for members in groups.values() for run in members]
    names = " and ".join(dict.fromkeys(run.name for run in runs))
    first = runs[0].header
    seeds = seeds_text(max(len(members) for members in groups.values()))
    plotly, script = plotly_javascript(), _file("page.js")
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {_hash(plotly)} {_hash(script)}"
    strategies = "1 strategy" if len(groups) == 1 else f"{len(groups)} strategies"
    facts = [f"{strategies}, {seeds} each" if len(runs) > 1 else f"strategy {runs[0].strategy}"]
    facts += [f"{first[key]:,} {key}" for key in ("steps", "parameters", "workers") if isinstance(first.get(key), int)]
    sites = [str(site) for site in first.get("sites", ())]
    facts.append(f"{len(sites)} sites: {', '.join(sites[:8])}{', …' if len(sites) > 8 else ''}")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>WeightGrad: {html.escape(names)}</title>
<style>{_file("page.css")}</style>
</head>
<body>
<header>
<h1>{html.escape(names)}</h1>
<p class="soft">{html.escape(" · ".join(facts))}</p>
</header>
{_warnings(runs, skipped)}
{_tiles(comparison)}
{_summary(comparison)}
{_charts(groups, comparison)}
{_schedules(groups)}
{_thresholds(groups)}
{_recipes(groups, command)}
<footer class="soft">Made by weightgrad. {html.escape(_measured(runs))}</footer>
<script type="application/json" id="data">{_data(charts(groups, comparison))}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


def write(
    groups: Mapping[str, Sequence[Run]],
    path: Path,
    *,
    target: float | None = None,
    command: str | None = None,
    skipped: Sequence[str] = (),
) -> None:
    """Write the page to a file; the arguments are those of `page`."""
    text = page(groups, target=target, command=command, skipped=skipped)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
