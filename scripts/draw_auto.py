"""Draws docs/auto.svg: the rows that `auto` chooses from, and what it goes by.

python scripts/draw_auto.py
"""

from __future__ import annotations

from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "docs" / "auto.svg"
_STYLE = """<style>
text { font: 13px sans-serif; fill: #222222; text-anchor: middle; }
.head { font-weight: bold; }
rect { fill: none; stroke: #0072b2; stroke-width: 1.5; }
.ask { stroke: #808080; }
path { fill: none; stroke: #808080; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) { text { fill: #e6e6e6; } }
</style>"""

_BOXES = [  # x, y, width, class, lines; the first line is bold
    (250, 20, 220, "ask", ("the recipe's optimizer", "linear in the gradient?")),
    (420, 120, 220, "ask", ("the recipe's links", "4-bit round within 0.3 of a step?")),
    (
        10,
        230,
        220,
        "row",
        ("updates, often and sparse", "1 to 5 % every 4 steps, signs", "global model + 1/4 residual"),
    ),
    (
        250,
        230,
        220,
        "row",
        ("updates, seldom and dense", "10 % every 10 steps, 2 bits", "global model + residual"),
    ),
    (
        490,
        230,
        220,
        "row",
        ("gradients, one optimizer", "3 to 32 bits, waited for or ahead", "least seconds times steps"),
    ),
    (
        130,
        350,
        460,
        "ask",
        (
            "during the run",
            "measured steps and links set rounds, density, bits and overlap;",
            "every change is logged with its reason",
        ),
    ),
]
_LINES = [  # from, to, word
    ((300, 70), (120, 230), "SGD, LARS"),
    ((420, 70), (530, 120), "Adam, Muon, ..."),
    ((480, 170), (360, 230), "far"),
    ((580, 170), (600, 230), "near"),
    ((120, 300), (220, 350), ""),
    ((360, 300), (360, 350), ""),
    ((600, 300), (500, 350), ""),
]  # fmt: skip


def draw() -> str:
    """The picture as SVG."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 440" role="img">',
        "<title>How auto decides</title>",
    ]
    parts.append(_STYLE)
    for (x1, y1), (x2, y2), word in _LINES:
        parts.append(f'<path d="M{x1} {y1} L{x2} {y2}"/>')
        if word:
            beside = 14 + 4 * len(word)  # half of the word, and a gap to the line
            x = (x1 + x2) // 2 + (beside if x2 > x1 else -beside)
            parts.append(f'<text x="{x}" y="{(y1 + y2) // 2}">{word}</text>')
    for x, y, width, kind, lines in _BOXES:
        height = 14 + 19 * len(lines)
        parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>')
        for place, line in enumerate(lines):
            bold = ' class="head"' if place == 0 else ""
            parts.append(f'<text{bold} x="{x + width // 2}" y="{y + 22 + 19 * place}">{line}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    TARGET.write_text(draw(), encoding="utf-8")
