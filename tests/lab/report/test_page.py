"""The report, without a browser: what is in the file and what is not."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from weightgrad.lab.report import comparison, page, page_charts, runs
from weightgrad.lab.report.page_charts import POINTS, styles, thin
from weightgrad.lab.report.runs import Run

from . import fake_runs


def made(directory: Path, **options: Any) -> str:
    found, skipped = runs.find([directory])
    return page.page(comparison.grouped(found), skipped=skipped, **options)


def without_scripts(text: str) -> str:
    return re.sub(r"<script\b[^>]*>.*?</script>", "", text, flags=re.DOTALL)


def data_of(text: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert match is not None
    read: dict[str, Any] = json.loads(match[1])
    return read


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("six")
    fake_runs.write_all(directory, steps=60, faults=True)
    return directory


@pytest.fixture(scope="module")
def text(six: Path) -> str:
    return made(six, command="weightgrad compare paper --strategies a,b")


def test_everything_is_there(text: str) -> None:
    body = without_scripts(text)
    for chart in ("accuracy", "loss", "timeline", "speedup", "sites", "links"):
        assert f"id='chart-{chart}'" in body
    for strategy in fake_runs.TRAITS:
        assert f"<th scope='row'>{strategy}</th>" in body
    assert "<pre class='command'>weightgrad compare paper --strategies a,b</pre>" in body
    assert body.count("<details>") == len(fake_runs.TRAITS)
    assert "seconds_per_step" in body
    assert "prefers-color-scheme: dark" in body
    assert "class='card warn'" not in body
    assert "Made by weightgrad. 2 cores, torch 2.9, 2026-11-16</footer>" in body


def test_nothing_is_loaded(text: str) -> None:
    body = without_scripts(text)
    assert not re.search(r"\b(?:src|href)\s*=|@import|url\(", body)
    assert "default-src 'none'" in body
    assert text.count("<script>") == 2  # plotly once, and ours
    assert not re.search(r"<script\b[^>]*\bsrc", text.split("<script>")[0])


def test_policy_names_the_scripts(text: str) -> None:
    found = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(found) == 2
    for script in found:
        assert page._hash(script) in text


def test_what_comes_from_files_is_escaped(tmp_path: Path) -> None:
    fake_runs.write_all(tmp_path, steps=10, seeds=1, faults=True)
    evil = "</script><img src=x onerror=alert(1)>"
    for file in tmp_path.rglob("*.*"):
        escaped = json.dumps(evil)[1:-1]
        changed = file.read_text().replace("virginia", escaped).replace("paper", escaped).replace("dgc", escaped)
        file.write_text(changed)
    text = made(tmp_path, command=evil)
    assert "<img" not in without_scripts(text)
    assert html.escape(evil) in text
    assert evil in data_of(text)["sites"]["seconds"]
    assert text.count("</script>") == 3


def test_the_threshold_of_each_site_is_a_table(tmp_path: Path) -> None:
    fake_runs.simulate(fake_runs.recipe(steps=10), tmp_path)
    assert "The threshold of" not in made(tmp_path)
    log = tmp_path / "events.jsonl"
    values = [("virginia", 0, 4.0), ("california", 0, 4.0), ("virginia", 12, 2.5)]
    lines = [{"kind": "threshold", "t": 0.1, "site": site, "step": step, "value": g} for site, step, g in values]
    log.write_text(log.read_text() + "".join(json.dumps(line) + "\n" for line in lines))
    text = made(tmp_path)
    assert "<tr><th>step</th><th>virginia</th><th>california</th></tr>" in text
    assert "<tr><th>12</th><td>2.50</td><td></td></tr>" in text


def test_data_is_finite_json(tmp_path: Path) -> None:
    fake_runs.simulate(fake_runs.recipe(steps=10), tmp_path)
    events = tmp_path / "events.jsonl"
    events.write_text(re.sub(r'"loss": [\d.]+, "site"', '"loss": null, "site"', events.read_text()))
    text = made(tmp_path)
    assert "NaN" not in json.dumps(data_of(text))
    assert set(data_of(text)["loss"]["weightgrad"]["mean"]) == {None}


def test_long_runs_are_thinned(tmp_path: Path) -> None:
    fake_runs.simulate(fake_runs.recipe(steps=3000).with_settings(["training.evaluate_every=2"]), tmp_path)
    data = data_of(made(tmp_path))
    assert len(Run.read(tmp_path).evaluations) == 1500
    for kind in ("accuracy", "loss"):
        line = data[kind]["weightgrad"]
        assert 300 < len(line["step"]) <= POINTS
        assert line["step"][-1] == 3000
        assert {len(values) for values in line.values()} == {len(line["step"])}


def test_thin_keeps_the_ends() -> None:
    assert thin(range(5), 5) == [0, 1, 2, 3, 4]
    kept = thin(range(10_000), 400)
    assert (len(kept), kept[0], kept[-1]) == (400, 0, 9999)
    assert kept == sorted(set(kept))


def test_mean_and_range_over_seeds(six: Path) -> None:
    data = data_of(made(six))
    line = data["accuracy"]["gaia"]
    seeds = [Run.read(six / "gaia" / f"seed-{seed}").evaluations[-1] for seed in range(2)]
    values = [100 * float(one["accuracy"]) for one in seeds]
    assert (line["low"][-1], line["high"][-1]) == (min(values), max(values))
    assert line["mean"][-1] == pytest.approx(sum(values) / 2)
    assert line["bytes"][-1] == seeds[0]["wan_bytes"]


def test_bytes_between_evaluations(tmp_path: Path) -> None:
    fake_runs.simulate(fake_runs.recipe(steps=40), tmp_path)
    run = Run.read(tmp_path)
    first = run.evaluations[0]
    assert page_charts.bytes_at(run, [0.0, first["t"] / 2, first["t"]]) == pytest.approx(
        [0.0, first["wan_bytes"] / 2, first["wan_bytes"]]
    )
    assert page_charts.bytes_at(run, [1e9]) == [run.summary["wan_bytes"]]


def test_links_add_up(six: Path) -> None:
    links = data_of(made(six))["links"]
    assert sorted(links["names"]) == sorted(
        ["virginia → ohio", "ohio → virginia", "california → ohio", "ohio → california"]
    )
    run = Run.read(six / "baseline" / "seed-0")
    assert sum(links["bytes"]["baseline"]) == sum(sum(line["bytes"]) for line in run.links)


def test_many_links_become_one_bar_of_few_parts(tmp_path: Path) -> None:
    sites = tuple(f"edge-{place}" for place in range(100))
    fake_runs.simulate(fake_runs.recipe(steps=3), tmp_path, sites=sites)
    data = data_of(made(tmp_path))
    assert len(data["links"]["names"]) == page_charts.LINKS
    assert data["links"]["names"][-1] == "93 others"
    run = Run.read(tmp_path)
    assert sum(data["links"]["bytes"]["weightgrad"]) == sum(sum(line["bytes"]) for line in run.links)
    assert next(iter(data["sites"]["seconds"])) == "mean of all sites"


def test_faults_have_a_beginning_and_an_end(six: Path) -> None:
    found, _ = runs.find([six])
    assert page_charts.faults(comparison.grouped(found)) == [
        {"from": 20.0, "to": 32.0, "what": "cut", "where": "ohio – virginia"},  # noqa: RUF001
        {"from": 60.0, "to": 75.0, "what": "kill", "where": "california"},
        {"from": 90.0, "to": None, "what": "join", "where": "sydney"},
    ]


def test_every_strategy_looks_different() -> None:
    names = ["baseline", "weightgrad-serial", "weightgrad", "weightgrader", *(f"other-{place}" for place in range(20))]
    looks = styles(names)
    assert len({(look["color"], look["dash"]) for look in looks}) == len(names)
    assert [look["own"] for look in looks[:5]] == [False, True, True, False, False]
    assert [look["name"] for look in looks if look["color"] == "--accent"] == ["weightgrad"]
    css = (Path(page.__file__).parent / "page.css").read_text()
    for look in looks:
        assert css.count(f"{look['color']}: ") == 2  # light and dark


def test_one_run_is_a_report_too(tmp_path: Path) -> None:
    fake_runs.simulate(fake_runs.recipe(steps=10), tmp_path, status="interrupted")
    body = without_scripts(made(tmp_path))
    assert "id='chart-speedup'" not in body
    assert "id='chart-timeline'" not in body
    assert "weightgrad*" in body
    assert "were interrupted" in body


def test_runs_of_different_recipes_are_pointed_out(tmp_path: Path) -> None:
    fake_runs.simulate(fake_runs.recipe(steps=10, strategy="gaia"), tmp_path / "a")
    fake_runs.simulate(fake_runs.recipe(steps=20, strategy="dgc"), tmp_path / "b")
    assert "they differ in training.steps" in made(tmp_path)
