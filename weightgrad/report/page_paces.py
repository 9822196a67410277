"""What `auto` decided over time, as a table of the report."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from weightgrad.report.figures import seconds_text
from weightgrad.report.runs import Run

_SHOWN = 40


def paces(groups: Mapping[str, Sequence[Run]]) -> str:
    """One table for each strategy that changed its pace; nothing where none did."""
    made = []
    for strategy, runs in groups.items():
        lines = runs[0].paces if runs else ()
        if not lines:
            continue
        rows = "".join(
            f"<tr><th>{html.escape(seconds_text(float(line['t'])))}</th><td>{line['every']}</td><td>{line['overlap']}</td>"
            f"<td>{html.escape(str(line['up']))}</td><td>{html.escape(str(line['down']))}</td>"
            f"<td class='why'>{html.escape(str(line['why']))}</td></tr>"
            for line in lines[:_SHOWN]
        )
        rest = f"<p class='soft'>and {len(lines) - _SHOWN} more in the ledger</p>" if len(lines) > _SHOWN else ""
        head = "".join(f"<th>{name}</th>" for name in ("from", "every", "overlap", "up", "down"))
        made.append(
            f"<section class='card'><h2>What {html.escape(strategy)} decided</h2>"
            "<p class='soft'>A round every so many steps, answered so many steps later, with these codecs, "
            "from that time of the first seed on.</p><div class='scroll'><table>"
            f"<thead><tr>{head}<th class='why'>why</th></tr></thead>"
            f"<tbody>{rows}</tbody></table></div>{rest}</section>"
        )
    return "".join(made)
