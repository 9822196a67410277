"""`weightgrad doctor`: this machine, and the way to the global server, looked at before a run."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

import weightgrad
from weightgrad import kernels, units
from weightgrad.extras import extras
from weightgrad.machine import processor
from weightgrad.runtime.doctor.planned_needs import PlannedNeeds, planned_needs
from weightgrad.runtime.doctor.rank_check import check_ranks
from weightgrad.runtime.doctor.server_findings import server_findings
from weightgrad.runtime.doctor.site_checks import Finding, Level, site_findings

_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILURE: "red"}


def doctor(
    server: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="The global server, to look at the way there too.")
    ] = None,
    credentials: Annotated[Path | None, typer.Option(help="The certificates of this site.", file_okay=False)] = None,
    site: Annotated[
        str | None, typer.Option(help="The site, where --credentials is the directory of all machines.")
    ] = None,
    state: Annotated[Path | None, typer.Option(help="The state directory of the run.", file_okay=False)] = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory that a rank needs, e.g. 40 GB; `weightgrad plan` says it.")
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="A file of `weightgrad plan --json`: memory and room that it says.", dir_okay=False),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="How long to measure the line to the server, each way.", min=0.0, max=10.0)
    ] = 3.0,
    ranks: Annotated[
        bool | None,
        typer.Option(
            help="Let ranks exchange a vector: those of torchrun, or two here.",
            show_default="with --server or torchrun",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Print versions and kernels, and check what a run needs; ends with 1 if something would fail."""
    console = Console(highlight=False, soft_wrap=True)
    cuda = f"{torch.cuda.device_count()} device(s)" if torch.cuda.is_available() else "none"
    facts = {
        "weightgrad": weightgrad.__version__,
        "kernels": str(kernels.status()),
        "on GPUs": str(kernels.gpu_status()),
        "threads": f"{kernels.get_threads()} for large buffers",
        "processor": processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": cuda,
    }
    wanted = planned_needs(plan, site) if plan is not None else PlannedNeeds()
    checks = list(
        site_findings(
            server,
            credentials,
            state,
            site=site,
            memory_bytes=units.size(memory) if memory is not None else wanted.memory_bytes,
            room_bytes=wanted.room_bytes,
            more=lambda server, own: server_findings(server, own, seconds=seconds),
        )
    )
    if ranks or (ranks is None and (server is not None or "RANK" in os.environ)):
        checks.append(check_ranks())
    if as_json:
        found = [{"check": one.check, "level": one.level.value, "text": one.text} for one in checks]
        print(json.dumps({**facts, "checks": found}, indent=1))
    else:
        for name, value in facts.items():
            console.print(f"{name:12}{value}", markup=False)
        for extra in extras():
            there = f"not installed ({', '.join(extra.missing)}); pip install 'weightgrad[{extra.name}]'"
            console.print(f"[{extra.name}]: {extra.adds}: {there if extra.missing else 'installed'}", markup=False)
        console.print()
        for one in checks:
            colour = _COLOURS[one.level]
            console.print(f"[{colour}]{one.level.value:8}[/] {one.check:12}", end="")
            console.print(one.text, markup=False)
        console.print(f"\n{_summary(checks)}", markup=False)
    if any(one.level is Level.FAILURE for one in checks):
        raise typer.Exit(1)


def _summary(checks: Sequence[Finding]) -> str:
    """How many checks there were, and what they found."""
    levels = Counter(one.level for one in checks)
    found = [(levels[Level.FAILURE], "failure"), (levels[Level.WARNING], "warning")]
    wrong = ", ".join(f"{count} {what}{'' if count == 1 else 's'}" for count, what in found if count)
    return f"{len(checks)} checks: {wrong or 'all ok'}"
