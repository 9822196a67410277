"""`sbatch`, `srun` and `scontrol` for one machine: they run real processes, with the variables that Slurm sets.

The name of the link to this file says which of them it is. `sbatch` waits for the job, as `sbatch --wait` does, and
refuses an option that it does not know. All nodes are this machine, under the name localhost.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

OPTIONS = (  # of sbatch, as its manual page spells them
    "cpus-per-task", "gpus-per-node", "job-name", "mem", "nodelist", "nodes", "ntasks", "ntasks-per-node", "open-mode",
    "output", "partition", "signal", "time",
)  # fmt: skip
FLAGS = ("requeue",)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(allow_abbrev=False)
    for name in OPTIONS:
        found.add_argument(f"--{name}")
    for name in FLAGS:
        found.add_argument(f"--{name}", action="store_true")
    found.add_argument("script")
    found.add_argument("arguments", nargs=argparse.REMAINDER)
    return found


def sbatch(words: list[str]) -> None:
    given = parser().parse_args(words)
    text = Path(given.script).read_text()
    inside = re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)
    options = parser().parse_args([*inside, *words])  # those of the command come last and win
    nodes, job = int(options.nodes or 1), os.environ.get("FAKE_JOB_ID", "1")
    variables = {
        "SLURM_JOB_ID": job,
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": ",".join(["localhost"] * nodes),
        "SLURM_NTASKS_PER_NODE": options.ntasks_per_node or "1",
        "SLURM_CPUS_PER_TASK": options.cpus_per_task or "1",
    }
    if options.gpus_per_node:
        variables["SLURM_GPUS_ON_NODE"] = options.gpus_per_node
    log = os.open(options.output.replace("%j", job), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.execvpe("bash", ["bash", given.script, *given.arguments], {**os.environ, **variables})


def srun(words: list[str]) -> int:
    while words[0].startswith("--"):
        assert words[0] == "--kill-on-bad-exit=1", words[0]
        words = words[1:]
    tasks: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _: object) -> None:
        for task in tasks:
            task.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    for number, node in enumerate(os.environ["SLURM_JOB_NODELIST"].split(",")):
        variables = {"SLURM_PROCID": str(number), "SLURM_NODEID": str(number), "SLURMD_NODENAME": node}
        tasks.append(subprocess.Popen(words, env={**os.environ, **variables}))
    worst = 0
    for task in tasks:
        worst = max(worst, abs(task.wait()))
        if worst:
            for other in tasks:
                other.terminate()
    return worst


def scontrol(words: list[str]) -> int:
    if words[:2] == ["show", "hostnames"]:
        print("\n".join(words[2].split(",")))
        return 0
    assert words[0] == "requeue", words
    Path(os.environ["FAKE_REQUEUED"]).write_text(words[1])
    return 0


if __name__ == "__main__":
    sys.exit({"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[Path(sys.argv[0]).name](sys.argv[1:]))
