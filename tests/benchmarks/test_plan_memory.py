"""The memory that `weightgrad plan` counts on fake tensors is what real steps allocate."""

from __future__ import annotations

from pathlib import Path

import plan_memory
import pytest

from weightgrad.errors import RunError
from weightgrad.lab.bench.allocations import counted


def test_a_million_parameters(tmp_path: Path) -> None:
    try:
        counted(tmp_path)
    except RunError as error:
        pytest.skip(str(error))
    planned, real = plan_memory.planned("1", "adamw").peak_bytes, plan_memory.allocated("1", "adamw")
    assert planned == pytest.approx(real, rel=0.10)
