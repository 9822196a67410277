"""The field, measured: throughput and memory of the global server, memory and step time of a site, time to recover.

    python benchmarks/bench_field.py --quick
    python benchmarks/bench_field.py --out docs/field.md --json runs/field.json

Everything is done with the real processes on one machine: `weightgrad serve`, sites under torchrun, gRPC, TLS.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import field_ahead
import field_memory
import field_overhead
import field_recovery
import field_throughput
import torch
from field_sheet import Sheet

from weightgrad.report.machine import measured_on

Part = Callable[[bool, Callable[[str], None]], list[Sheet]]

PARTS: dict[str, Part] = {
    "throughput": lambda quick, say: field_throughput.measure(
        field_throughput.QUICK if quick else field_throughput.Plan(), say
    ),
    "memory": lambda quick, say: field_memory.measure(field_memory.QUICK if quick else field_memory.Plan(), say),
    "overhead": lambda quick, say: field_overhead.measure(
        field_overhead.QUICK if quick else field_overhead.Plan(), say
    ),
    "ahead": lambda quick, say: field_ahead.measure(field_ahead.QUICK if quick else field_ahead.Plan(), say),
    "recovery": lambda quick, say: field_recovery.measure(
        field_recovery.QUICK if quick else field_recovery.Plan(), say
    ),
}


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure the field: server, sites, recovery.")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats: whether it works at all")
    parser.add_argument("--only", action="append", choices=PARTS, help="only this part; may be given again")
    parser.add_argument("--out", type=Path, help="also write a Markdown file")
    parser.add_argument("--json", type=Path, help="also write the numbers")
    return parser.parse_args()


def document(sheets: list[Sheet], arguments: argparse.Namespace) -> str:
    """All sheets as a dated Markdown text."""
    command = " ".join(
        ["python benchmarks/bench_field.py"]
        + (["--quick"] if arguments.quick else [])
        + [f"--only {name}" for name in arguments.only or ()]
    )
    head = f"# The field, measured\n\n```sh\n{command}\n```\n\n{measured_on()}.\n"
    return "\n".join([head, *(sheet.markdown() for sheet in sheets)])


def main() -> None:
    """Measure, print, write."""
    arguments = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    torch.set_num_threads(1)

    def say(line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)

    sheets: list[Sheet] = []
    for name in arguments.only or PARTS:
        sheets += PARTS[name](arguments.quick, say)
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            found = {"measured_on": measured_on(), "sheets": [sheet.as_dict() for sheet in sheets]}
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
        if arguments.out:
            arguments.out.write_text(document(sheets, arguments))
    print(document(sheets, arguments))


if __name__ == "__main__":
    main()
