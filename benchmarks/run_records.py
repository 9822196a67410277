"""Records of finished runs: one small JSON file a run, kept in the repository, so that a table goes on elsewhere.

    benchmarks/results/records/mlp/MLP/fp32-1f2e3d4c-seed-0.json

The name has a hash of what was run: the recipe and the parts of the strategy, without what is at its default, so that a
setting that is added later does not make old records void. A record also has every setting, and it is taken only if
those that both know are equal: when a default or a preset changes, the run counts as missing.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightgrad.core.strategies import Strategy
from weightgrad.errors import RunError
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.report.choices import safe_name
from weightgrad.lab.report.runs import Line, Run
from weightgrad.lab.run.simulation import chosen_strategy
from weightgrad.machine import processor

FORMAT = 1
_LOSSES = 50  # points of the training loss that a record keeps
_LABELS = ("name", "about")  # of a recipe or a strategy: changing them changes nothing that is run
_DEFAULTS = {
    field.name: field.default_factory() if callable(field.default_factory) else field.default
    for field in dataclasses.fields(Strategy)
}
# Lines of the event log that a record keeps: of every kind that a run has, but steps, which are thinned, and rounds.
_KEPT = tuple(
    field.name
    for field in dataclasses.fields(Run)
    if str(field.type).startswith("tuple[Line") and field.name not in ("steps", "rounds")
)


@dataclass(frozen=True)
class RunKey:
    """What identifies a run: a hash for names of files, and all settings to compare.

    Attributes:
        mark: The hash of what is not at its default, without the seed.
        seed: The seed.
        settings: All of it, defaults too: `recipe`, the parts of the `strategy`, and `held_out`.
    """

    mark: str
    seed: int
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, recipe: Recipe, *, held_out: bool = False) -> RunKey:
        """The key of a recipe.

        Args:
            recipe: What is run. Where its data is on this machine is not a part of the key.
            held_out: Whether a part of the training data takes the place of the test data.
        """
        strategy = chosen_strategy(recipe)
        parts = {key: value for key, value in strategy.to_dict().items() if key not in _LABELS}
        own = {
            "recipe": _what_is_run(recipe.model_dump(mode="json", by_alias=True, exclude_defaults=True)),
            "strategy": {key: value for key, value in parts.items() if value != _DEFAULTS[key]},
            **({"held_out": True} if held_out else {}),
        }
        mark = hashlib.sha256(json.dumps(own, sort_keys=True, default=str).encode()).hexdigest()[:8]
        every = {"recipe": _what_is_run(recipe.dump()), "strategy": parts, "held_out": held_out}
        return cls(mark, recipe.seed, json.loads(json.dumps(every, default=str)))

    def fits(self, settings: Mapping[str, Any]) -> bool:
        """Whether no setting that both know has another value there."""
        own, other = _flat(self.settings), _flat(settings)
        return all(other[name] == value for name, value in own.items() if name in other)


def _what_is_run(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe without seed, labels, the strategy, whose parts are hashed instead, and the place of the data."""
    kept = {key: value for key, value in recipe.items() if key not in ("seed", "strategy", *_LABELS)}
    kept["data"] = {key: value for key, value in kept["data"].items() if key != "directory"}
    return kept


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """The values by names such as `recipe.sites.0.workers`."""
    if isinstance(value, Mapping):
        inside = list(value.items())
    elif isinstance(value, list | tuple):
        inside = list(enumerate(value))
    else:
        return {name: value}
    return {key: leaf for part, one in inside for key, leaf in _flat(one, f"{name}.{part}").items()}


