"""Recipes: what they mean, how settings change them, and that the document says so."""

from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from weightgrad.errors import RecipeError
from weightgrad.lab.recipes import schema as parts
from weightgrad.lab.recipes.expansion import Fault
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.recipes.schema import Dirichlet, StrategyChoice
from weightgrad.lab.recipes.site_list import SiteList, load_served
from weightgrad.lab.recipes.values import Section

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "recipes").glob("*.yaml"))
TEXT = (Path(__file__).parents[1] / "small.yaml").read_text()


def small() -> Recipe:
    return Recipe.parse(TEXT, "small.yaml")


def test_values_are_in_base_units() -> None:
    recipe = small()
    assert recipe.lan.bandwidth_bit_s == 900e6
    assert recipe.lan.delay_seconds == 0.0001
    assert recipe.server.bandwidth_bit_s == 1e9
    assert recipe.training.optimizer.lr == 0.1
    assert recipe.data.shards == Dirichlet(dirichlet=0.5)
    assert recipe.strategy == StrategyChoice("gaia", {})
    assert recipe.seed == 0
    assert recipe.workers == 12


def test_templates_are_written_out() -> None:
    recipe = small()
    assert [(site.name, site.workers) for site in recipe.site_list] == [
        ("virginia", 4),
        *((f"edge-{number}", 2) for number in range(1, 5)),
    ]
    assert [link.between for link in recipe.link_list] == [
        ("ohio", "virginia"),  # the server first, however it was written
        ("ohio", "edge-1"),
        ("ohio", "edge-3"),
        ("ohio", "edge-4"),
        ("ohio", "edge-2"),
    ]
    assert recipe.link_list[0].trace == ()
    assert recipe.link_list[1].trace == ((0.0, 100e6), (60.0, 20e6))
    assert recipe.link_list[1].bandwidth_bit_s == 100e6
    assert recipe.link_list[4].bandwidth_bit_s == 1e6  # a link by name beats the template's


def test_a_site_may_differ() -> None:
    virginia, edge, *_ = small().site_list
    assert (virginia.lan.bandwidth_bit_s, virginia.lan.delay_seconds) == (900e6, 0.002)
    assert (virginia.compute.seconds_per_step, virginia.compute.jitter) == (0.06, 0.1)
    assert [(s.worker, s.probability, s.factor) for s in virginia.compute.stragglers] == [(2, 1, 3), (None, 0.01, 5)]
    assert (edge.lan.delay_seconds, edge.compute.seconds_per_step) == (0.0001, 0.03)
    assert [(s.worker, s.probability, s.factor) for s in edge.compute.stragglers] == [(None, 0.01, 5), (None, 1, 2)]
    assert [s.site for s in edge.compute.stragglers] == [None, "edge-1"]  # not the template's name


def test_faults_come_in_the_order_of_time() -> None:
    recipe = small()
    assert recipe.fault_list == (
        Fault(10.0, "cut", ("ohio", "virginia"), for_seconds=5.0),
        Fault(20.0, "slow", ("ohio", "virginia"), for_seconds=30.0, factor=0.1),
        Fault(20.0, "flap", ("ohio", "edge-1"), for_seconds=20.0, period_seconds=2.0),
        Fault(30.0, "kill", ("ohio",)),
        Fault(40.0, "join", ("edge-4",)),
        Fault(50.0, "leave", ("edge-4",)),
    )
    assert recipe.absent_at_start == {"edge-4"}


def test_a_site_that_leaves_first_was_there() -> None:
    text = TEXT.replace("{at: 40 s, join: edge-4}", "{at: 60 s, join: edge-4}")
    assert Recipe.parse(text).absent_at_start == frozenset()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes(path: Path) -> None:
    recipe = Recipe.load(path)
    assert recipe.name == path.stem
    assert Recipe.parse(recipe.to_yaml(), "again") == recipe
    assert Recipe.model_validate(json.loads(json.dumps(recipe.dump()))) == recipe


def test_what_the_shipped_recipes_are() -> None:
    shapes = {path.stem: (len(Recipe.load(path).site_list), Recipe.load(path).workers) for path in SHIPPED}
    assert shapes == {
        "chaos": (3, 5),
        "edge": (100, 1000),
        "gpt": (4, 4),
        "gpt-3m": (4, 4),
        "imagenet": (2, 4),
        "laptop": (3, 6),
        "paper": (2, 8),
        "world": (8, 32),
    }


def test_a_dump_is_in_base_units_and_yaml_is_readable() -> None:
    recipe = small()
    assert recipe.dump()["links"][0] == {
        "between": ["virginia", "ohio"],
        "bandwidth": 300e6,
        "back": None,
        "delay": 0.011,
        "loss": 0.001,
        "trace": None,
    }
    assert recipe.dump()["strategy"] == {"name": "gaia"}
    assert "bandwidth: 300 Mbit/s" in recipe.to_yaml()
    odd = recipe.with_settings(["lan.bandwidth=123456789"])
    assert "bandwidth: 123456789.0" in odd.to_yaml()
    assert Recipe.parse(odd.to_yaml()) == odd


def test_recipes_are_values() -> None:
    recipe = small()
    with pytest.raises(ValidationError):
        recipe.seed = 3
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert copy.deepcopy(recipe) == recipe
    assert len({recipe, small(), recipe.with_settings(["seed=1"])}) == 2
    assert str(pickle.loads(pickle.dumps(recipe)).error(("seed",), "x")) == str(recipe.error(("seed",), "x"))


