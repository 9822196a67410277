"""`weightgrad serve` that also keeps the global model on disk after every so many steps, to be evaluated later.

python -m rivals.serve_keeping DIRECTORY STEPS serve RECIPE ...
"""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import save_file

from weightgrad.cli import main as weightgrad
from weightgrad.core.server.close_order import ClosedPart, CloseOrder
from weightgrad.runtime.server.shard_server import ShardServer


def keep(directory: Path, every: int) -> None:
    """Let every round that passes a multiple of `every` steps leave the file STEP.safetensors."""
    close, kept = ShardServer.close, 0

    def close_and_keep(self: ShardServer, order: CloseOrder) -> ClosedPart:
        nonlocal kept
        closed = close(self, order)
        step = closed.result.step
        if step // every > kept:
            kept = step // every
            save_file({"weights": self.shard.global_model.vector}, str(directory / f"{step:09}.safetensors"))
        return closed

    ShardServer.close = close_and_keep  # type: ignore[method-assign]


if __name__ == "__main__":
    keep(Path(sys.argv[1]), int(sys.argv[2]))
    sys.argv = ["weightgrad", *sys.argv[3:]]
    weightgrad()
