"""Every mistake in a recipe is answered with its line, what was found and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightgrad.errors import RecipeError
from weightgrad.lab.recipes.recipe import Recipe

TEXT = (Path(__file__).parents[1] / "small.yaml").read_text()


def refusal(text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        Recipe.parse(text, "small.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("name: small", "nmae: small", "line 1: nmae: unknown key 'nmae'; did you mean 'name'? Allowed: name, seed"),
        ("steps: 100", "stepz: 100", "line 5: training.stepz: unknown key 'stepz'; did you mean 'steps'?"),
        ("{name: digits,", "{", "line 2: data.name: missing; wanted: the name of a data set"),
        ("0.5", "0", "line 2: data.shards.dirichlet: found 0; wanted: alpha, a number above 0"),
        ("{dirichlet: 0.5}", "idd", "line 2: data.shards: found 'idd'; wanted: iid, folders or {dirichlet: 0.5}"),
        ("{dirichlet: 0.5}", "{alpha: 1}", "line 2: data.shards.alpha: unknown key 'alpha'; Allowed: dirichlet"),
        ("steps: 100", "steps: 0", "line 5: training.steps: found 0; wanted: a whole number from 1"),
        ("steps: 100", "steps: true", "line 5: training.steps: found true; wanted: a whole number from 1"),
        ("steps: 100", "steps: '100'", "line 5: training.steps: found '100'; wanted: a whole number from 1"),
        ("batch: 24", "batch: 25", "25 samples cannot be shared equally by 12 workers; nearest that can: 24 or 36"),
        ("batch: 24", "batch: 5", "nearest that can: 12"),
        ("lr: 1e-1", "lr: 0", "line 7: training.optimizer.lr: found 0; wanted: a number above 0"),
        ("lr: 1e-1", "lr: .nan", "line 7: training.optimizer.lr: .nan is not a finite number"),
        ("name: sgd", "name: sdg", "training.optimizer.name: found 'sdg'; wanted: sgd, adam, adamw, adagrad"),
        ("name: sgd", "name: adam", "line 7: training.optimizer.momentum: momentum does not go with adam"),
        ("momentum: 0.9", "nesterov: true", "training.optimizer.nesterov: nesterov does not go with sgd"),
        ("momentum: 0.9", "betas: [0.9, 2]", "training.optimizer.betas[1]: found 2; wanted: [beta1, beta2]"),
        ("[50, 80]", "[80, 50]", "line 8: training.schedule.at: found [80, 50]; wanted ascending steps"),
        ("decay: 0.1, ", "", "line 8: training.schedule.decay: missing; wanted: a number between 0 and 1"),
        ("1 Gbit/s", "1 GB/s", "line 9: server.bandwidth: '1 GB/s' is not a bit rate: 'GB/s' counts bytes"),
        ("1 Gbit/s", "0", "line 9: server.bandwidth: found 0; wanted more than 0"),
        ("name: virginia, w", "name: edge-2, w", "line 12: sites[1].name: sites[0] is called 'edge-2' too"),
        ("{name: ohio", "{name: edge-3", "line 12: sites[1].name: the server is called 'edge-3' too"),
        ("workers: 4", "workers: 0", "line 11: sites[0].workers: found 0; wanted: a whole number from 1 to 10000"),
        ("virginia, w", "vir/ginia, w", "line 11: sites[0].name: found 'vir/ginia'; wanted a name of letters"),
        ("count: 4, ", "", "line 12: sites[1].name: found 'edge-{}'; count and '{}' in the name go together"),
        ("[ohio, edge-2]", "[ohoi, edge-2]", "no site or server is called 'ohoi'; did you mean 'ohio'?"),
        ("[ohio, edge-2]", "[ohio, edge-5]", "There are ohio, virginia, edge-{} (edge-1 to edge-4)"),
        ("[ohio, edge-2]", "[ohio]", "line 17: links[2].between[1]: missing; wanted: two names of sites or the server"),
        ("[ohio, edge-2]", "[ohio, ohio]", "line 17: links[2].between: found 'ohio' twice"),
        ("[ohio, edge-2]", '["edge-{}", "edge-{}"]', "line 17: links[2].between: found 'edge-{}' twice"),
        ("[ohio, edge-2]", "[ohio, virginia]", "links[2].between: links[0] is between 'ohio' and 'virginia' too"),
        ("[virginia, ohio]", "[virginia, edge-1]", "line 11: sites[0].name: virginia cannot reach the server 'ohio'"),
        ("11 ms", "11 m", "line 15: links[0].delay: '11 m' is not a time"),
        ("loss: 0.001", "loss: 1", "line 15: links[0].loss: found 1; wanted: a fraction of packets from 0 to below 1"),
        ("bandwidth: 1 Mbit/s, ", "", "line 17: links[2].bandwidth: missing; wanted a bit rate"),
        (
            "bandwidth: 1 Mbit/s, ",
            "bandwidth: 1, trace: [[0, 1]], ",
            "links[2].trace: a link has a bandwidth or a trace",
        ),
        ("[1 min,", "[0 s,", "line 16: links[1].trace: times must ascend from 0 s, found 0 s, 0 s"),
        ("[[0 s,", "[[1 s,", "line 16: links[1].trace: times must ascend from 0 s, found 1 s, 60 s"),
        ("20 Mbit/s", "20 ms", "line 16: links[1].trace[1][1]: '20 ms' is not a bit rate"),
        ("jitter: 0.1", "jitter: 1", "line 20: compute.jitter: found 1; wanted: a relative spread"),
        ("seconds_per_step: 0.03", "seconds_per_step: soon", "line 19: compute.seconds_per_step: 'soon' is not a time"),
        ("worker: 2", "worker: 4", "compute.stragglers[0].worker: found 4; virginia has the workers 0 to 3"),
        ("{site: virginia, w", "{site: virgina, w", "line 22: compute.stragglers[0].site: no site is called 'virgina'"),
        ("{site: virginia, w", "{w", "line 22: compute.stragglers[0].worker: a worker is one of a site"),
        ("probability: 0.01, ", "", "line 23: compute.stragglers[1]: wanted a site, or a probability below 1"),
        ("probability: 0.01", "probability: 1.01", "stragglers[1].probability: found 1.01; wanted: a number above 0"),
        ("strategy: gaia", "strategy: [gaia]", 'line 25: strategy: found ["gaia"]; wanted a name'),
        ("strategy: gaia", "strategy: {every: 3}", "line 25: strategy.name: found nothing; wanted the name"),
        ("cut: [ohio, v", "cutt: [ohio, v", "line 28: faults[1]: found {"),
        ("kill: ohio", "kill: ohio, join: edge-1", "exactly one of cut, slow, flap, kill, join, leave"),
        ("kill: ohio", "kill: ohoi", "line 30: faults[3].kill: no site or server is called 'ohoi'"),
        (
            "kill: ohio",
            "kill: ohio, factor: 2",
            "faults[3].factor: unknown key 'factor'; did you mean 'for'? Allowed: at, kill, for",
        ),
        ("kill: ohio", "leave: ohio", "line 30: faults[3].leave: 'ohio' is the server"),
        (
            "cut: [ohio, v",
            "cut: [edge-1, v",
            "line 28: faults[1].cut: no link is between 'edge-1' and 'virginia'; there are [",
        ),
        ("factor: 0.1", "factor: 1.5", "line 27: faults[0].factor: found 1.5; wanted: what is left of the bandwidth"),
        ("period: 2 s, ", "", "line 29: faults[2].period: missing; wanted: a time above 0"),
        ("join: edge-4", "leave: edge-4", "line 32: faults[5].leave: 'edge-4' is not there at that time"),
        ("leave: edge-4", "join: edge-4", "line 32: faults[5].join: 'edge-4' is there already at that time"),
        ("batch: 24", "batch: 24\n  steps: 3", "training.steps: the key 'steps' stands twice, on lines 5 and 7"),
        ("batch: 24", "batch: [24", "not YAML"),
        ("batch: 24", "3: 24", "line 4: training: a key must be a text, found 3 on line 6"),
        (
            "batch: 24",
            "batch: !!python/name:os.system",
            "line 6: training.batch: '' with the tag 'tag:yaml.org,2002:python",
        ),
        (
            "batch: 24",
            "batch: 99999999999999999999",
            "line 6: training.batch: 99999999999999999999 is not a finite number",
        ),
        ("model: {name: lenet-digits}", "model: lenet", "line 3: model: found 'lenet'; wanted: a mapping, e.g."),
    ],
)
def test_a_mistake_is_answered_with_its_line_and_what_is_allowed(old: str, new: str, says: str) -> None:
    assert old in TEXT
    message = refusal(TEXT.replace(old, new, 1))
    assert message.startswith("small.yaml")
    assert says in message


def test_all_mistakes_are_listed_in_order() -> None:
    text = TEXT.replace("steps: 100", "stepz: 100").replace("1 Gbit/s", "1 GB/s").replace("batch: 24", "batch: 25")
    text = text.replace("jitter: 0.1", "jitter: 7").replace("kill: ohio", "kill: nobody").replace("name: small", "")
    message = refusal(text.replace("stepz: 100", "steps: 100, stepz: 1").replace("steps: 100, ", "steps: 100\n  "))
    assert message.splitlines()[0] == "small.yaml has 5 mistakes:"
    assert [line.split(": ")[:2] for line in message.splitlines()[1:]] == [
        ["  line 6", "training.stepz"],
        ["  line 7", "training.batch"],
        ["  line 10", "server.bandwidth"],
        ["  line 21", "compute.jitter"],
        ["  line 31", "faults[3].kill"],
    ]


@pytest.mark.parametrize("text", ["", "3", "[]", "null", "# nothing"])
def test_what_is_no_recipe_at_all(text: str) -> None:
    assert "wanted a mapping with the keys name, seed, data" in refusal(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [\n", "small.yaml, line 2: not YAML"),
        ("a: 1\nb: \t\0", "small.yaml, line 2: not YAML: a character"),
        ("&a [*a]", "contains itself"),
        ("[" * 700, "nested too deeply"),
        ("{a: " * 40 + "}" * 40, "nested too deeply"),
        ("a: *b", "line 1: not YAML: found undefined alias"),
        ("--- {}\n--- {}", "line 2: not YAML"),
        (r'"\U00110000"', "not YAML"),
        ("\n".join(["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 25)]), "values"),
        (f"a: &a {'x' * 1_000_000}\nb: [{', '.join(['*a'] * 100)}]", "more than 10,000,000 characters"),
    ],
)
def test_hostile_texts(text: str, says: str) -> None:
    assert says in refusal(text)


def test_two_templates_are_not_a_link() -> None:
    text = TEXT.replace("lan: {b", '  - {name: "far-{}", count: 2, workers: 2}\nlan: {b')
    text = text.replace("[ohio, edge-2]", '["far-{}", "edge-{}"]')
    assert "line 18: links[2].between: found two templates" in refusal(text)


def test_every_site_may_not_be_late() -> None:
    faults = "\n".join(f"  - {{at: 1 s, join: {name}}}" for name in ("virginia", '"edge-{}"'))
    text = TEXT[: TEXT.index("faults:")] + "faults:\n" + faults
    assert "line 26: faults: every site joins later" in refusal(text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for path, says in [
        ("none.yaml", "No such file"),
        ("binary.yaml", "UTF-8"),
        (".", "directory"),
        ("\0", "cannot read"),
    ]:
        with pytest.raises(RecipeError, match=says):
            Recipe.load(tmp_path / path)


def test_others_can_blame_a_line() -> None:
    recipe = Recipe.parse(TEXT.replace("gaia", "{name: x,\n  codec: adaptive(pi=0)}"), "small.yaml")
    error = recipe.error(("strategy", "codec"), "pi must be at least 1, got 0")
    assert isinstance(error, RecipeError)
    assert str(error) == "small.yaml, line 26: strategy.codec: pi must be at least 1, got 0"
    assert str(recipe.error(("strategy", "up", "codec"), "no")) == "small.yaml, line 25: strategy.up.codec: no"
    changed = recipe.with_settings(["strategy.codec=nope"])
    assert (
        str(changed.error(("strategy", "codec"), "no")) == "small.yaml, --set strategy.codec=nope: strategy.codec: no"
    )
    made = Recipe.model_validate(recipe.dump())
    assert str(made.error(("strategy",), "no")) == "recipe 'small': strategy: no"
