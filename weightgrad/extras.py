"""The extras of the package: what each would add, and what of it is missing here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata

ADDS = {
    "accelerate": "sites inside an Accelerator of Hugging Face",
    "bench": "the benchmarks' charts, and bitsandbytes beside our codecs",
    "demo": "compare, report and ./scripts/demo: pages with charts, and images",
    "dev": "all that ./scripts/test needs",
    "docs": "the documentation as a site",
    "images": "CIFAR-10, and folders of images",
    "lightning": "sites inside the Lightning Trainer",
    "mlflow": "a site's numbers in MLflow",
    "page": "the live page of a run: --page, and weightgrad page",
    "peft": "LoRA and its relatives",
    "ray": "compare --on ray, and sites as Ray Train jobs",
    "tensorboard": "a site's numbers in TensorBoard",
    "transformers": "sites inside the Hugging Face Trainer",
    "triton": "kernels for GPUs",
    "wandb": "a site's numbers in Weights & Biases",
}
"""What an extra is for, by its name."""


@dataclass(frozen=True)
class Extra:
    """An extra.

    Attributes:
        name: As in `pip install 'weightgrad[NAME]'`.
        adds: What it is for.
        missing: Packages of it that are not installed.
    """

    name: str
    adds: str
    missing: tuple[str, ...]


def extras() -> tuple[Extra, ...]:
    """Every extra, in the order of their names."""
    needed: dict[str, list[str]] = {}
    for requirement in metadata.requires("weightgrad") or ():
        package, _, marker = requirement.partition(";")
        extra = re.search(r"""extra\s*==\s*['"]([\w-]+)['"]""", marker)
        name = re.match(r"[\w.-]+", package)
        if extra is not None and name is not None:
            needed.setdefault(extra[1], []).append(name[0])
    return tuple(
        Extra(name, ADDS.get(name, ""), tuple(package for package in packages if not _installed(package)))
        for name, packages in sorted(needed.items())
    )


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
