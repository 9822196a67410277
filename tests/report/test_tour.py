"""The tour in three steps with three codecs: the files it writes, and the numbers in them."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from weightgrad import cli, codecs, wire
from weightgrad.errors import SpecError, WeightGradError
from weightgrad.report import tour, tour_chart, tour_page
from weightgrad.train import digits

SPECS = ("fp32", "dgc(fraction=0.01)", "ef(topk(0.01) > qsgd(bits=4))")
WEIGHT_SPECS = ("fp16", "lossaware(bits='ternary')")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tour")
    made = tour.measure(directory, tour.Plan(steps=3), gradient_specs=SPECS, weight_specs=WEIGHT_SPECS)
    with (directory / "printed.txt").open("w") as file:
        tour_page.show(made, directory, Console(file=file, width=80))
    return directory


@pytest.fixture(scope="module")
def numbers(out: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((out / "tour.json").read_text())
    return read


def test_json_has_every_number(numbers: dict[str, Any]) -> None:
    assert numbers["complete"]
    assert [row["codec"] for row in numbers["gradients"]] == list(SPECS)
    assert [row["codec"] for row in numbers["weights"]] == list(WEIGHT_SPECS)
    assert set(numbers["gradients"][0]) == {
        "codec",
        "feedback",
        "frame_bytes_per_step",
        "bits_per_element",
        "times_smaller",
        "error_of_step",
        "error_of_run",
        "codec_mb_s",
        "accuracy",
        "accuracy_minus_fp32",
        "diverged_at_step",
    }
    assert {"plan", "parameters", "measured_on", "kernels", "threads", "seconds"} <= set(numbers)


def test_fp32_costs_its_elements_and_the_frames(numbers: dict[str, Any]) -> None:
    tensors = list(digits.LeNet().parameters())
    frames = [wire.frame_bytes(codecs.Fp32().encode(tensor, {}, 0)[0]) for tensor in tensors]
    fp32 = numbers["gradients"][0]
    assert fp32["bits_per_element"] == pytest.approx(8 * sum(frames) / numbers["parameters"])
    assert 32 < fp32["bits_per_element"] < 32.1
    assert fp32["frame_bytes_per_step"] == 2 * sum(frames)
    assert fp32["error_of_step"] == fp32["error_of_run"] == 0


def test_errors_are_none_where_none_is_defined(numbers: dict[str, Any]) -> None:
    _, dgc, sparse = numbers["gradients"]
    assert dgc["error_of_step"] is None
    assert sparse["error_of_step"] > 0
    assert sparse["feedback"]


def test_loss_aware_weights_leave_the_first_and_last_layer(numbers: dict[str, Any]) -> None:
    sizes = [tensor.numel() for tensor in digits.LeNet().parameters() if tensor.dim() > 1]
    half, ternary = numbers["weights"]
    assert half["encoded_elements"] == sum(sizes)
    assert ternary["encoded_elements"] == sum(sizes[1:-1])
    assert ternary["frame_bytes"] < half["frame_bytes"]


def test_frames_of_one_step_parse(out: Path) -> None:
    payloads = list(wire.frames(bytearray((out / "gradients.wg").read_bytes())))
    assert [payload.shape for payload in payloads] == [tuple(t.shape) for t in digits.LeNet().parameters()]
    assert {payload.codec for payload in payloads} == {"sparse"}


def test_page_loads_nothing(out: Path) -> None:
    page = (out / "tour.html").read_text()
    tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page)
    assert tags
    assert not [tag for tag in tags if re.search(r"\b(?:src|href)\s*=", tag)]
    assert not re.search(r"@import|url\(\s*['\"]?https?:", page[: page.index("</style>")])
    assert "prefers-color-scheme: dark" in page
    assert "ef(topk(0.01) &gt; qsgd(bits=4))" in page


def test_print_fits_eighty_columns(out: Path) -> None:
    lines = (out / "printed.txt").read_text().splitlines()
    tables = [line for line in lines if "/" not in line]
    assert max(map(len, tables)) <= 80
    assert lines[-1].strip() == f"weightgrad inspect {out / 'gradients.wg'}"


def test_labels_do_not_overlap() -> None:
    rows = [_row(spec, 0.1 * 1.3**place, 0.97) for place, spec in enumerate(tour.GRADIENT_SPECS)]
    axes = tour_chart._axes(rows)
    boxes = []
    for row, (dx, dy) in zip(rows, tour_chart.place_labels(rows, axes), strict=True):
        x, y = axes.at(row)
        boxes.append(tour_chart._around(x + dx, y + dy, tour_chart._LETTER * len(row.codec), tour_chart._LINE))
    assert sum(a.overlap(b) for place, a in enumerate(boxes) for b in boxes[:place]) == 0


def _row(spec: str, bits: float, accuracy: float) -> tour.GradientRow:
    return tour.GradientRow(spec, False, 1.0, bits, 32 / bits, 0.1, 0.1, 100.0, accuracy, 0.0, None)


def test_divergence_is_a_row_not_a_traceback() -> None:
    plan = tour.Plan(steps=6, learning_rate=1e30)
    row = tour.train("fp32", plan, digits.load()).row
    assert row.diverged_at_step is not None
    made = tour.Tour(plan, 1, 1, gradients=[row])
    assert tour_page.gradient_cells(made)[0][-1] == "lost"


def test_same_seed_same_bytes() -> None:
    data, plan = digits.load(), tour.Plan(steps=2)
    first, second = (tour.train("qsgd(bits=2)", plan, data) for _ in range(2))
    assert first.frames == second.frames


def test_every_spec_of_the_tour_is_one() -> None:
    for spec in tour.GRADIENT_SPECS + tour.WEIGHT_SPECS:
        codecs.parse(spec)
    assert tour.GRADIENT_SPECS[0] == "fp32"
    assert tour.FRAMES_SPEC in tour.GRADIENT_SPECS


def test_plan_names_the_field() -> None:
    with pytest.raises(SpecError, match=r"Plan\.steps is 0"):
        tour.Plan(steps=0)


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WeightGradError, match=r"scikit-learn is not installed; pip install 'weightgrad\[demo\]'"):
        digits.load()


def test_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tour, "measure", interrupted)
    result = CliRunner().invoke(cli.app, ["tour", "--out", str(tmp_path)])
    assert result.exit_code == 130
    assert result.output.strip() == f"Interrupted. What was finished is in {tmp_path}."
