"""Run directories, read back: what `weightgrad simulate` wrote.

`events.jsonl` is the event log, `summary.json` the result, `recipe.yaml` the recipe, and `wall.json` says on which
machine the run was made. Only the first two are needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from weightgrad import event_log
from weightgrad.errors import RunError

FILES = ("events.jsonl", "summary.json", "wall.json", "recipe.yaml", "model.safetensors", "master.safetensors")
_NUMBERS = ("virtual_seconds", "wan_bytes", "lan_bytes", "waiting_share")  # of a summary
_KEYS = {
    "run": ("strategy", "seed", "recipe"),
    "step": ("t", "step", "loss"),
    "round": ("t",),
    "evaluate": ("t", "step", "accuracy", "wan_bytes"),
    "fault": ("t", "what", "where"),
    "schedule": ("t", "every", "overlap", "up", "down", "why"),
    "threshold": ("t", "site", "step", "value"),
    "link": ("between", "bytes"),
    "site": ("site", "compute_seconds", "codec_seconds", "lan_seconds", "waiting_seconds"),
    "end": ("status",),
}

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """One training run. Entries of the event log are in the order in which they were written."""

    directory: Path
    header: Line
    steps: tuple[Line, ...]
    rounds: tuple[Line, ...]
    evaluations: tuple[Line, ...]
    faults: tuple[Line, ...]
    schedules: tuple[Line, ...]
    links: tuple[Line, ...]
    sites: tuple[Line, ...]
    status: str  # finished, diverged or interrupted; unfinished if the process was killed
    summary: Line
    wall: Line = field(default_factory=dict)
    thresholds: tuple[Line, ...] = ()

    @classmethod
    def read(cls, directory: Path) -> Run:
        """Read a run directory.

        Raises:
            RunError: A file is missing or damaged.
        """
        lines = _events(directory)
        kinds: dict[str, list[Line]] = {}
        for number, line in enumerate(lines, 1):
            kind = str(line.get("kind"))
            missing = [key for key in _KEYS.get(kind, ()) if key not in line]
            if missing:
                raise RunError(f"{directory / 'events.jsonl'}, line {number}, kind {kind!r}: no {', '.join(missing)}")
            kinds.setdefault(kind, []).append(line)
        if "run" not in kinds:
            raise RunError(f"{directory / 'events.jsonl'} has no entry of kind 'run': it is not the event log of a run")
        ends = kinds.get("end", [])
        return cls(
            directory=directory,
            header=kinds["run"][0],
            steps=tuple(kinds.get("step", ())),
            rounds=tuple(kinds.get("round", ())),
            evaluations=tuple(kinds.get("evaluate", ())),
            faults=tuple(kinds.get("fault", ())),
            schedules=tuple(kinds.get("schedule", ())),
            thresholds=tuple(kinds.get("threshold", ())),
            links=tuple(kinds.get("link", ())),
            sites=tuple(kinds.get("site", ())),
            status=str(ends[-1].get("status")) if ends else "unfinished",
            summary=_summary(directory),
            wall=_wall(directory),
        )

    @property
    def finished(self) -> bool:
        """Whether the run is complete. A run that diverged is: it would diverge again."""
        return self.status in ("finished", "diverged") and bool(self.status == self.summary["status"])

    @property
    def name(self) -> str:
        """The recipe's name."""
        return str(self.header.get("name", self.directory.name))

    @property
    def strategy(self) -> str:
        """The strategy with the recipe's overrides, such as `diloco(every=50)`."""
        return strategy_text(self.recipe.get("strategy", self.header["strategy"]))

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.header["seed"])

    @property
    def recipe(self) -> Line:
        """The recipe with all defaults."""
        recipe: Line = self.header["recipe"]
        return recipe

    def recipe_text(self) -> str:
        """The recipe as YAML, from its file or from the event log."""
        file = self.directory / "recipe.yaml"
        if file.is_file():
            return file.read_text(encoding="utf-8", errors="replace")
        return yaml.safe_dump(dict(self.recipe), sort_keys=False, allow_unicode=True)


def strategy_text(strategy: object) -> str:
    """A strategy of a recipe as text: `{name: diloco, every: 50}` is `diloco(every=50)`."""
    if not isinstance(strategy, dict):
        return str(strategy)
    changed = [
        f"{key}={value if isinstance(value, str) else json.dumps(value, default=str)}"
        for key, value in strategy.items()
        if key != "name"
    ]
    name = str(strategy.get("name", "unknown"))
    return f"{name}({', '.join(changed)})" if changed else name


def _events(directory: Path) -> list[dict[str, Any]]:
    path = directory / "events.jsonl"
    if not directory.is_dir():
        raise RunError(f"there is no directory {directory}; wanted one that `weightgrad simulate` wrote")
    if not path.is_file():
        raise RunError(f"{directory} has no events.jsonl; wanted a directory that `weightgrad simulate` wrote")
    return event_log.read(path)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise RunError(f"{path} cannot be read: {error}; run it again") from error
    if not isinstance(value, dict):
        raise RunError(f"{path} holds a {type(value).__name__}; wanted an object; run it again")
    return value


def _summary(directory: Path) -> dict[str, Any]:
    path = directory / "summary.json"
    if not path.is_file():
        raise RunError(f"{directory} has no summary.json: the run is still going on or was killed; run it again")
    summary = _json(path)
    wrong = [key for key in _NUMBERS if not isinstance(summary.get(key), (int, float))]
    wrong += [key for key in ("status", "accuracy") if key not in summary]
    if wrong:
        raise RunError(f"{path} has no usable {', '.join(wrong)}; run it again")
    return summary


def _wall(directory: Path) -> dict[str, Any]:
    path = directory / "wall.json"
    return _json(path) if path.is_file() else {}


def find(directories: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """Find all runs in these directories and below them.

    Args:
        directories: Run directories, or directories that contain some. A run that is given directly must be readable;
            others are skipped if they are not, because an unfinished comparison has such runs.

    Returns:
        The runs, and the reasons why others were skipped.
    """
    runs: list[Run] = []
    skipped: list[str] = []
    seen: set[Path] = set()
    for directory in directories:
        below = sorted(path.parent for path in directory.rglob("events.jsonl"))
        if not below and directory.is_dir():
            raise RunError(
                f"no events.jsonl in {directory} or below; wanted what `weightgrad simulate` or compare wrote"
            )
        if directory in below or not below:
            below = [directory]
        for place in below:
            if place.resolve() in seen:
                continue
            seen.add(place.resolve())
            try:
                runs.append(Run.read(place))
            except RunError as error:
                if place == directory:
                    raise
                skipped.append(str(error))
    return runs, skipped
