"""Put a data set in place: try each route until one gives exactly the bytes that sets.py names.

Nothing half-done is left behind: files are checked in memory, written beside their place and renamed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from weightgrad.errors import DataError
from weightgrad.train.datasets import default_directory
from weightgrad.train.routes import ROUTES, WORLD, Report, Route, World
from weightgrad.train.sets import SETS, File


def _silent(what: str, done: int, total: int | None) -> None:
    pass


def fetch(
    name: str,
    directory: Path | None = None,
    *,
    progress: Report = _silent,
    world: World = WORLD,
    routes: Mapping[str, Sequence[Route]] = ROUTES,
    sets: Mapping[str, Sequence[File]] = SETS,
) -> Path:
    """The directory of the data set's raw files, which are checked if they are there and fetched if not."""
    if name not in sets:
        raise DataError(f"nothing to fetch for {name!r}; there are {', '.join(sets)}")
    place = (default_directory() if directory is None else directory) / name
    if all(_whole(place / file.name, file) for file in sets[name]):
        return place
    tried: list[str] = []
    for route in routes[name]:
        progress(route.line, 0, None)
        try:
            with tempfile.TemporaryDirectory(prefix="weightgrad-") as room:
                files = route.get(world, Path(room), progress)
            for file in sets[name]:
                _check(file, files.get(file.name))
        except DataError as error:
            tried.append(f"{route.line}: {error}")
            continue
        except Exception as error:  # networks and archives raise many kinds; the next route may work
            tried.append(f"{route.line}: {type(error).__name__}: {error}")
            continue
        _write(place, {file.name: files[file.name] for file in sets[name]})
        return place
    wanted = "\n".join(f"  {file.name}  {file.size} bytes  sha256 {file.sha256}" for file in sets[name])
    raise DataError(
        f"{name} could not be fetched. Tried:\n"
        + "\n".join(f"  {line}" for line in tried)
        + f"\nTo place it by hand, put these files in {place} and run the command again, which checks them:\n{wanted}"
    )


def _whole(path: Path, file: File) -> bool:
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    return hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256


def _check(file: File, data: bytes | None) -> None:
    if data is None:
        raise DataError(f"{file.name} was not in it")
    if len(data) != file.size:
        raise DataError(f"{file.name} has {len(data)} bytes instead of {file.size}")
    found = hashlib.sha256(data).hexdigest()
    if found != file.sha256:
        raise DataError(f"{file.name} has sha256 {found} instead of {file.sha256}")


def _write(place: Path, files: Mapping[str, bytes]) -> None:
    place.mkdir(parents=True, exist_ok=True)
    room = Path(tempfile.mkdtemp(prefix=".partial-", dir=place))
    try:
        for name, data in files.items():
            (room / name).write_bytes(data)
        for name in files:
            os.replace(room / name, place / name)
    finally:
        shutil.rmtree(room, ignore_errors=True)
