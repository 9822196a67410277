"""Every table, made with a tiny plan: its claims follow from its numbers, and it goes on where it stopped."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import server_cost
import table_allreduce
import table_consistency
import table_limits
import table_long
import table_mlp
import table_qsgd
import table_runs
import table_scale
import table_skew
import table_transformer
import table_untuned
import table_weightgrad
import tables
import torch
import validation_split
from allreduce import hosts
from allreduce.cost import DELAY, DOUBLING, RING, exchange, rank_cost, seconds, vector_bytes
from result_table import MeasurementCache
from tables import Claim, Difference, Document, Options, difference

from weightgrad.errors import DataError, RecipeError, RunError
from weightgrad.lab.data import datasets
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run import simulation as train_run


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(name="tiny", command="python tiny", quick=True, out=tmp_path, runs=tmp_path / "runs", jobs=0)


def written(document: Document, options: Options) -> str:
    paths = document.write(options)
    assert all(path.stat().st_size for path in paths)
    assert json.loads(paths[1].read_text())["claims"]
    assert not document.failures
    return paths[0].read_text()


CONSISTENCY = table_consistency.Plan(
    steps=1, seeds=1, sites=2, batch=2, evaluations=1, evaluate_on=20, data="digits", model="lenet-digits"
)
SKEW = table_skew.Plan(steps=1, seeds=1, batch=8, evaluate_on=20, data="digits", model="lenet-digits")
SCALE = table_scale.Plan(sites=(2, 3), numels=(1000,), steps=2, batch=6, width=8, rounds=1)
MLP = table_mlp.Plan(images=16, epochs=1, batch=8, width=8, evaluate_on=20, repeats=1, data="digits")
ALLREDUCE = table_allreduce.Plan(
    sides=(32, 64), workers=(2, 4), repeats=1, exact_side=32, exact_workers=3, exact_steps=2
)
LIMITS = table_limits.Plan(steps=2, batch=8, evaluate_on=20, data="digits", model="lenet-digits")
TRANSFORMER = dataclasses.replace(table_transformer.QUICK, steps=2)
UNTUNED = dataclasses.replace(table_untuned.QUICK, steps=2)
MAKERS: dict[str, Callable[[Options], Document]] = {
    "consistency": lambda options: table_consistency.make(CONSISTENCY, options),
    "skew": lambda options: table_skew.make(SKEW, options),
    "transformer": lambda options: table_transformer.make(TRANSFORMER, options),
    "untuned": lambda options: table_untuned.make(UNTUNED, options),
    "limits": lambda options: table_limits.make(LIMITS, options),
    "scale": lambda options: table_scale.make(SCALE, options),
    "mlp": lambda options: table_mlp.make(MLP, options),
    "allreduce": lambda options: table_allreduce.make(ALLREDUCE, options),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_table_is_made_and_goes_on_where_it_stopped(
    name: str, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "refusal", lambda: "not in this test")  # see test_allreduce_emulated.py
    text = written(MAKERS[name](options), options)
    for heading in ("# ", "python tiny", "A quick run", "## What holds here and what does not", "## What is measured"):
        assert heading in text

    def again(*_: object, **__: object) -> object:
        raise RunError("it was made already")

    monkeypatch.setattr(train_run, "simulate", again)
    monkeypatch.setattr(table_allreduce, "rank_cost", again)
    monkeypatch.setattr(table_mlp, "rank_cost", again)
    monkeypatch.setattr(server_cost, "measure", again)
    assert not MAKERS[name](options).failures


def test_tasks_that_nobody_tuned_on(options: Options) -> None:
    cells = table_untuned.wanted(table_untuned.Plan(seeds=2))  # of the real recipes
    assert len(cells) == 2 * len(table_untuned.TASKS) * len(table_untuned.ROWS)
    assert [cell.key.seed for cell in cells] == sorted(cell.key.seed for cell in cells)
    counts = {cell.part: len(cell.recipe.site_list) for cell in cells}
    assert (counts["2 sites"], counts["8 sites"]) == (2, 8)
    assert len({cell.key.mark for cell in cells}) == len(cells) / 2  # no two tasks are the same
    goal = table_untuned.overview(table_runs.run(table_untuned.wanted(UNTUNED), options), UNTUNED)
    found = {row["row"]: row for row in goal.rows}
    assert found["baseline"]["above"] == 0
    assert found["baseline"]["t"] <= found["baseline"]["seconds"]
    lost = [{**row, "loss": row["loss"] + (row["row"] == "auto")} for row in goal.rows]  # rows that lose are said
    worse = table_untuned.claims(dataclasses.replace(goal, rows=lost))
    assert not worse[0].holds


def test_weightgrads_table(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = table_weightgrad.Plan(steps=2, vgg_steps=2)
    assert len(table_weightgrad.wanted(plan)) == 3 * len(table_weightgrad.STRATEGIES)  # of the real recipes
    laptop = Recipe.load(tables.ROOT / "recipes" / "laptop.yaml")
    digits = laptop.with_settings(["training.steps=1", "training.batch=6", "training.evaluate_on=20"])
    monkeypatch.setattr(
        table_weightgrad, "recipes", lambda _: {"CifarNet, 8 workers": digits, "VGG-A, 8 workers": digits}
    )
    document = table_weightgrad.make(plan, options)
    assert set(document.charts) >= {"speedup", "loss-cifarnet-8-workers", "accuracy-cifarnet-8-workers"}
    text = written(document, options)
    assert "paper: speedup" in text
    assert "VGG-A, 8 workers: accuracies as published" in text
    assert "dgc warms up over" in text


QSGD = table_qsgd.Plan(
    seeds=1, cifar_seeds=1, most_nodes=2, evaluate_on=20, cifar_evaluate_on=20, timed=(), models=("alexnet32", "lenet")
)


@pytest.fixture
def qsgd_on_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """QSGD's runs are of a step on a data set that is always there; nothing is held out of it."""
    real = table_qsgd.recipe
    settings = ["data={name: digits}", "model={name: lenet-digits}", "training.batch=2", "training.steps=1"]

    def small(model: str, plan: table_qsgd.Plan, nodes: int) -> Recipe:
        return real(model, plan, nodes).with_settings(settings)

    monkeypatch.setattr(table_qsgd, "recipe", small)
    monkeypatch.setattr(validation_split, "write", lambda name, directory: directory)


