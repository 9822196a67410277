"""Starts cases of `cases.py` in processes of their own, with torch already imported, or Triton not yet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import fork_server
from weightgrad.lab.run.launch import free_port

SCRIPT = Path(__file__).parent / "run_case.py"
LIMIT_S = 300.0


def run(case: str, *arguments: str, out: Path, interpreted: bool = False) -> None:
    """Run a case to its end, perhaps with Triton's interpreter; what it prints is in the error if it fails."""
    process, log = start(case, *arguments, out=out, interpreted=interpreted)
    assert process.wait(LIMIT_S) == 0, log.read_text()[-5000:]


def start(
    case: str, *arguments: str, out: Path, rank: int = 0, ranks: int = 1, port: int = 0, interpreted: bool = False
) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a case, perhaps as one of several ranks."""
    log = out / f"{case}-{rank}.log"
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if interpreted else {})}
    if ranks > 1:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    with open(log, "wb") as file:
        process = (subprocess.Popen if interpreted else fork_server.popen())(
            [sys.executable, str(SCRIPT), case, *arguments],
            env=environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    return process, log


def start_ranks(kind: str, address: str, ranks: int, out: Path) -> list[tuple[subprocess.Popen[bytes], Path]]:
    """Start the ranks of a site that connect to a server."""
    port = free_port()
    return [start("rank", address, kind, str(out), out=out, rank=rank, ranks=ranks, port=port) for rank in range(ranks)]
