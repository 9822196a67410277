"""GPT-2 medium on two sites over an emulated link, real processes on one machine: does it run, wait, fit?"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployment.server_process import BENCHMARKS, peak_memory
from result_table import ResultTable, Row, parameters

from weightgrad.errors import RunError
from weightgrad.lab.bench.allocations import counted
from weightgrad.lab.bench.allocations import peaks as counted_peaks
from weightgrad.lab.emulate import Network, WanLink, open_wan
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.launch import Processes, free_port
from weightgrad.runtime.security import certificates

MODULE = "deployment.large_process"
HUB, SITES = "hub", ("east", "west")
_BYTES_A_PARAMETER = {"sgd": 12, "adamw": 16}  # weights, gradients and the optimizer's state
_PROCESS_BYTES = 500_000_000  # of code and libraries, and of what does not grow with the model


@dataclass(frozen=True)
class Plan:
    """What is trained, and over what.

    Attributes:
        shape: Of the GPT.
        batch: Sequences in a step.
        optimizer: "sgd" (with momentum) or "adamw".
        strategy: A preset.
        steps: Of each site.
        bandwidth_bit_s: Of each site's link.
        delay_seconds: One way.
        kind: Of the emulated network; see `open_wan`.
        check_memory: Whether to refuse to start where it would not fit.
    """

    shape: Mapping[str, int] = field(
        default_factory=lambda: {"vocabulary": 50257, "context": 64, "width": 1024, "layers": 24, "heads": 16}
    )
    batch: int = 1
    optimizer: str = "sgd"
    strategy: str = "auto"
    steps: int = 20
    bandwidth_bit_s: float = 100e6
    delay_seconds: float = 0.08
    kind: str = "auto"
    check_memory: bool = True
    timeout: float = 3600.0


QUICK = Plan(shape={"vocabulary": 500, "context": 16, "width": 64, "layers": 2, "heads": 2}, kind="modelled")


def measure(plan: Plan, report: Callable[[str], None]) -> list[ResultTable]:
    """Run it, in one table by process and one row about time."""
    if plan.check_memory:
        check_memory(plan)
    with tempfile.TemporaryDirectory() as name:
        links = [
            WanLink(between=(HUB, site), bandwidth_bit_s=plan.bandwidth_bit_s, delay_seconds=plan.delay_seconds)
            for site in SITES
        ]
        with open_wan([HUB, *SITES], links, kind=plan.kind) as wan:
            report(f"large: {wan.reason}")
            found = _run(plan, Path(name), wan, report)
            how = type(wan).__name__ + f" ({wan.reason})"
    return _tables(plan, found, how)


def numel_of(shape: Mapping[str, int]) -> int:
    """The parameters of a GPT of this shape, with tied embeddings."""
    width, layers = shape["width"], shape["layers"]
    return (shape["vocabulary"] + shape["context"] + 2) * width + layers * (12 * width * width + 4 * width)


def check_memory(plan: Plan) -> None:
    """Refuse to begin what would not fit.

    Raises:
        RunError: There is less memory than two sites and a server would take.
    """
    numel = numel_of(plan.shape)
    site, server = numel * (_BYTES_A_PARAMETER[plan.optimizer] + 9), numel * 10
    wanted = 2 * site + server + 3 * _PROCESS_BYTES
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    if free < wanted:
        raise RunError(
            f"{free / 1e9:.1f} GB of memory are free, and this takes about {wanted / 1e9:.1f}; end other programs, or "
            "take a smaller model or another optimizer"
        )


def _recipe(plan: Plan) -> Recipe:
    rate, delay = f"{plan.bandwidth_bit_s / 1e6:g} Mbit/s", f"{1000 * plan.delay_seconds:g} ms"
    text = {
        "name": "large",
        "seed": 3,
        "data": {"name": "digits"},  # the sites bring their own model and data
        "model": {"name": "lenet-digits"},
        "training": {"steps": plan.steps, "batch": 2, "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9}},
        "server": {"name": HUB},
        "sites": [{"name": site, "workers": 1} for site in SITES],
        "links": [{"between": [HUB, site], "bandwidth": rate, "delay": delay} for site in SITES],
        "compute": {"seconds_per_step": 1.0},
        "strategy": {"name": plan.strategy},
    }
    return Recipe.parse(json.dumps(text), "large.yaml")


class _Peaks:
    """The peaks of resident memory of each host, by looking now and then."""

    def __init__(self, wan: Network) -> None:
        self._wan = wan
        self.rss = dict.fromkeys(wan.hosts, 0)

    def look(self) -> None:
        """The largest process of a host is the one that counts; others are wrappers around it."""
        for name in self._wan.hosts:
            for pid in self._wan.host(name).pids():
                with suppress(OSError, StopIteration):
                    self.rss[name] = max(self.rss[name], peak_memory(pid))


def _run(plan: Plan, out: Path, wan: Network, report: Callable[[str], None]) -> dict[str, Any]:
    own = wan.host(HUB).address
    port = free_port() if own == "127.0.0.1" else 7443
    certificates.create(out / "certs", ["localhost", own], list(SITES))
    (out / "recipe.yaml").write_text(_recipe(plan).to_yaml())
    (out / "logs").mkdir()
    for name in wan.hosts:
        (out / "counters" / name).mkdir(parents=True)
    processes, peaks = Processes(out / "logs"), _Peaks(wan)
    until = time.monotonic() + plan.timeout

    def start(name: str, host: str, command: list[str]) -> None:
        def popen(words: Sequence[str], *, env: Mapping[str, str], **keywords: Any) -> Any:
            paths = os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent)])
            more = {**counted(out / "counters" / host), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
            return wan.host(host).popen(words, env={**env, **more}, **keywords)

        processes.start(name, command, popen)

    def wait(done: Callable[[], bool]) -> None:
        while not done():
            if (failed := processes.failed()) is not None:
                raise RunError(f"{failed} failed:\n{processes.tail(failed, 30)}")
            if time.monotonic() > until:
                raise RunError(f"not finished after {plan.timeout:g} s")
            peaks.look()
            time.sleep(0.2)

    try:
        serve = [sys.executable, "-m", "weightgrad", "serve", str(out / "recipe.yaml"), "--listen", f"{own}:{port}"]
        serve += ["--credentials", str(out / "certs"), "--state", str(out / "state"), "--metrics", "127.0.0.1:0"]
        start("server", HUB, [*serve, "--until-finished"])
        for number, site in enumerate(SITES):
            settings = {"address": wan.reach(site, HUB, port), "site": site, "number": number, "batch": plan.batch}
            settings |= {"certificates": str(out / "certs"), "timeout": 600.0, "shape": dict(plan.shape)}
            settings |= {"steps": plan.steps, "optimizer": plan.optimizer, "out": str(out / f"{site}.json")}
            settings |= {"counters": str(out / "counters" / site)}
            start(site, site, [sys.executable, "-m", MODULE, json.dumps(settings)])
        report("large: started")
        wait(lambda: all((out / f"{site}.json").exists() for site in SITES))
        wait(processes.all_done)
    finally:
        processes.end()
    found: dict[str, Any] = {site: json.loads((out / f"{site}.json").read_text()) for site in SITES}
    found["rss"] = peaks.rss
    found["counted"] = counted_peaks(out / "counters" / HUB)
    return found


def _tables(plan: Plan, found: dict[str, Any], how: str) -> list[ResultTable]:
    numel = found[SITES[0]]["parameters"]
    link = f"{plan.bandwidth_bit_s / 1e6:g} Mbit/s and {2000 * plan.delay_seconds:g} ms of round trip"
    about = (
        f"A GPT of {parameters(round(numel, -5))} parameters ({plan.shape['layers']} layers, width "
        f"{plan.shape['width']}, context {plan.shape['context']}, batch {plan.batch}), {plan.optimizer}, strategy "
        f"{plan.strategy}, {plan.steps} steps; two sites and a global server, each one process on this machine, mutual "
        f"TLS, links of {link}: {how}."
    )
    times = ResultTable(
        "large",
        f"Two sites over {link}",
        about + " Joining: the first model is sent to the server, once. Waiting: of the time that the steps took.",
        [
            ("site", "site", "{}"),
            ("joining s", "join_s", "{:.1f}"),
            ("plain step s", "plain_s", "{:.2f}"),
            ("step s", "step_s", "{:.2f}"),
            ("steps took s", "train_s", "{:.1f}"),
            ("waiting s", "waited_s", "{:.2f}"),
            ("waiting %", "waiting_percent", "{:.1f}"),
            ("rounds", "rounds", "{:d}"),
            ("MB up", "up_mb", "{:.1f}"),
            ("MB down", "down_mb", "{:.1f}"),
            ("leaving s", "leave_s", "{:.1f}"),
        ],
    )
    memory = ResultTable(
        "large-memory",
        "Memory of each process",
        "Peaks from the start to the end. Counted: tensors and buffers. Added: beyond the plain training loop.",
        [
            ("process", "process", "{}"),
            ("peak RSS GB", "rss_gb", "{:.2f}"),
            ("peak counted GB", "counted_gb", "{:.2f}"),
            ("plain loop, counted GB", "plain_gb", "{:.2f}"),
            ("added GB", "added_gb", "{:.2f}"),
            ("added, bytes a parameter", "added", "{:.2f}"),
            ("kept between rounds", "kept", "{:.2f}"),
        ],
    )
    for site in SITES:
        one = found[site]
        times.rows.append(_time_row(site, one))
        memory.rows.append(_memory_row(site, one, found, numel))
    server: Row = {"process": "global server", "rss_gb": found["rss"][HUB] / 1e9, "numel": numel}
    server |= {"counted_gb": found["counted"] / 1e9, "added_gb": found["counted"] / 1e9}
    memory.rows.append(server | {"added": found["counted"] / numel})
    same = found[SITES[0]]["digest"] == found[SITES[1]]["digest"]
    times.notes.append(f"The global models of both sites are {'the same, bit for bit' if same else 'NOT the same'}.")
    return [times, memory]


def _time_row(site: str, one: Row) -> Row:
    return {
        "site": site,
        "join_s": one["join_seconds"],
        "plain_s": one["plain_seconds"],
        "step_s": statistics.median(one["seconds"]),
        "train_s": one["train_seconds"],
        "waited_s": one["waited"],
        "waiting_percent": 100 * one["waited"] / one["train_seconds"],
        "rounds": one["rounds"],
        "up_mb": one["up"] / 1e6,
        "down_mb": one["down"] / 1e6,
        "leave_s": one["leave_seconds"],
    }


def _memory_row(site: str, one: Row, found: dict[str, Any], numel: int) -> Row:
    plain = one["plain_peak"]["counted"]
    peak = max(one[f"{phase}_peak"]["counted"] for phase in ("plain", "join", "train", "leave"))
    return {
        "process": f"site {site}",
        "numel": numel,
        "rss_gb": found["rss"][site] / 1e9,
        "counted_gb": peak / 1e9,
        "plain_gb": plain / 1e9,
        "added_gb": (peak - plain) / 1e9,
        "added": (peak - plain) / numel,
        "kept": (max(level["counted"] for level in one["kept"]) - one["plain"]["counted"]) / numel,
    }
