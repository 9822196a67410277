"""Downloads a data set: tries each source until one gives exactly the bytes that sources.py lists.

No incomplete file is left behind: files are checked in memory, written to a temporary directory, and renamed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from weightgrad.errors import DataError
from weightgrad.lab.data.datasets import default_directory
from weightgrad.lab.data.sources import FILES, SOURCES, TOOLS, File, Report, Source, Tools


def _silent(what: str, done: int, total: int | None) -> None:
    pass


def fetch(
    name: str,
    directory: Path | None = None,
    *,
    progress: Report = _silent,
    tools: Tools = TOOLS,
    sources: Mapping[str, Sequence[Source]] = SOURCES,
    sets: Mapping[str, Sequence[File]] = FILES,
) -> Path:
    """Check the files of a data set, and download them if they are missing or wrong.

    Args:
        name: One of FILES.
        directory: Where to keep data sets; None means the user's cache.
        progress: Called with what is done, bytes so far, and bytes in total where known.
        tools: The network and programs to use.
        sources: The sources by data set.
        sets: The files by data set.

    Returns:
        The directory of the files.

    Raises:
        DataError: No source has the right files; the error lists what was tried.
    """
    if name not in sets:
        raise DataError(f"nothing to fetch for {name!r}; there are {', '.join(sets)}")
    place = (default_directory() if directory is None else directory) / name
    if all(_whole(place / file.name, file) for file in sets[name]):
        return place
    tried: list[str] = []
    for source in sources[name]:
        progress(source.line, 0, None)
        try:
            with tempfile.TemporaryDirectory(prefix="weightgrad-") as temporary:
                files = source.get(tools, Path(temporary), progress)
            for file in sets[name]:
                _check(file, files.get(file.name))
        except DataError as error:
            tried.append(f"{source.line}: {error}")
            continue
        except Exception as error:  # networks and archives raise many kinds of errors; the next source may work
            tried.append(f"{source.line}: {type(error).__name__}: {error}")
            continue
        _write(place, {file.name: files[file.name] for file in sets[name]})
        return place
    wanted = "\n".join(f"  {file.name}  {file.size} bytes  sha256 {file.sha256}" for file in sets[name])
    raise DataError(
        f"{name} could not be downloaded. Tried:\n"
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
    temporary = Path(tempfile.mkdtemp(prefix=".partial-", dir=place))
    try:
        for name, data in files.items():
            (temporary / name).write_bytes(data)
        for name in files:
            os.replace(temporary / name, place / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
