"""A bar chart as an SVG file: readable in light and dark, no library needed to draw it or to show it."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

_ROW, _LEFT, _WIDTH, _TOP = 24, 270, 900, 64
_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #222; }
  .title { font-size: 16px; font-weight: 600; }
  .quiet { fill: #777; }
  .first { fill: #2f6fb3; } .second { fill: #8fbbe8; }
  .line { stroke: #999; stroke-dasharray: 4 3; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6e6e6; } .quiet { fill: #999; }
    .first { fill: #5b9be0; } .second { fill: #2c5177; } .line { stroke: #777; }
  }
"""


@dataclass(frozen=True)
class Bar:
    """Two values under one label."""

    label: str
    first: float
    second: float


def draw(bars: list[Bar], *, title: str, first: str, second: str, mark: str) -> str:
    """Horizontal bars, two a row, with a dashed line at one."""
    top = max((max(bar.first, bar.second) for bar in bars), default=1.0) or 1.0
    scale = (_WIDTH - _LEFT - 100) / max(1.0, top)
    height = _TOP + _ROW * len(bars) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<text class="title" x="8" y="22">{escape(title)}</text>',
        f'<rect class="first" x="8" y="34" width="12" height="12"/><text x="26" y="45">{escape(first)}</text>',
        f'<rect class="second" x="110" y="34" width="12" height="12"/><text x="128" y="45">{escape(second)}</text>',
    ]
    for place, bar in enumerate(bars):
        y = _TOP + _ROW * place
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(bar.label)}</text>')
        for name, value, offset in (("first", bar.first, 2), ("second", bar.second, 11)):
            width = max(1.0, value * scale)
            parts.append(f'<rect class="{name}" x="{_LEFT}" y="{y + offset}" width="{width:.1f}" height="8"/>')
        end = _LEFT + max(bar.first, bar.second) * scale + 6
        parts.append(f'<text class="quiet" x="{end:.1f}" y="{y + 14}">{bar.first:.2f} / {bar.second:.2f}</text>')
    x = _LEFT + scale
    parts.append(f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{height - 12}"/>')
    parts.append(f'<text class="quiet" x="{x:.1f}" y="{_TOP - 12}" text-anchor="middle">{escape(mark)}</text>')
    return "\n".join([*parts, "</svg>", ""])
