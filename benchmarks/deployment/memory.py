"""Memory of the global server and of a site's workers, beyond the model, and what that memory consists of."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deployment.server_process import Serve, popen, recipe_of, worker
from result_table import ResultTable, Row, parameters

MODULE = "deployment.memory_process"
PARTIES = {"server": "global server", "rank-0": "rank 0", "rank-1": "rank 1"}


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    numels: tuple[int, ...] = (1_000_000, 4_000_000, 16_000_000)
    strategies: tuple[str, ...] = ("baseline", "weightgrad", "diloco")
    steps: int = 25


QUICK = Plan(numels=(1_000_000,), strategies=("weightgrad",), steps=12)


def measure(plan: Plan, report: Callable[[str], None]) -> list[ResultTable]:
    """Measure the peaks, and for the largest model what they consist of."""
    peaks = ResultTable(
        "memory",
        "Memory beyond the model",
        "One site of two ranks, SGD with momentum, mutual TLS, checkpoints on both sides. Of a site: the peak of its "
        "resident memory after `prepare` less what it had before, with weights, gradients and momentum already there. "
        "Of the server: the peak less what it had when it listened; one model of it is the global model itself. × is "  # noqa: RUF001
        "in models: 4 bytes times the parameters.",
        [("strategy", "strategy", "{}"), ("parameters", "shown", "{}"), ("model MB", "model_mb", "{:.0f}")]
        + [
            column
            for key, heading in PARTIES.items()
            for column in ((f"{heading} MB", f"{key}_mb", "{:.0f}"), ("×", f"{key}_models", "{:.1f}"))  # noqa: RUF001
        ],
    )
    made = ResultTable(
        "memory-parts",
        "What that memory consists of",
        "Tensors and buffers that can be reached from the site or the server at the end, in models, each piece once, "
        "without the user's own weights, gradients and momentum. The rest of the peak is what lives for a moment: "
        "copies for a checkpoint, messages on their way, what codecs work on.",
        [("strategy", "strategy", "{}"), ("who", "who", "{}"), ("what", "what", "{}"), ("×", "models", "{:.2f}")],  # noqa: RUF001
    )
    for strategy in plan.strategies:
        for numel in plan.numels:
            report(f"memory: {strategy}, {parameters(numel)}")
            found = _measure(plan, strategy, numel)
            peaks.rows.append(_peaks(strategy, numel, found))
            if numel == max(plan.numels):
                made.rows += _made_of(strategy, numel, found)
        peaks.notes += _slope(strategy, [row for row in peaks.rows if row["strategy"] == strategy])
    return [peaks, made]


def _measure(plan: Plan, strategy: str, numel: int) -> dict[str, Row]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        command = [sys.executable, "-m", MODULE, "serve"]
        with Serve(directory, recipe_of(1, {"name": strategy}), secure=True, state=True, command=command) as server:
            settings = {"address": server.address, "certificates": str(server.certificates), "out": name}
            server.processes.start("site", worker(MODULE, 2, {**settings, "numel": numel, "steps": plan.steps}), popen)
            server.wait("site")
            server.wait("server")
        return {key: json.loads((directory / f"{key}.json").read_text()) for key in PARTIES}


def _peaks(strategy: str, numel: int, found: dict[str, Row]) -> Row:
    row: Row = {"strategy": strategy, "shown": parameters(numel), "numel": numel, "model_mb": 4 * numel / 1e6}
    for key, one in found.items():
        row[f"{key}_mb"] = (one["peak"] - one["before"]) / 1e6
        row[f"{key}_models"] = (one["peak"] - one["before"]) / (4 * numel)
    return row


def _slope(strategy: str, rows: list[Row]) -> list[str]:
    """How memory grows with the model, by the line through the smallest and the largest model."""
    small, large = rows[0], rows[-1]
    if small["numel"] == large["numel"]:
        return []
    words = []
    for key, heading in PARTIES.items():
        times = (large[f"{key}_mb"] - small[f"{key}_mb"]) / (large["model_mb"] - small["model_mb"])
        words.append(f"{heading} {times:.1f} models + {small[f'{key}_mb'] - times * small['model_mb']:.0f} MB")
    return [f"{strategy}: {', '.join(words)} (the line through {small['shown']} and {large['shown']})."]


def _made_of(strategy: str, numel: int, found: dict[str, Row]) -> list[Row]:
    rows = []
    for key, heading in PARTIES.items():
        one = found[key]
        rest = one["peak"] - one["before"] - sum(one["held"].values())
        for what, size in [*((f"`{name}`", size) for name, size in one["held"].items()), ("the rest", rest)]:
            rows.append({"strategy": strategy, "who": heading, "what": what, "models": size / (4 * numel)})
    return rows