@pytest.mark.usefixtures("qsgd_on_digits")
def test_qsgds_table(options: Options) -> None:
    document = table_qsgd.make(QSGD, options)
    text = written(document, options)
    assert "2 bits, nearest, error feedback" in text
    assert "Cannot be told" not in text
    grid = next(table for table in document.tables if table.name == "LeNet, 2 nodes")
    assert len(grid.rows) == 13
    by_name = {row["name"]: row for row in grid.rows}
    assert 13 < by_name["2 bits, stochastic"]["ratio"] < 16
    assert 3.8 < by_name["8 bits, nearest"]["ratio"] < 4
    assert all("±" in row["far"] and row["verdict"] for row in grid.rows[1:])


def test_qsgds_full_plan_is_the_reports() -> None:
    cells = table_qsgd.wanted(table_qsgd.FULL)
    for name, seeds in (("AlexNet", 3), ("ResNet-110", 1)):
        for nodes in (1, 2, 4, 8):
            own = [cell for cell in cells if cell.part == f"{name}, {nodes} node{'s' if nodes > 1 else ''}"]
            assert len(own) == 13 * seeds
            assert all(cell.held_out for cell in own)
            assert {cell.recipe.training.evaluate_on for cell in own} == {5000}
    assert [cell.key.seed for cell in cells] == sorted(cell.key.seed for cell in cells)
    assert len({(cell.part, cell.row, cell.key.mark, cell.key.seed) for cell in cells}) == len(cells)
    assert cells[0].part == "AlexNet, 4 nodes"


