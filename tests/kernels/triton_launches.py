"""The launches of the Triton kernels, compiled for GPUs that this machine does not have.

`recorded` notes how each kernel is launched while Triton interprets it: types, constants, options. As a script, in a
process without TRITON_INTERPRET, this file compiles each launch of such a list to machine code, which needs no GPU
and no driver, and writes one line of JSON for each: the kernel, the GPU, its fused multiply-adds, registers, and the
error if any. For GPUs but the first one it compiles only the first launch of each kernel.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

TARGETS = {"A100": ("cuda", 80, 32), "H100": ("cuda", 90, 32), "MI300": ("hip", "gfx942", 64)}
TYPES = {torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8"}
ALIGNED = ":16"
"""Stands behind the type of what is divisible by 16, as Triton then compiles another kernel."""
OPTIONS = ("enable_fp_fusion", "num_warps", "num_stages")
FUSED = re.compile(r"\b(?:fma|mad)\.r\w[.\w]*\.f\w+")
"""A product and a sum of floats that are rounded once, in PTX. (AMD's assembler has them in every division.)"""


def recorded() -> dict[str, None]:
    """Launches from now on, as JSON, each once: a dictionary that keeps growing."""
    from triton.runtime.interpreter import GridExecutor

    found: dict[str, None] = {}
    run = GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        options = {name: given.pop(name) for name in OPTIONS if name in given}
        kinds = {name: _kind(value, name in self.constexprs) for name, value in given.items()}
        constants = {name: value for name, value in given.items() if kinds[name] == "constexpr"}
        kernel = f"{self.fn.__module__}:{self.fn.__name__}"
        found[json.dumps({"kernel": kernel, "kinds": kinds, "constants": constants, "options": options})] = None
        return run(self, *args, **kwargs)

    GridExecutor.__call__ = launch
    return found


def _kind(value: Any, constant: bool) -> str:
    """The type that Triton compiles for; an integer of 1 becomes a constant."""
    if constant or (isinstance(value, int) and value == 1):
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype] + (ALIGNED if value.data_ptr() % 16 == 0 else "")
    return ("i32" if -(1 << 31) <= value < 1 << 31 else "i64") + (ALIGNED if value % 16 == 0 else "")


def compiled(launch: dict[str, Any], target: tuple[Any, ...]) -> dict[str, Any]:
    """A launch in the languages on its way to machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = launch["kernel"].split(":")
    kernel = getattr(importlib.import_module(module), name)
    kinds = [launch["kinds"][one] for one in kernel.arg_names]
    types = {name: kind.removesuffix(ALIGNED) for name, kind in zip(kernel.arg_names, kinds, strict=True)}
    aligned = {(place,): [["tt.divisibility", 16]] for place, kind in enumerate(kinds) if kind.endswith(ALIGNED)}
    source = ASTSource(kernel, types, constexprs=launch["constants"], attrs=aligned)
    return dict(triton.compile(source, target=GPUTarget(*target), options=launch["options"]).asm)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes that are spilled, as the tool that comes with Triton reads them from the code."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "kernel.cubin"
        file.write_bytes(cubin)
        said = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    ((registers, stack, local),) = re.findall(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", said)
    return int(registers), int(stack) + int(local)


def main(path: str) -> None:
    seen: set[str] = set()
    for line in Path(path).read_text().splitlines():
        launch = json.loads(line)
        targets = list(TARGETS)[:1] if launch["kernel"] in seen else list(TARGETS)
        seen.add(launch["kernel"])
        for gpu in targets:
            fused, size, error, registers, spilled = [], 0, "", 0, 0
            try:
                code = compiled(launch, TARGETS[gpu])
                fused = FUSED.findall(code.get("ptx", ""))
                size = len(code.get("cubin") or code["hsaco"])
                if "cubin" in code:
                    registers, spilled = resources(code["cubin"])
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
            found = {"kernel": launch["kernel"], "gpu": gpu, "bytes": size, "fused": fused, "registers": registers}
            found |= {"spilled": spilled, "error": error}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
