"""A table of measurements, shown as Markdown, and a cache of measurements, so that an interrupted table goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from weightgrad.machine import processor

Row = dict[str, Any]


@dataclass
class ResultTable:
    """One table of numbers.

    Attributes:
        name: Identifies the table in the JSON file.
        title: The heading above the table.
        about: How the numbers were measured.
        columns: The heading, the key in a row, and the format of each column.
        rows: The numbers by key. A key that a row does not have is shown as a dash.
        notes: Listed below the table.
    """

    name: str
    title: str
    about: str
    columns: list[tuple[str, str, str]]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def cells(self, row: Row) -> list[str]:
        """A row as text."""
        found = [(row.get(key), form) for _, key, form in self.columns]
        return ["–" if value is None else form.format(value) for value, form in found]  # noqa: RUF001

    def markdown(self) -> str:
        """Heading, description, table and notes."""
        sides = ["---" if form == "{}" else "---:" for _, _, form in self.columns]
        lines = [f"## {self.title}", self.about, ""]
        lines.append("| " + " | ".join(heading for heading, _, _ in self.columns) + " |")
        lines.append("|" + "|".join(sides) + "|")
        lines += ["| " + " | ".join(self.cells(row)) + " |" for row in self.rows]
        if self.notes:
            lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"

    def to_dict(self) -> Row:
        """The table for a JSON file."""
        return {"name": self.name, "title": self.title, "about": self.about, "rows": self.rows, "notes": self.notes}


def short(number: float) -> str:
    """The number with three significant digits and no exponent."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    places = max(0, 2 - math.floor(math.log10(abs(number))))
    return f"{number:.{places}f}"


def parameters(number: int) -> str:
    """A number of parameters in millions."""
    return f"{number / 1e6:g} M"


class MeasurementCache:
    """Measurements by name, kept in a file. A file from another machine or another torch is ignored."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: dict[str, Row] = {}
        if path.is_file():
            found = json.loads(path.read_text())
            self._kept = found["rows"] if found["machine"] == self._machine() else {}

    @staticmethod
    def _machine() -> str:
        return f"{processor()}; torch {torch.__version__}"

    def get(self, name: str, measure: Callable[[], Row]) -> Row:
        """The kept measurement of this name; `measure` makes it if there is none."""
        if name not in self._kept:
            self.keep(name, measure())
        return dict(self._kept[name])

    def known(self, name: str) -> Row | None:
        """The kept measurement of this name, or None."""
        return dict(self._kept[name]) if name in self._kept else None

    def keep(self, name: str, row: Row) -> None:
        """Add a measurement and write the file."""
        self._kept[name] = row
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"machine": self._machine(), "rows": self._kept}, indent=1) + "\n")
