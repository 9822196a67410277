"""Starts the processes of a case of `ranks.py` and reads what they have left."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests import fork_server
from weightgrad.lab.run.launch import free_port

SCRIPT = Path(__file__).parent / "ranks.py"
LIMIT_S = 300.0


def run(case: str, ranks: int, out: Path) -> list[dict[str, Any]]:
    """Run a case on so many ranks of one group; returns what each has left, in their order."""
    out.mkdir(parents=True, exist_ok=True)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    processes = []
    for rank in range(ranks):
        environment = {
            **os.environ,
            **address,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
        }
        with open(out / f"{case}-{rank}.log", "wb") as log:
            processes.append(
                fork_server.popen()(
                    [sys.executable, str(SCRIPT), case, str(out)],
                    env=environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
    codes = [process.wait(LIMIT_S) for process in processes]
    logs = [(out / f"{case}-{rank}.log").read_text() for rank in range(ranks)]
    assert codes == [0] * ranks, "\n".join(log[-3000:] for log in logs)
    left = [out / f"{rank}-of-{ranks}.pt" for rank in range(ranks)]
    return [torch.load(path, weights_only=False) for path in left if path.exists()]
