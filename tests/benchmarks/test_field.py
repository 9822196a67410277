"""The measurements of a deployment, in their quick form: real processes, small sizes, every table has its rows."""

from __future__ import annotations

import bench_field
import pytest
from deployment import large, memory_formula

# Recovery is what the tests of crashes measure, too.
QUICK = sorted(bench_field.MEASUREMENTS.keys() - {"recovery"})


@pytest.mark.parametrize("name", QUICK)
def test_every_table_is_printed(name: str) -> None:
    tables = bench_field.MEASUREMENTS[name](True, lambda line: None)
    assert tables
    for table in tables:
        assert table.rows, table.title
        shown = table.markdown()
        assert shown.startswith(f"## {table.title}\n")
        assert len(table.cells(table.rows[0])) == len(table.columns)


def test_the_formula_is_checked_on_the_sizes_that_it_was_not_made_from() -> None:
    def row(numel: int, bytes_: float) -> dict[str, object]:
        return {"strategy": "auto", "ranks": 1, "numel": numel} | dict.fromkeys(memory_formula.WHAT, bytes_ / numel)

    sizes = {10: 8 * 10 + 100, 20: 8 * 20 + 100, 40: 1.1 * (8 * 40 + 100)}
    (table,) = memory_formula.tables([row(numel, size) for numel, size in sizes.items()])
    assert [found["slope"] for found in table.rows] == pytest.approx([8] * len(memory_formula.WHAT))
    assert {found["errors"] for found in table.rows} == {"-9.1"}
    assert table.rows[0]["7 B"] == pytest.approx(56)


def test_gpt_2_medium_has_355_million_parameters() -> None:
    assert round(large.numel_of(large.Plan().shape) / 1e6) == 354  # a shorter context than the original's 1024
