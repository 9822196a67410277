"""The timeline of a round, drawn to scale: what each site computes, waits and sends, as an SVG picture."""

from __future__ import annotations

from html import escape

from weightgrad.lab.plan.prediction import Prediction
from weightgrad.units import show_bytes, show_seconds

_WIDTH, _LEFT, _ROW, _TOP = 960, 110, 64, 26
_ROUNDS = 2.5
_MOST_STEPS = 40


def window(prediction: Prediction) -> tuple[float, float]:
    """The stretch of time that is drawn: some rounds of the second half, or as many steps as one can tell apart."""
    steps = [span for span in prediction.spans if span.kind == "step"]
    first = min((span.start for span in steps), default=0.0)
    longest = max((link.transfer_seconds for link in prediction.links), default=0.0)
    wanted = max(_ROUNDS * prediction.round_steps * prediction.step_seconds, 1.2 * longest)
    wanted = min(wanted, max(_MOST_STEPS * prediction.step_seconds, 1.2 * longest))
    return first, first + min(wanted, max((span.end for span in prediction.spans), default=first) - first)


def draw(prediction: Prediction) -> str:
    """An SVG picture with one row for each site."""
    start, end = window(prediction)
    scale = (_WIDTH - _LEFT) / max(end - start, 1e-12)

    def place(t: float) -> float:
        return _LEFT + (min(max(t, start), end) - start) * scale

    names = [link.site for link in prediction.links]
    height = _TOP + _ROW * len(names) + 24
    found = [f'<svg class="timeline" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="timeline of a round">']
    for number, name in enumerate(names):
        y = _TOP + number * _ROW
        found.append(f'<text x="0" y="{y + 16}">{escape(name)}</text>')
        for label, offset in (("up", 32), ("down", 45)):
            found.append(f'<text class="small" x="{_LEFT - 40}" y="{y + offset + 5}">{label}</text>')
        for span in prediction.spans:
            if span.site == name and span.end > start and span.start < end:
                found.append(_bar(place(span.start), place(span.end), y + 4, 18, span.kind, _seconds(span.kind, span)))
        for transfer in prediction.transfers:
            if transfer.site == name and transfer.end > start and transfer.start < end:
                offset, kind = (28, "up") if transfer.upward else (41, "down")
                told = f"{show_bytes(transfer.nbytes)} in {show_seconds(transfer.end - transfer.start)}"
                found.append(_bar(place(transfer.start), place(transfer.end), y + offset, 8, kind, f"{kind}: {told}"))
    found += _axis(start, end, place, height)
    return "".join(found) + "</svg>"


def _seconds(kind: str, span: object) -> str:
    return f"{kind}: {show_seconds(span.end - span.start)}"  # type: ignore[attr-defined]


def _bar(left: float, right: float, y: float, height: float, kind: str, told: str) -> str:
    width = max(0.6, right - left - 0.4)
    return (
        f'<rect class="{kind}" x="{left:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height}" rx="1.5">'
        f"<title>{escape(told)}</title></rect>"
    )


def _axis(start: float, end: float, place: object, height: float) -> list[str]:
    ticks = 5
    found = []
    for number in range(ticks + 1):
        t = start + (end - start) * number / ticks
        x = place(t)  # type: ignore[operator]
        anchor = "start" if number == 0 else "end" if number == ticks else "middle"
        found.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{height - 18}"/>')
        label = show_seconds(t - start)
        found.append(f'<text class="small" text-anchor="{anchor}" x="{x:.1f}" y="{height - 4}">{label}</text>')
    return found
