"""What a fetched data set consists of: names, sizes and SHA-256 of its raw files.

CIFAR-10 is the binary version (10,000 records of a label and 3072 bytes of red, green and blue a file);
MNIST and Fashion-MNIST are the idx files, unpacked; the text is every State of the Union address from 1790
to 2021 in order of time, an empty line between two, typographic signs written in ASCII.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class File:
    """One raw file."""

    name: str
    size: int
    sha256: str


def _idx(*sums: str) -> tuple[File, ...]:
    names = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    sizes = (47040016, 60008, 7840016, 10008)
    return tuple(File(name, size, sha) for name, size, sha in zip(names, sizes, sums, strict=True))


_CIFAR = 30730000
SETS: dict[str, tuple[File, ...]] = {
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
