"""A table of measurements: numbers kept as numbers, shown as Markdown."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]


@dataclass
class Sheet:
    """One table. `columns` is heading, key of the row, and how it is written."""

    name: str
    title: str
    about: str
    columns: list[tuple[str, str, str]]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def cells(self, row: Row) -> list[str]:
        """A row as text; what was not measured is a dash."""
        found = [(row.get(key), form) for _, key, form in self.columns]
        return ["–" if value is None else form.format(value) for value, form in found]  # noqa: RUF001

    def markdown(self) -> str:
        """Heading, what was done, table, notes."""
        sides = ["---" if form == "{}" else "---:" for _, _, form in self.columns]
        lines = [f"## {self.title}", self.about, ""]
        lines.append("| " + " | ".join(heading for heading, _, _ in self.columns) + " |")
        lines.append("|" + "|".join(sides) + "|")
        lines += ["| " + " | ".join(self.cells(row)) + " |" for row in self.rows]
        if self.notes:
            lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"

    def as_dict(self) -> Row:
        """For JSON."""
        return {"name": self.name, "title": self.title, "about": self.about, "rows": self.rows, "notes": self.notes}


def short(number: float) -> str:
    """Three digits that matter, without an exponent."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    places = max(0, 2 - math.floor(math.log10(abs(number))))
    return f"{number:.{places}f}"


def parameters(number: int) -> str:
    """A number of parameters as people say it."""
    return f"{number / 1e6:g} M"
