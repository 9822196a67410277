"""The simulator's errors, measured by the emulator, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from weightgrad.lab.report.number_text import bytes_text
from weightgrad.lab.run.validation import Prediction, ValidationResult
from weightgrad.machine import measured_on

_HEAD = (
    "strategy", "workers", "Mbit/s", "RTT ms", "step, simulated", "emulated", "error", "round", "emulated ", "waiting",
    "emulated  ", "WAN bytes", "LAN, simulated", "emulated   ", "LAN bytes", "models",
)  # fmt: skip


def _cells(row: ValidationResult) -> list[str]:
    return [
        row.strategy,
        _workers(row),
        f"{row.mbit_s:g}",
        f"{row.rtt_ms:g}",
        f"{1e3 * row.simulated_step_s:.1f} ms",
        f"{1e3 * row.emulated_step_s:.1f} ms",
        f"{100 * row.relative_error:+.1f} %" + ("" if row.trusted else " ?"),
        f"{1e3 * row.simulated_round_s:.1f} ms",
        f"{1e3 * row.emulated_round_s:.1f} ms",
        f"{1e3 * row.simulated_waiting_s:.1f} ms",
        f"{1e3 * row.emulated_waiting_s:.1f} ms",
        "equal" if row.bytes_equal else "differ",
        bytes_text(row.simulated_lan_bytes),
        bytes_text(row.emulated_lan_bytes),
        "equal" if row.lan_bytes_equal else "differ",
        "equal" if row.models_equal else "differ",
    ]


def _workers(row: ValidationResult) -> str:
    return ", ".join(str(count) for count in sorted(set(row.workers)))


def line(row: ValidationResult) -> str:
    """One result as a line of text."""
    return (
        f"{row.strategy}, workers a site: {_workers(row)}, at {row.mbit_s:g} Mbit/s, {row.rtt_ms:g} ms: a step takes "
        f"{1e3 * row.simulated_step_s:.1f} ms "
        f"simulated and {1e3 * row.emulated_step_s:.1f} ms emulated ({100 * row.relative_error:+.1f} %); WAN bytes "
        f"{'equal' if row.bytes_equal else 'differ'}, LAN bytes {'equal' if row.lan_bytes_equal else 'differ'}, "
        f"global models {'equal' if row.models_equal else 'differ'}; "
        f"{row.verdict}"
    )


def prediction_text(found: Prediction) -> str:
    """A prediction of the simulator and what the emulator measured, as text."""
    off = found.simulated.step_s / found.emulated.step_s - 1
    model = "the same global model, bit for bit, as" if found.models_equal else "ANOTHER global model than"
    same = "the same bytes in every round" if found.simulated.bytes == found.emulated.bytes else "other bytes"
    if any(found.simulated.lan_bytes):
        inside = found.simulated.lan_bytes == found.emulated.lan_bytes
        same += f" and {'the same' if inside else 'OTHER'} bytes inside the sites"
    return (
        f"It ended with {model} the simulator predicted, with {same}. "
        f"A step took {1e3 * found.emulated.step_s:.1f} ms; "
        f"the simulator predicted {1e3 * found.simulated.step_s:.1f} ms, an error of {100 * off:+.1f} %."
    )


def show(rows: Sequence[ValidationResult], console: Console) -> None:
    """Print the table and the largest error."""
    table = Table(box=None, pad_edge=False)
    for name in _HEAD:
        table.add_column(name.rstrip(), justify="left" if name == "strategy" else "right")
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)
    worst = max(rows, key=lambda row: abs(row.relative_error))
    console.print(f"largest error {100 * worst.relative_error:+.1f} %: {line(worst)}", markup=False, soft_wrap=True)


def markdown(rows: Sequence[ValidationResult]) -> str:
    """The table as Markdown."""
    head = f"| {' | '.join(name.strip() for name in _HEAD)} |\n|---|{'---:|' * (len(_HEAD) - 1)}\n"
    body = "".join(f"| {' | '.join(_cells(row))} |\n" for row in rows)
    return f"{head}{body}\n{measured_on()}.\n"
