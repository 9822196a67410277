"""Measures a deployment: throughput and memory of the global server, memory and step time of a site, time to recover.

    python benchmarks/bench_field.py --quick
    python benchmarks/bench_field.py --out docs/field.md --json runs/field.json

Everything runs as real processes on one machine: `weightgrad serve`, sites under torchrun, gRPC, TLS.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from deployment import large, memory, overhead, recovery, server_work, throughput
from result_table import ResultTable

from weightgrad.machine import measured_on

Report = Callable[[str], None]
Measurement = Callable[[bool, Report], list[ResultTable]]

MEASUREMENTS: dict[str, Measurement] = {
    "throughput": lambda quick, report: throughput.measure(throughput.QUICK if quick else throughput.Plan(), report),
    "memory": lambda quick, report: memory.measure(memory.QUICK if quick else memory.Plan(), report),
    "overhead": lambda quick, report: overhead.measure(overhead.QUICK if quick else overhead.Plan(), report),
    "server": lambda quick, report: server_work.measure(server_work.QUICK if quick else server_work.Plan(), report),
    "large": lambda quick, report: large.measure(large.QUICK if quick else large.Plan(), report),
    "recovery": lambda quick, report: recovery.measure(recovery.QUICK if quick else recovery.Plan(), report),
}


def read_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Measure a deployment: server, sites, recovery.")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats, to see that it works")
    parser.add_argument("--only", action="append", choices=MEASUREMENTS, help="only this part; may be repeated")
    parser.add_argument("--out", type=Path, help="also write a Markdown file")
    parser.add_argument("--json", type=Path, help="also write the numbers")
    return parser.parse_args()


def document(tables: list[ResultTable], arguments: argparse.Namespace) -> str:
    """All tables as a dated Markdown text."""
    command = " ".join(
        ["python benchmarks/bench_field.py"]
        + (["--quick"] if arguments.quick else [])
        + [f"--only {name}" for name in arguments.only or ()]
    )
    head = f"# A deployment, measured\n\n```sh\n{command}\n```\n\n{measured_on()}.\n"
    return "\n".join([head, *(table.markdown() for table in tables)])


def main() -> None:
    """Measure, print the tables, and write them where the arguments say."""
    arguments = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit normally, so that started processes are ended
    torch.set_num_threads(1)

    def report(line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)

    tables: list[ResultTable] = []
    for name in arguments.only or MEASUREMENTS:
        tables += MEASUREMENTS[name](arguments.quick, report)
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            numbers = {"measured_on": measured_on(), "tables": [table.to_dict() for table in tables]}
            arguments.json.write_text(json.dumps(numbers, indent=1) + "\n")
        if arguments.out:
            arguments.out.write_text(document(tables, arguments))
    print(document(tables, arguments))


if __name__ == "__main__":
    main()