def test_the_name_of_the_file_is_a_name(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(TEXT.removeprefix("name: small\n"))
    assert Recipe.load(tmp_path / "mine.yaml").name == "mine"


def test_scalars_mean_what_they_look_like() -> None:
    recipe = Recipe.parse(TEXT.replace("gaia", "{name: no, when: 2026-11-16, tiny: 1e-4, at: 1:30, on: null}"))
    assert recipe.strategy == StrategyChoice("no", {"when": "2026-11-16", "tiny": 1e-4, "at": "1:30", "on": None})
    assert Recipe.parse(recipe.to_yaml()).strategy == recipe.strategy


# --set


def test_settings() -> None:
    recipe = small().with_settings(
        ["training.steps=200", "strategy.every=50", "seed=3", "sites.0.workers=16", "links[2].delay=1 s"]
    )
    assert recipe.training.steps == 200
    assert recipe.strategy == StrategyChoice("gaia", {"every": 50})
    assert recipe.seed == 3
    assert recipe.workers == 24
    assert recipe.links[2].delay_seconds == 1.0
    assert small().training.steps == 100


def test_settings_make_what_is_not_there_and_replace_what_is() -> None:
    recipe = small().with_settings(["strategy={name: diloco, every: 9}", "training.clip_norm=1", "model.options.a.b=2"])
    assert recipe.strategy == StrategyChoice("diloco", {"every": 9})
    assert recipe.training.clip_norm == 1
    assert recipe.model.options == {"a": {"b": 2}}
    again = recipe.with_settings(["strategy.codec=ef(qsgd(bits=4))"])
    assert again.strategy.overrides == {"every": 9, "codec": "ef(qsgd(bits=4))"}
    assert again.with_settings(["strategy=gaia"]).strategy == StrategyChoice("gaia")
    short = again.with_settings(["strategy=diloco", "strategy.every=20"])
    assert short.strategy == StrategyChoice("diloco", {"every": 20}), "as the README has it"
    default = Recipe.parse(TEXT.replace("strategy: gaia\n", ""))
    assert default.with_settings(["strategy.every=2"]).strategy == StrategyChoice("auto", {"every": 2})


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("training.stpes=3", "training.stpes: unknown key 'stpes'; did you mean 'steps'?"),
        ("trainig.steps=3", "trainig: unknown key 'trainig'; did you mean 'training'?"),
        ("training.steps=many", "training.steps: found 'many'; wanted: a whole number from 1"),
        ("training.steps.now=3", "training.steps is 100, which has no 'now'; set training.steps as a whole"),
        ("sites.2.workers=3", "sites has 2 entries, counted from 0; there is no 2"),
        ("sites.first.workers=3", "sites has 2 entries, counted from 0; there is no 'first'"),
        ("lan.delay=1 m", "'1 m' is not a time"),
        ("seed", "wanted key=value"),
        ("=3", "wanted key=value"),
        ("seed=[1", "not YAML"),
        ("seed={a: 1, a: 2}", "stands twice"),
        ("strategy.name=", "strategy.name: found nothing; wanted the name of a strategy"),
        ("a." * 1000 + "b=1", "wanted key=value"),
    ],
)
def test_a_bad_setting_is_named(setting: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        small().with_settings(["seed=1", setting])
    assert f"--set {setting}" in str(caught.value)
    assert says in str(caught.value)


# The document


DEFAULTS = {
    ("", "name"): "the file's name",
    ("", "lan"): "1 Gbit/s, 0.1 ms",
    ("", "strategy"): "auto",
    ("", "faults"): "none",
    ("compute", "stragglers"): "none",
    ("lan", "bandwidth_bit_s"): "1 Gbit/s",
    ("lan", "delay_seconds"): "0.1 ms",
}


def test_every_key_is_documented_with_its_default() -> None:
    sections: dict[str, type[Section]] = {
        "": Recipe, "data": parts.Data, "model": parts.Model, "training": parts.Training, "optimizer": parts.Optimizer,
        "server": parts.Server, "sites": parts.SiteEntry, "lan": parts.Lan, "links": parts.LinkEntry,
        "compute": parts.Compute, "stragglers": parts.Straggler,
    }  # fmt: skip
    text = (ROOT / "docs" / "recipes.md").read_text()
    for name, part in sections.items():
        heading = f"## {name}\n" if name else "## The keys\n"
        section = text.split(heading)[1].split("\n## ")[0]
        rows = dict(re.findall(r"^\| `([a-z_]+)` \| (.+?) \|", section, re.M))
        assert list(rows) == [field.alias or key for key, field in part.model_fields.items()], name
        for key, field in part.model_fields.items():
            default = DEFAULTS.get((name, key)) or ("required" if field.is_required() else json.dumps(field.default))
            assert rows[field.alias or key] == default.strip('"'), f"{name}.{key}"
    for kind in parts.FAULTS:
        assert f"| `{kind}` |" in text


def test_the_errors_in_the_document_are_what_is_printed() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text()
    wrong, printed = re.search(r"```yaml\n(# mistakes\.yaml\n.*?)```.*?```text\n(.*?)```", text, re.S).groups()  # type: ignore[union-attr]
    with pytest.raises(RecipeError) as caught:
        Recipe.parse(wrong, "mistakes.yaml")
    assert str(caught.value) == printed.rstrip("\n")


def test_examples_in_the_document_are_recipes(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "recipes.md").read_text()
    examples = [part for part in re.findall(r"```yaml\n(.*?)```", text, re.S) if "# mistakes.yaml" not in part]
    kinds = []
    for example in examples:
        (tmp_path / "example.yaml").write_text(example)
        kinds.append(type(load_served(tmp_path / "example.yaml")))
    assert set(kinds) == {Recipe, SiteList}
