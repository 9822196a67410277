"""The table of the simulator against the emulator."""

from __future__ import annotations

import dataclasses
import io

from rich.console import Console

from weightgrad.lab.report import validation_table
from weightgrad.lab.run.validation import ValidationResult

ROW = ValidationResult(
    strategy="weightgrad",
    workers=(4, 4),
    mbit_s=100.0,
    rtt_ms=10.0,
    simulated_step_s=0.1,
    emulated_step_s=0.11,
    relative_error=-0.09,
    simulated_round_s=0.2,
    emulated_round_s=0.2,
    simulated_waiting_s=0.01,
    emulated_waiting_s=0.01,
    simulated_lan_bytes=9_490_608,
    emulated_lan_bytes=9_490_608,
    bytes_equal=True,
    lan_bytes_equal=True,
    models_equal=True,
    trusted=True,
    verdict="to be trusted",
)


def test_a_row_tells_workers_and_the_bytes_inside_the_sites() -> None:
    other = dataclasses.replace(ROW, workers=(1, 2), lan_bytes_equal=False, emulated_lan_bytes=1)
    out = io.StringIO()
    validation_table.show([ROW, other], Console(file=out, width=300))
    head, first, second, *_ = out.getvalue().splitlines()
    assert len(validation_table.markdown([ROW]).splitlines()[0].split("|")) == len(validation_table._cells(ROW)) + 2
    assert "workers" in head
    assert first.split().count("9.49") == 2
    assert "differ" not in first
    assert "1, 2" in second
    assert "differ" in second
    assert "LAN bytes differ" in validation_table.line(other)
    assert "workers a site: 4" in validation_table.line(ROW)
