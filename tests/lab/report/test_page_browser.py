"""The report, opened in a browser that shows nothing: charts are drawn, nothing breaks, nothing is fetched."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from weightgrad.lab.report import comparison, page, runs

from . import fake_runs
from .browser import browser

CHARTS = {"accuracy", "loss", "timeline", "speedup", "sites", "links"}


def opened(file: Path, profile: Path, *, dark: bool = False) -> str:
    """The page as it is after its scripts have run."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--window-size=1200,3000"]
    flags += [f"--user-data-dir={profile}", f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    command = [browser(), *flags, "--virtual-time-budget=4000", "--dump-dom", file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def root(dom: str) -> str:
    found = re.search(r"<html[^>]*>", dom)
    assert found is not None
    return found[0]


def drawn(dom: str) -> dict[str, str]:
    """Each chart and its SVG."""
    pieces = re.split(r"<div class=\"chart[^\"]*\" id=\"chart-", dom)[1:]
    return {piece.split('"')[0]: piece for piece in pieces if 'data-drawn="' in piece.split(">")[0]}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six strategies, two seeds; one site's name tries to break out."""
    directory = tmp_path_factory.mktemp("report")
    fake_runs.write_all(directory, steps=60, faults=True)
    evil = json.dumps("<b></script><img src=x onerror=\"document.title='owned'\">")[1:-1]
    for file in directory.rglob("*.json*"):
        file.write_text(file.read_text().replace("virginia", evil))
    found, skipped = runs.find([directory])
    page.write(comparison.grouped(found), directory / "report.html", skipped=skipped)
    return directory / "report.html"


def test_charts_are_drawn_in_light_and_dark(report: Path, tmp_path: Path) -> None:
    light, dark = (opened(report, tmp_path / f"profile-{dark}", dark=dark) for dark in (False, True))
    for dom in (light, dark):
        assert 'data-errors=""' in root(dom)
        charts = drawn(dom)
        assert set(charts) == CHARTS
        for name, chart in charts.items():
            assert "<svg" in chart, name
        assert charts["accuracy"].count('class="trace scatter') == 12  # six lines and their bands
        assert charts["speedup"].count('class="point"') == 6
        assert "<title>WeightGrad: paper</title>" in dom
        assert "<img" not in dom
    ink = {"light": "rgb(27, 34, 48)", "dark": "rgb(230, 234, 241)"}
    assert ink["light"] in drawn(light)["speedup"]
    assert ink["dark"] in drawn(dark)["speedup"]
    assert ink["light"] not in drawn(dark)["speedup"]


def test_an_error_and_a_request_would_be_seen(report: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    text = report.read_text(encoding="utf-8").replace('id="data">{"strategies"', 'id="data">{"nothing"')
    text = text.replace("</body>", "<img src='http://127.0.0.1:9/x.png'></body>")
    broken.write_text(text, encoding="utf-8")
    dom = opened(broken, tmp_path / "profile")
    assert "blocked http://127.0.0.1:9/x.png" in root(dom)
    assert "TypeError" in root(dom)
    assert not drawn(dom)