def test_a_verdict_is_an_interval() -> None:
    assert table_qsgd.verdict(Difference(-1.0, 0.4)) == "loses 0.60 to 1.40"
    assert table_qsgd.verdict(Difference(1.0, 0.4)) == "gains 0.60 to 1.40"
    assert table_qsgd.verdict(Difference(-0.2, 0.4)) == "between -0.60 and +0.20"


PARTIAL: dict[str, Callable[[Options], Document]] = {
    "mlp": lambda options: table_mlp.make(MLP, options),
    "qsgd": lambda options: table_qsgd.make(QSGD, options),
    "weightgrad": lambda options: table_weightgrad.make(table_weightgrad.Plan(steps=1), options),
    "long": lambda options: table_long.make(table_long.Plan(steps=1), options),
}


@pytest.mark.parametrize("name", PARTIAL)
@pytest.mark.usefixtures("qsgd_on_digits")
def test_a_table_is_made_of_few_runs(name: str, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    laptop = Recipe.load(tables.ROOT / "recipes" / "laptop.yaml")
    digits = laptop.with_settings(["training.steps=1", "training.batch=6", "training.evaluate_on=20"])
    monkeypatch.setattr(table_weightgrad, "recipes", lambda _: {"CifarNet, 8 workers": digits})
    monkeypatch.setattr(table_long, "recipe", lambda _: digits)
    real, made = train_run.simulate, 0

    def only_two(*arguments: Any, **settings: Any) -> object:
        nonlocal made
        made += 1
        if made > 2:
            raise RunError("enough")
        return real(*arguments, **settings)

    monkeypatch.setattr(train_run, "simulate", only_two)
    assert sys.modules[f"table_{name}"].PARTIAL
    PARTIAL[name](options)
    document = PARTIAL[name](dataclasses.replace(options, resume=False))
    assert not document.failures
    document.missing = ["the rest"]
    assert "## What is missing\n- the rest\n" in document.markdown(options, "x")


def outcome(setting: table_limits.Setting, ratio: float, points: float, twice: float = 0.5) -> table_limits.Outcome:
    return table_limits.Outcome(setting, ratio, Difference(points, twice))


def test_the_limit_is_reported() -> None:
    default, *others = table_limits.SETTINGS
    assert default == table_limits.DEFAULT
    found = [outcome(default, 985, 1.0), *(outcome(one, 2000, -3.0) for one in others)]
    assert table_limits.goal(found[:-1]).holds is None  # a row is missing: it might have saved more
    assert table_limits.goal(found).holds is False
    assert "the most: 2,000 times" in table_limits.goal(found).found
    for points, holds in ((-3.0, False), (0.0, None), (1.0, True)):
        more = [*found[:-1], outcome(others[-1], 3500, points)]
        assert table_limits.goal(more).holds is holds
        assert table_limits.limit(more).holds is holds
    said = table_limits.limit([*found[:-1], outcome(others[-1], 3500, 0.0)]).found
    assert f"no further below: 985 times with {default.name}" in said
    assert f"cannot be told: 3,500 times with {others[-1].name}" in said
    assert f"is further below: 2,000 times with {others[0].name}" in said


def test_a_setting_knows_how_long_it_was_kept(options: Options) -> None:
    setting = table_limits.Setting(0.001, 8)  # sparser than the controller would go by itself
    chosen = table_limits.recipe(table_limits.QUICK).with_settings(["training.evaluate_on=20", "training.batch=8"])
    cells = table_runs.cells("x", chosen, {setting.name: setting.strategy}, 1)
    (made,) = table_runs.run(cells, options).all()
    last = made.schedules[-1]
    assert (last["every"], last["up"], last["down"]) == (8, "ef(topk(0.001) > sign())", "the others' pushes")
    assert 0.5 < setting.kept(made) < 1
    assert table_limits.DEFAULT.kept(made) == 0


def test_the_settings_are_whole_rows_of_the_paper() -> None:
    jobs = table_limits.wanted(table_limits.Plan(seeds=2))
    assert len(jobs) == 2 * (1 + len(table_limits.SETTINGS))
    paper = Recipe.load(tables.ROOT / "recipes" / "paper.yaml").training
    for job in jobs:
        own, setting = job.recipe.training, table_limits.BY_NAME.get(job.row)
        steps = paper.steps * (1 if setting is None else setting.longer)
        assert (own.steps, own.batch, own.evaluate_every) == (steps, paper.batch, paper.evaluate_every)
    assert {job.recipe.training.steps for job in jobs} == {1500, 2000}
    assert all(setting in table_limits.SETTINGS for pair in table_limits.ALIKE for setting in pair)


def test_the_dense_networks_epochs_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    plan = table_mlp.Plan(images=800, epochs=5, batch=40)
    own = table_mlp.recipe(plan)
    assert (own.data.limit, own.training.steps, own.training.batch) == (800, 100, 40)
    assert "5 epochs of 800 images: 100 mini-batches of 40" in table_mlp.rests_on(plan, 1)[0]
    with pytest.raises(RecipeError, match=r"images=801: .* batch=40; nearest: 800 or 840"):
        table_mlp.Plan(images=801, batch=40)
    with pytest.raises(RecipeError, match=r"images=20: .* nearest: 40"):
        table_mlp.Plan(images=20, batch=40)
    with pytest.raises(RecipeError, match="images=60040: MNIST has 60000"):
        table_mlp.Plan(images=60_040, batch=40)
    with pytest.raises(SystemExit):
        tables.read(plan, table_mlp.QUICK, "about", ["--batch", "48"])
    assert "error: images=800: epochs are whole with a multiple of batch=48" in capsys.readouterr().err


def test_a_vector_of_fp32_has_four_bytes_a_parameter(options: Options) -> None:
    plan = dataclasses.replace(MLP, epochs=3, width=64)
    (cell, *_) = table_mlp.wanted(plan)
    (run,) = table_runs.run([cell], options).all()
    numel = run.summary["parameters"]
    found = table_mlp.vector_mb(plan, numel, run.summary["lan_bytes"] / 1e6)
    assert found == pytest.approx(4 * numel / 1e6, rel=0.02)  # and the heads of messages, in so small a model


def test_every_image_is_seen_once_an_epoch(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = datasets.Dataset.train

    def noted(self: datasets.Dataset, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.extend(indices.tolist())
        return real(self, indices)

    monkeypatch.setattr(datasets.Dataset, "train", noted)
    plan = dataclasses.replace(MLP, images=24, epochs=3)
    train_run.simulate(table_mlp.recipe(plan).with_settings(["strategy=baseline"]), options.out / "run")
    assert sorted(seen) == sorted([*range(24)] * 3)
    assert all(sorted(seen[n : n + 24]) == [*range(24)] for n in (0, 24, 48))


def test_a_changed_strategy_is_another_run(options: Options) -> None:
    cell = table_skew.wanted(SKEW)[0]
    other = table_runs.Cell(cell.part, cell.row, cell.recipe.with_settings(["training.optimizer.lr=0.01"]))
    later = table_runs.Cell(cell.part, cell.row, cell.recipe.with_settings(["seed=5"]))
    here, there, seed = (one.job(options.runs).directory for one in (cell, other, later))
    assert here.parent != there.parent
    assert here.parent == seed.parent
    assert here != seed


def test_failures_are_reported(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> object:
        raise RunError("no")

    monkeypatch.setattr(train_run, "simulate", fails)
    document = table_skew.make(SKEW, options)
    assert len(document.failures) == len(table_skew.wanted(SKEW))
    assert "RunError: no" in document.markdown(options, "x")


def test_quick_never_writes_to_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tables.read(SKEW, SKEW, "about", ["--quick", "--out", str(tables.RESULTS)])
    assert "--quick is nothing to conclude from" in capsys.readouterr().err
    plan, options = tables.read(SKEW, table_skew.QUICK, "about", ["--quick", "--steps", "7"])
    assert (plan.steps, options.jobs, options.out) == (7, 0, Path("runs/tables-quick"))
    plan, options = tables.read(SKEW, table_skew.QUICK, "about", ["--seeds", "1", "--jobs", "1"])
    assert (plan, options.out, options.jobs) == (SKEW, tables.RESULTS, 1)


def test_a_difference_knows_its_error() -> None:
    one = difference([0.50], [0.52], tested=10_000)
    assert one.points == pytest.approx(-2)
    assert one.twice == pytest.approx(200 * math.sqrt(2 * 0.51 * 0.49 / 10_000))
    many = difference([0.5, 0.7, 0.6], [0.5, 0.6, 0.7], tested=10**9)
    assert many.twice == pytest.approx(2 * 10 / math.sqrt(3))
    assert [Difference(1, 0.5).above(limit) for limit in (0.0, 0.8, 2.0)] == [True, None, False]


def test_an_undecided_claim_may_have_a_word_of_its_own() -> None:
    assert (
        Claim("It is fast.", None, "3 times.", undecided="Between 2 and 4").line().startswith("- **Between 2 and 4**")
    )


def test_claims_report_what_was_found() -> None:
    lines = [Claim("It is fast.", holds, "3 times.").line() for holds in (True, False, None)]
    assert lines[0] == "- **Holds**: It is fast. 3 times."
    assert "Does not hold" in lines[1]
    assert "Cannot be told" in lines[2]


def test_one_rank_costs_what_all_of_them_send() -> None:
    cost = rank_cost("qsgd(bits=4)", 4097, 4, 1)  # rounded down to what four can share
    real = exchange("qsgd(bits=4)", 4096, 4, 2)
    assert real["same"] == "yes"
    assert 4 * 4096 / vector_bytes(cost, 4) == pytest.approx(real["ratio"], rel=0.01)
    assert cost["seconds"] == pytest.approx(cost["encode"] + cost["reduce"] + cost["gather"])


def test_recursive_doubling_sends_everything_every_round() -> None:
    row = {"codec": DOUBLING, "workers": 8, "side": 1000, "add": 0.0}
    assert seconds(row, 1) == pytest.approx(3 * (0.032 + DELAY))
    ring = {**row, "codec": RING}
    assert seconds(ring, 1) == pytest.approx(14 / 8 * 0.032 + 14 * DELAY)


def test_a_cache_of_another_machine_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    assert MeasurementCache(path).get("a", lambda: {"x": 1}) == {"x": 1}
    assert MeasurementCache(path).get("a", lambda: {"x": 2}) == {"x": 1}
    path.write_text(json.dumps({**json.loads(path.read_text()), "machine": "another"}))
    assert MeasurementCache(path).get("a", lambda: {"x": 2}) == {"x": 2}


def test_the_server_holds_only_the_encoded_pushes_of_more_sites() -> None:
    few, many = (server_cost.measure(server_cost.Case("weightgrad", sites, 50_000), 1) for sites in (2, 12))
    assert few is not None
    assert many is not None
    pushes = 10 * many["push_kb"] / 1000
    assert many["held_mb"] == pytest.approx(few["held_mb"] + pushes, rel=0.02)
    assert many["backwards_mb"] > many["held_mb"]
    assert server_cost.measure(server_cost.Case("baseline", 10**6, 5000), 1) is None


@pytest.mark.parametrize("name", validation_split.SIZES)
def test_held_out_is_not_trained_on(name: str, tmp_path: Path) -> None:
    try:
        whole = datasets.load(name)
    except DataError:
        pytest.skip(f"{name} has not been fetched")
    train, held_out = validation_split.SIZES[name]
    place = validation_split.write(name, tmp_path)
    part = datasets.load(name, place, limit=train)
    assert isinstance(whole, datasets.Dataset)
    assert isinstance(part, datasets.Dataset)
    assert train + held_out == whole.train_count
    assert part.train_count == train
    assert part.test_images[:held_out].equal(whole.train_images[train:])
    assert part.test_labels[:held_out].equal(whole.train_labels[train:])
