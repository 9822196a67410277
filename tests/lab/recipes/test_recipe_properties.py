"""Any recipe survives being written down; any text is a recipe or a RecipeError, never anything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from weightgrad.errors import RecipeError
from weightgrad.lab.recipes.recipe import Recipe

TEXT = (Path(__file__).parents[1] / "small.yaml").read_text()


def small() -> Recipe:
    return Recipe.parse(TEXT, "small.yaml")


NAMES = st.from_regex(r"[a-z][a-z0-9_.-]{0,8}", fullmatch=True)
NUMBERS = st.floats(min_value=1e-6, max_value=1e12)
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
VALUES = st.recursive(
    SCALARS | TEXTS, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXTS, v, max_size=3), max_leaves=6
)
QUANTITIES = st.one_of(
    NUMBERS, st.builds("{:.6g} {}".format, st.floats(0.001, 999), st.sampled_from(["kbit/s", "Mbit/s", "Gbit/s"]))
)
TIMES = st.one_of(
    NUMBERS, st.builds("{:.6g} {}".format, st.floats(0.001, 999), st.sampled_from(["us", "ms", "s", "h"]))
)


@st.composite
def recipes(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(NAMES, min_size=2, max_size=5, unique=True))
    server, *sites = names
    counted = draw(st.booleans())
    entries: list[dict[str, Any]] = [{"name": name, "workers": draw(st.integers(1, 5))} for name in sites]
    if counted:
        entries.append({"name": "T_{}", "count": draw(st.integers(1, 7)), "workers": 2})
    workers = sum(entry["workers"] * entry.get("count", 1) for entry in entries)
    links = [{"between": [server, entry["name"]], "delay": draw(TIMES)} for entry in entries]
    for link in links:
        if draw(st.booleans()):
            link["bandwidth"] = draw(QUANTITIES)
        else:
            times = sorted(draw(st.sets(NUMBERS, max_size=3)))
            link["trace"] = [[time, draw(QUANTITIES)] for time in (0, *times)]
    overrides = draw(st.dictionaries(TEXTS.filter(lambda key: key != "name"), VALUES, max_size=3))
    return {
        "name": draw(TEXTS.filter(bool)),
        "seed": draw(st.integers(0, 2**63 - 1)),
        "data": {"name": "digits", "shards": draw(st.sampled_from(["iid", "folders", {"dirichlet": 0.25}]))},
        "model": {"name": "mlp", "options": draw(st.dictionaries(TEXTS, VALUES, max_size=3))},
        "training": {
            "steps": draw(st.integers(1, 10**9)),
            "batch": workers * draw(st.integers(1, 9)),
            "optimizer": {"name": draw(st.sampled_from(["sgd", "adam", "lars"])), "lr": draw(NUMBERS)},
            "schedule": draw(st.sampled_from(["constant", "cosine", {"decay": 0.5, "at": [1, 7]}])),
        },
        "server": {"name": server, "bandwidth": draw(st.none() | QUANTITIES)},
        "sites": entries,
        "links": links,
        "compute": {"seconds_per_step": draw(st.just("calibrate") | TIMES), "jitter": draw(st.floats(0, 0.99))},
        "strategy": {"name": draw(NAMES), **overrides},
        "faults": draw(
            st.lists(
                st.one_of(
                    st.builds(lambda at, span: {"at": at, "cut": [server, sites[0]], "for": span}, TIMES, TIMES),
                    st.builds(lambda at: {"at": at, "kill": sites[-1]}, TIMES),
                    st.builds(
                        lambda at, f: {"at": at, "slow": [sites[0], server], "factor": f}, TIMES, st.floats(0.01, 0.99)
                    ),
                ),
                max_size=3,
            )
        ),
    }


@settings(max_examples=40)
@given(recipes())
def test_dump_and_yaml_round_trip(value: dict[str, Any]) -> None:
    recipe = Recipe.parse(json.dumps(value), "made.yaml")  # JSON is YAML
    again = Recipe.parse(recipe.to_yaml(), "again.yaml")
    assert again == recipe
    assert again.dump() == recipe.dump() == Recipe.model_validate(json.loads(json.dumps(recipe.dump()))).dump()
    assert again.to_yaml() == recipe.to_yaml()
    assert again.site_list == recipe.site_list
    assert again.link_list == recipe.link_list
    assert again.fault_list == recipe.fault_list


def harmless(text: str) -> None:
    try:
        recipe = Recipe.parse(text, "any.yaml")
    except RecipeError as error:
        assert str(error).startswith("any.yaml")  # noqa: PT017  (either outcome is fine)
    else:
        assert Recipe.parse(recipe.to_yaml()) == recipe


@settings(max_examples=100)
@given(st.text() | st.text(alphabet="{}[]:,-&*!|>'\"%@#? \n\ta1~.\\xuU"))
def test_any_text_is_a_recipe_or_a_recipe_error(text: str) -> None:
    harmless(text)


PLACES = [
    "", "name", "seed", "data", "data.shards", "data.limit", "model", "model.options", "training", "training.steps",
    "training.optimizer", "training.optimizer.betas", "training.schedule", "training.schedule.at.0", "server",
    "server.bandwidth", "sites", "sites.0", "sites.1.count", "sites.1.name", "lan", "lan.delay", "links", "links.0",
    "links.1.trace", "links.1.trace.0", "links.2.between", "links.2.between.0", "compute", "compute.stragglers",
    "compute.stragglers.0", "strategy", "faults", "faults.0", "faults.0.for", "faults.3.kill", "new", "training.new",
]  # fmt: skip
WORDS = st.sampled_from(
    ["ohio", "edge-{}", "edge-1", "edge-9", "{}", "iid", "1 s", "-1 s", "1 Mbit/s", "calibrate", "<word>", "<cut>"]
)


@settings(max_examples=120)
@given(
    st.lists(st.tuples(st.sampled_from(PLACES), VALUES | WORDS | st.lists(WORDS, max_size=3)), min_size=1, max_size=4)
)
def test_any_value_in_any_place_is_a_recipe_or_a_recipe_error(changes: list[tuple[str, Any]]) -> None:
    value: Any = small().dump()
    for place, new in changes:
        holder: Any = {"root": value}
        keys: list[Any] = ["root", *(int(key) if key.isdigit() else key for key in place.split(".") if key)]
        try:
            for key in keys[:-1]:
                holder = holder[key]
            holder[keys[-1]] = new
        except (KeyError, IndexError, TypeError):
            continue
        value = new if place == "" else value
    harmless(json.dumps(value))


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(PLACES) | st.text(max_size=5), st.text(max_size=6) | WORDS), max_size=3))
def test_any_setting_is_taken_or_is_a_recipe_error(pairs: list[tuple[str, str]]) -> None:
    try:
        changed = small().with_settings(f"{key}={value}" for key, value in pairs)
    except RecipeError:
        return
    assert Recipe.parse(changed.to_yaml()) == changed
