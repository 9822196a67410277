"""Writes locked.txt and locked-docs.txt: the packages of constraints.txt and constraints-docs.txt with their sha256.

    .venv/bin/python scripts/lock.py            # a quarter of an hour, most of it waiting for the package index
    .venv/bin/python scripts/lock.py constraints-docs.txt      # one of the two
    .venv/bin/python scripts/lock.py --covers   # exit 0 if the files are for this Python and machine

`pip install --dry-run --report` says which file it would take, and its hash, from the indexes that pip is configured
with: one run for each Python, processor and C library below. A machine with a C library between the two takes a file
of the older one where that of the newer one is too new. torch is left out: its build is whichever is at hand.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = {"constraints.txt": "locked.txt", "constraints-docs.txt": "locked-docs.txt"}
PYTHONS = ("3.11", "3.12", "3.13")  # numpy and others in constraints.txt have no build for 3.10
PROCESSORS = ("x86_64", "aarch64")
GLIBC_MINORS = (28, 39)  # torch needs 2.28
LEFT_OUT = "torch"


def covers() -> bool:
    """Whether the files have what pip would take here: CPython (no free threading) on Linux with glibc."""
    return (
        sys.implementation.name == "cpython"
        and not sys.abiflags
        and f"{sys.version_info.major}.{sys.version_info.minor}" in PYTHONS
        and platform.system() == "Linux"
        and platform.machine() in PROCESSORS
        and platform.libc_ver()[0] == "glibc"
        and int(platform.libc_ver()[1].split(".")[1]) >= min(GLIBC_MINORS)
    )


def pins(path: Path) -> list[str]:
    """The lines `name==version` of a constraints file."""
    lines = [line.strip() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return sorted((line for line in lines if line.split("==")[0] != LEFT_OUT), key=str.lower)


def tags(processor: str, glibc_minor: int) -> list[str]:
    """The platforms of wheels that a machine with this C library takes, the newest first."""
    newest_first = [f"manylinux_2_{minor}_{processor}" for minor in range(glibc_minor, 4, -1)]
    return [*newest_first, *(f"manylinux{year}_{processor}" for year in (2014, 2010, 1)), f"linux_{processor}"]


def chosen(requirements: list[str], python: str, processor: str, glibc_minor: int) -> list[tuple[str, str]]:
    """What pip would take for such a machine: `name==version` as in the constraints, and the sha256."""
    wanted = {normalized(line.split("==")[0]): line for line in requirements}
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--no-deps", "--only-binary", ":all:", "--python-version", f"{python}.99", "--report", str(report)]
        command += ["--target", scratch]  # pip before 23.3 wants one, and writes nothing to it
        command += [argument for tag in tags(processor, glibc_minor) for argument in ("--platform", tag)]
        subprocess.run([*command, *requirements], check=True)
        installs = json.loads(report.read_text())["install"]
    print(f"Python {python}, {processor}, glibc 2.{glibc_minor}: {len(installs)} packages", flush=True)
    return [
        (wanted[normalized(one["metadata"]["name"])], one["download_info"]["archive_info"]["hashes"]["sha256"])
        for one in installs
    ]


def normalized(name: str) -> str:
    """The name of a package as pip compares it."""
    return name.lower().replace("_", "-").replace(".", "-")


def write(source: str, target: str) -> None:
    """Write one of the files."""
    requirements = pins(ROOT / source)
    machines = list(product(PYTHONS, PROCESSORS, GLIBC_MINORS))
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda machine: chosen(requirements, *machine), machines)
        hashes: dict[str, set[str]] = defaultdict(set)
        for line, sha256 in (pair for pairs in found for pair in pairs):
            hashes[line].add(sha256)
    text = f"# {source} with hashes, for CPython {', '.join(PYTHONS)} on Linux (glibc, {' and '.join(PROCESSORS)}).\n"
    text += "# Made by scripts/lock.py: do not edit.\n"
    for line in requirements:
        text += " \\\n    ".join([line, *(f"--hash=sha256:{one}" for one in sorted(hashes[line]))]) + "\n"
    (ROOT / target).write_text(text)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--covers", action="store_true", help="only say by the exit code whether they are for this one")
    parser.add_argument("sources", nargs="*", metavar="FILE", help=f"of {', '.join(FILES)}; by default all")
    arguments = parser.parse_args()
    if arguments.covers:
        sys.exit(not covers())
    for source in arguments.sources or FILES:
        write(source, FILES[source])


if __name__ == "__main__":
    main()
