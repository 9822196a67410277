"""The launches of the Triton kernels, compiled for GPUs that this machine does not have.

`recorded` notes how each kernel is launched while Triton interprets it: types, constants, options. As a script, in a
process without TRITON_INTERPRET, this file compiles each launch of such a list to machine code, which needs no GPU and
no driver, and writes one line of JSON for each: the kernel, the GPU, its fused multiply-adds, and the error if any.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

TARGETS = {"A100": ("cuda", 80, 32), "H100": ("cuda", 90, 32), "MI300": ("hip", "gfx942", 64)}
TYPES = {
    torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8",
}  # fmt: skip
OPTIONS = ("enable_fp_fusion", "num_warps", "num_stages")
FUSED = re.compile(r"\b(?:fma\.r\w+\.\w+|v_(?:pk_)?fmac?_f\w+|v_(?:pk_)?mad_f\w+)\b")
"""A product and a sum that are rounded once, as PTX and AMD's assembler write them."""


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
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def compiled(launch: dict[str, Any], target: tuple[Any, ...]) -> dict[str, str]:
    """A launch in the languages on its way to machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = launch["kernel"].split(":")
    kernel = getattr(importlib.import_module(module), name)
    source = ASTSource(kernel, {one: launch["kinds"][one] for one in kernel.arg_names}, constexprs=launch["constants"])
    return dict(triton.compile(source, target=GPUTarget(*target), options=launch["options"]).asm)


def main(path: str) -> None:
    for line in Path(path).read_text().splitlines():
        launch = json.loads(line)
        for gpu, target in TARGETS.items():
            fused, size, error = [], 0, ""
            try:
                code = compiled(launch, target)
                fused = FUSED.findall(code["ptx" if target[0] == "cuda" else "amdgcn"])
                size = len(code["cubin" if target[0] == "cuda" else "hsaco"])
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
            found = {"kernel": launch["kernel"], "gpu": gpu, "bytes": size, "fused": fused, "error": error}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