class RunRecords:
    """The records of a table, in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, part: str, row: str, key: RunKey) -> Path:
        """Where the record of a run is, or would be."""
        return self._directory / safe_name(part) / f"{safe_name(row)}-{key.mark}-seed-{key.seed}.json"

    def read(self, part: str, row: str, key: RunKey) -> Run | None:
        """The run, as far as its record has it; None if there is no record of what the key says.

        Raises:
            RunError: The record is damaged.
        """
        path = self.path(part, row, key)
        if not path.is_file():
            return None
        record = _load(path)
        found = _run(path, record)
        return found if key.fits(record["settings"]) else None

    def write(self, part: str, row: str, key: RunKey, run: Run) -> Path:
        """Keep a finished run; the file is there whole or not at all."""
        path = self.path(part, row, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "format": FORMAT,
            "part": part,
            "row": row,
            "seed": key.seed,
            "made": {
                **run.wall,
                "machine": processor(),
                "python": platform.python_version(),
                "commit": _commit(),
            },
            "settings": dict(key.settings),
            "header": {key: value for key, value in run.header.items() if key not in ("kind", "t", "recipe", "parts")},
            "strategy": run.recipe["strategy"],
            "summary": dict(run.summary),
            "losses": _losses(run.steps),
            **{kind: [_short(line) for line in _changes(getattr(run, kind))] for kind in _KEPT},
        }
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(_text(record), encoding="utf-8")
        os.replace(partial, path)
        return path

    def all(self) -> Iterator[Run]:
        """All runs that have a record; a damaged one is left out."""
        for path in sorted(self._directory.rglob("*.json")):
            try:
                yield _run(path, _load(path))
            except RunError:
                continue


def _load(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise RunError(f"{path} cannot be read: {error}; remove it, and the run is made again") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise RunError(f"{path} is not a record of format {FORMAT}; remove it, and the run is made again")
    return record


def _run(path: Path, record: Mapping[str, Any]) -> Run:
    try:
        kept: dict[str, tuple[Line, ...]] = {kind: tuple(record.get(kind, ())) for kind in _KEPT}
        return Run(
            directory=path,
            header={
                **record["header"],
                "parts": record["settings"]["strategy"],
                "recipe": {
                    **record["settings"]["recipe"],
                    "strategy": record["strategy"],
                    "name": record["header"]["name"],
                    "seed": record["seed"],
                },
            },
            steps=tuple(record["losses"]),
            rounds=(),
            status=str(record["summary"]["status"]),
            summary=record["summary"],
            wall=record["made"],
            **kept,
        )
    except (KeyError, TypeError) as error:
        raise RunError(f"{path} lacks {error}; remove it, and the run is made again") from error


def _losses(steps: Sequence[Line]) -> list[Line]:
    """The mean training loss of each of at most 50 equal stretches, at the end of the stretch."""
    size = max(1, -(-len(steps) // _LOSSES))
    found: list[Line] = []
    for start in range(0, len(steps), size):
        piece = steps[start : start + size]
        finite = [float(line["loss"]) for line in piece if line["loss"] is not None]
        if finite:
            last = piece[-1]
            loss = float(f"{statistics.fmean(finite):.6g}")
            found.append({"t": last["t"], "step": last["step"], "loss": loss})
    return found


def _changes(lines: Sequence[Line]) -> list[Line]:
    """Lines that say more than the time and the version is another: a schedule that was only confirmed is left out."""
    found: list[Line] = []
    before: dict[str, Any] | None = None
    for line in lines:
        said = {key: value for key, value in line.items() if key not in ("t", "version")}
        if said != before:
            found.append(line)
        before = said
    return found


def _short(line: Line) -> Line:
    return {key: value for key, value in line.items() if key == "accuracy" or (key != "kind" and value is not None)}


@functools.cache
def _commit() -> str | None:
    """The commit of this source tree; None where there is no git."""
    try:
        asked = ["git", "rev-parse", "--short=12", "HEAD"]
        done = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _text(record: Mapping[str, Any]) -> str:
    """One line for each key, and for each entry of a list: small, and readable in a diff."""
    lines = []
    for key, value in record.items():
        if isinstance(value, list) and value:
            inside = ",\n  ".join(_json(one) for one in value)
            lines.append(f' "{key}": [\n  {inside}\n ]')
        else:
            lines.append(f' "{key}": {_json(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)
