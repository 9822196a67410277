"""A table of devices: what one of them computes and holds. `--devices FILE` changes it.

Peaks are the manufacturers' dense figures. What training reaches of them is `efficiency`: 0.4 of the peak is what
well-tuned transformers report (model FLOP utilisation of 0.35 to 0.45), and small models reach less. These are
estimates; `--measure` measures this machine instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from weightgrad.errors import PlanError, RecipeError
from weightgrad.lab.recipes.document import Document
from weightgrad.lab.recipes.recipe_file import read_text

EFFICIENCY = 0.4
RESERVED_GB = 1.0  # context, workspaces of cuBLAS and buffers of NCCL


class Device(BaseModel):
    """One accelerator, or one machine without.

    Attributes:
        tflops: dense peak in 10^12 operations a second, for the type that is computed in.
        tflops_fp32: the same in float32 (TF32 where the device has it).
        memory_gb: its memory, in 10^9 bytes.
        memory_gb_s: the bandwidth of its memory, in 10^9 bytes a second.
        efficiency: the share of the peak that training reaches.
        interconnect_gb_s: what it exchanges with the others of its machine (NVLink and its like), one way, in 10^9
            bytes a second; None: no more than the network between machines carries.
        reserved_gb: what driver and libraries keep of its memory; an estimate.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tflops: float = Field(gt=0)
    tflops_fp32: float = Field(gt=0)
    memory_gb: float = Field(gt=0)
    memory_gb_s: float = Field(gt=0)
    efficiency: float = Field(default=EFFICIENCY, gt=0, le=1)
    interconnect_gb_s: float | None = Field(default=None, gt=0)
    reserved_gb: float = Field(default=RESERVED_GB, ge=0)


def _device(
    tflops: float, tflops_fp32: float, memory_gb: float, memory_gb_s: float, interconnect_gb_s: float | None = None
) -> Device:
    return Device(
        tflops=tflops,
        tflops_fp32=tflops_fp32,
        memory_gb=memory_gb,
        memory_gb_s=memory_gb_s,
        interconnect_gb_s=interconnect_gb_s,
    )


DEVICES: Mapping[str, Device] = {
    "V100": _device(125, 15.7, 32, 900, 150),
    "T4": _device(65, 8.1, 16, 320),
    "A10": _device(125, 62.5, 24, 600),
    "A100": _device(312, 156, 80, 2039, 300),
    "A100-40": _device(312, 156, 40, 1555, 300),
    "L4": _device(121, 60, 24, 300),
    "L40S": _device(362, 183, 48, 864),
    "RTX3090": _device(71, 35.6, 24, 936),
    "RTX4090": _device(165, 82.6, 24, 1008),
    "H100": _device(989, 495, 80, 3350, 450),
    "H200": _device(989, 495, 141, 4800, 450),
    "B200": _device(2250, 1125, 192, 8000, 900),
    "MI250X": _device(383, 95.7, 128, 3277),
    "MI300X": _device(1307, 654, 192, 5300, 448),
    "CPU": Device(tflops=0.06, tflops_fp32=0.06, memory_gb=16, memory_gb_s=20, reserved_gb=0.3),
}


def load(path: Path | None) -> dict[str, Device]:
    """The table, with the entries of a YAML file added or replaced.

    Raises:
        PlanError: the file cannot be read, or an entry is wrong.
    """
    found = dict(DEVICES)
    for name, entry in read_mapping(path, "devices").items():
        try:
            base = found[name].model_dump() if name in found else {}
            found[name] = Device(**{**base, **entry})
        except (TypeError, ValidationError) as error:
            wanted = ", ".join(Device.model_fields)
            raise PlanError(f"{path}: device {name!r}: {entry!r} is not one; wanted the keys {wanted}") from error
    return found


def read_mapping(path: Path | None, what: str) -> dict[str, Any]:
    """A YAML file with a mapping; nothing without a file.

    Raises:
        PlanError: it cannot be read, or is not a mapping.
    """
    if path is None:
        return {}
    try:
        document = Document.parse(read_text(path), str(path))
        if document.mistakes:
            raise document.error(document.mistakes)
    except RecipeError as error:
        raise PlanError(f"cannot read the table of {what} {path}: {error}") from None
    value = document.value
    if not isinstance(value, dict):
        raise PlanError(f"{path} has {type(value).__name__}; wanted a mapping by name, as docs/plan.md shows")
    return {str(name): entry for name, entry in value.items()}


def find(devices: Mapping[str, Device], name: str) -> Device:
    """A device by its name, whatever its case.

    Raises:
        PlanError: there is none.
    """
    for known, device in devices.items():
        if known.lower() == name.lower():
            return device
    raise PlanError(
        f"no device {name!r}; wanted NAME=COUNTxDEVICE, e.g. virginia=8xH100, with one of {', '.join(devices)}, or one "
        "of your own from --devices FILE"
    )
