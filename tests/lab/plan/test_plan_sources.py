"""What is written on the command line, and what it becomes; and the command itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weightgrad.cli import app
from weightgrad.errors import PlanError
from weightgrad.lab.plan import devices, prices, sources
from weightgrad.lab.plan.scenario import parse_links, parse_sites
from weightgrad.lab.recipes.recipe import Recipe

RECIPES = Path(__file__).parents[3] / "recipes"
SCRIPT = """
import torch
def build():
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)), torch.zeros(4, 64)
def no_batch():
    return torch.nn.Linear(8, 8)
def raises():
    raise ValueError("no weights at /data")
def leaves():
    raise SystemExit(3)
class Looks(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y if y.sum().item() > 0 else -y
def looks():
    return Looks(8, 8), torch.zeros(2, 8)
class Breaks(torch.nn.Linear):
    def forward(self, x):
        raise RuntimeError("boom")
def breaks():
    return Breaks(8, 8), torch.zeros(2, 8)
number = 3
def prints():
    print("loading the weights")
    return build()
"""


def test_sites_and_links_are_read() -> None:
    first, second = parse_sites("virginia=8xH100,tokyo=a100", devices.DEVICES)
    assert (first.name, first.count, first.device) == ("virginia", 8, devices.DEVICES["H100"])
    assert (second.count, second.device) == (1, devices.DEVICES["A100"])
    server, links = parse_links(["ohio-virginia=1Gbit/s,11ms", "tokyo-ohio=200 Mbit/s,80 ms,0.1%".replace(" ", "")],
                                ["virginia", "tokyo"])  # fmt: skip
    assert server == "ohio"
    assert [(x.between, x.bandwidth_bit_s, x.delay_seconds, x.loss) for x in links] == [
        (("ohio", "virginia"), 1e9, 0.011, 0.0),
        (("ohio", "tokyo"), 2e8, 0.08, 0.001),
    ]


@pytest.mark.parametrize(
    ("sites", "links", "wanted"),
    [
        ("", ["ohio-a=1Gbit/s,1ms"], "no site"),
        ("a=0xH100", ["ohio-a=1Gbit/s,1ms"], "has 0 devices"),
        ("a:8xH100", ["ohio-a=1Gbit/s,1ms"], "is not a site"),
        ("a=8xH900", ["ohio-a=1Gbit/s,1ms"], "no device 'H900'; wanted NAME=COUNTxDEVICE"),
        ("a=1000000xH100", ["ohio-a=1Gbit/s,1ms"], "from 1 to 9,999"),
        ("a=H100,a=H100", ["ohio-a=1Gbit/s,1ms"], "twice"),
        ("a=H100,b=H100", ["ohio-a=1Gbit/s,1ms"], "no link for b"),
        ("a=H100", ["ohio-c=1Gbit/s,1ms"], "joins no site"),
        ("a=H100", ["ohio-a=1GB/s,1ms"], "counts bytes"),
        ("a=H100", ["ohio-a=1Gbit/s"], "has 1 value; wanted"),
        ("a=H100", ["ohio-a=1Gbit/s,11"], "11 has no unit; wanted e.g. 11ms"),
        ("a=H100", ["ohio-a=1000,11ms"], "1000 has no unit"),
        ("a=H100", ["ohio-a=1Gbit/s,1ms,x"], "x is not a loss; wanted e.g. 0.1%"),
        ("a=H100", ["ohio-a=1Gbit/s,1ms,100%"], "is not a loss"),
        ("a=H100", ["ohio-a=1Gbit/s,10000d"], "a delay of an hour or less"),
        ("a=H100", ["-a=1Gbit/s,1ms"], "joins no site"),
        ("a=H100", ["a-a=1Gbit/s,1ms"], "joins two sites"),
        ("a=H100,b=H100", ["a-b=1Gbit/s,1ms"], "joins two sites; wanted links between each site and a global server"),
        ("a=H100", ["ohio-a=0bit/s,1ms"], "1 bit/s or more"),
        ("a=H100,b=H100", ["ohio-a=1Gbit/s,1ms", "iowa-b=1Gbit/s,1ms"], "one global server"),
    ],
)
def test_what_cannot_be_read_is_told(sites: str, links: list[str], wanted: str) -> None:
    with pytest.raises(PlanError, match=wanted):
        parse_links(links, [site.name for site in parse_sites(sites, devices.DEVICES)])


def test_spaces_and_names_that_begin_alike_are_read() -> None:
    names = [site.name for site in parse_sites("us-east = 8 x H100, us-east-1=H100", devices.DEVICES)]
    assert names == ["us-east", "us-east-1"]
    server, links = parse_links(["us-east-1-ohio = 1 Gbit/s, 11 ms, 0.1 %  ohio-us-east=2 Gbit/s,0"], names)
    assert server == "ohio"
    assert [(x.between[1], x.bandwidth_bit_s, x.delay_seconds, x.loss) for x in links] == [
        ("us-east-1", 1e9, 0.011, 0.001),
        ("us-east", 2e9, 0.0, 0.0),
    ]


def test_prices_can_be_changed(tmp_path: Path) -> None:
    table = tmp_path / "prices.yaml"
    table.write_text("default: 0.05\ntokyo: 0.114\n")
    found = prices.read(table, ["virginia=0.02"], places=["tokyo", "virginia", "ohio"])
    assert [found.dollars(place, 2e9) for place in ("tokyo", "virginia", "ohio")] == pytest.approx([0.228, 0.04, 0.1])
    assert prices.read(None, ["0.01"]).dollars("anywhere", 1e9) == pytest.approx(0.01)
    for wrong in ("paris=0.1", "tokyo=free", "tokyo=-1", "tokyo=nan"):
        with pytest.raises(PlanError):
            prices.read(None, [wrong], places=["tokyo"])


def test_devices_can_be_changed(tmp_path: Path) -> None:
    table = tmp_path / "devices.yaml"
    table.write_text("H100: {efficiency: 0.5}\nmine: {tflops: 10, tflops_fp32: 5, memory_gb: 8, memory_gb_s: 100}\n")
    found = devices.load(table)
    assert found["H100"].efficiency == 0.5
    assert found["H100"].memory_gb == 80
    assert devices.find(found, "MINE").tflops == 10
    table.write_text("mine: {tflops: 10}\n")
    with pytest.raises(PlanError, match="memory_gb_s"):
        devices.load(table)


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_every_recipe_can_be_planned_without_its_data(name: str) -> None:
    recipe = Recipe.load(RECIPES / f"{name}.yaml").with_settings(["compute.seconds_per_step=0.1"])
    found = sources.of_recipe(recipe, measure=False)
    assert found.scenario.layout.numel == sum(layer.parameters for layer in found.cost.layers)
    assert found.cost.peak_bytes > 3 * found.cost.parameter_bytes


def test_a_recipe_without_a_time_says_what_to_do() -> None:
    recipe = Recipe.load(RECIPES / "laptop.yaml").with_settings(["compute.seconds_per_step=calibrate"])
    with pytest.raises(PlanError, match="--measure"):
        sources.of_recipe(recipe, measure=False)


def test_the_command_plans_a_model_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "my_script.py").write_text(SCRIPT)
    given = ["--sites", "virginia=2xA100,tokyo=1xA100", "--link", "ohio-virginia=1Gbit/s,11ms ohio-tokyo=50Mbit/s,80ms"]
    command = [sys.executable, "-m", "weightgrad", "plan", "--model", "my_script:build", *given, "--steps", "100"]
    options = ["--strategies", "baseline,auto", "--json", "--page", "page.html", "--batch", "4"]
    done = subprocess.run(
        [*command, *options], cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["parameters"] == 64 * 256 + 256 + 256 * 10 + 10
    assert list(found["strategies"]) == ["baseline", "auto"]
    baseline = found["strategies"]["baseline"]
    tokyo = next(link for link in baseline["links"] if link["site"] == "tokyo")
    assert tokyo["up_round"] == pytest.approx(4 * found["parameters"], rel=0.02)
    assert baseline["dollars"] == pytest.approx(0.09 * baseline["wan_bytes"] / 1e9)
    assert found["chosen"]["strategy"] == "auto"
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 2
    assert "http" not in page


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ("my_script", "MODULE:FUNCTION"),
        ("no_such_script:build", "cannot import"),
        ("my_script:missing", "has no missing"),
        ("my_script:number", "wanted a function"),
        ("my_script:no_batch", "--input"),
        ("my_script:raises", "the function that makes the model failed: ValueError: no weights at /data"),
        ("my_script:leaves", "the function that makes the model failed: SystemExit: 3"),
        ("my_script:breaks", "failed: RuntimeError: boom"),
        ("broken_script:build", "cannot import broken_script: invalid syntax"),
        ("eager_script:build", "importing eager_script failed: SystemExit: 2; what a script does by itself"),
        ("my_script:looks", "give --measure"),
    ],
)
def test_a_model_that_cannot_be_made_is_told(
    model: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_script.py").write_text(SCRIPT)
    (tmp_path / "broken_script.py").write_text("def build(:\n")
    (tmp_path / "eager_script.py").write_text("raise SystemExit(2)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("my_script", None)
    sites = ["--sites", "a=H100", "--link", "ohio-a=1Gbit/s,1ms"]
    done = CliRunner().invoke(app, ["plan", "--model", model, *sites])
    sys.modules.pop("my_script", None)
    assert isinstance(done.exception, PlanError)
    assert wanted in str(done.exception)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("my_script", None)
    yield
    sys.modules.pop("my_script", None)


@pytest.mark.usefixtures("script")
def test_a_model_that_looks_at_values_can_be_measured() -> None:
    given = ["--sites", "a=H100", "--link", "ohio-a=1Gbit/s,1ms", "--steps", "4", "--strategies", "baseline", "--json"]
    done = CliRunner().invoke(app, ["plan", "--model", "my_script:looks", "--measure", *given])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["sites"]["a"]["seconds_per_step"] > 0


@pytest.mark.usefixtures("script")
def test_sixteen_sites_that_are_alike_have_one_row_and_traffic_may_be_free() -> None:
    names = [f"dc-{number}" for number in range(1, 17)]
    sites = ",".join(f"{name}=A100" for name in names)
    links = " ".join(f"ohio-{name}={'1' if name != 'dc-7' else '2'}Gbit/s,10ms" for name in names)
    given = ["--sites", sites, "--link", links, "--steps", "8", "--strategies", "baseline", "--price", "0"]
    done = CliRunner().invoke(app, ["plan", "--model", "my_script:build", *given, "--page", "page.html"])
    assert done.exit_code == 0, done.output
    for label in ("each of dc-1 to dc-6", "dc-7", "each of dc-8 to dc-16"):
        assert sum(line.startswith(label + " ") for line in done.output.splitlines()) == 2, "memory, and the link"
        assert f">{label}</td>" in Path("page.html").read_text()
    row = next(line for line in done.output.splitlines() if line.startswith("baseline"))
    assert row.split().count("0.00") == 2


@pytest.mark.usefixtures("script")
def test_time_can_be_asked_for_in_tokens() -> None:
    recipe = Recipe.load(RECIPES / "gpt.yaml")
    source = sources.of_recipe(recipe, measure=False)
    assert source.samples(None, 1281) == 11  # windows of 128 characters
    assert source.samples(7, None) == 7
    with pytest.raises(PlanError, match="not both"):
        source.samples(7, 128)
    laptop = sources.of_recipe(Recipe.load(RECIPES / "laptop.yaml"), measure=False)
    with pytest.raises(PlanError, match="--samples instead"):
        laptop.samples(None, 100)


def test_a_sharded_site_sends_the_models_own_type_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "wide_model.py").write_text("import torch\ndef build(): return torch.nn.Linear(2048, 2048)\n")

    def given(dtype: str | None) -> sources.ModelArguments:
        return sources.ModelArguments(
            model="wide_model:build",
            sites="a=64xH100",
            links=("ohio-a=1Gbit/s,1ms",),
            input="2048",
            batch=1,
            steps=4,
            optimizer="adamw",
            sharding="fsdp2",
            dtype=dtype,
            checkpointing=False,
        )

    whole, half = (sources.of_model(given(dtype), devices.DEVICES, measure=False) for dtype in (None, "bfloat16"))
    (one,), (other,) = whole.scenario.sites, half.scenario.sites
    assert other.lan.bandwidth_bit_s == pytest.approx(2 * one.lan.bandwidth_bit_s)


@pytest.mark.usefixtures("script")
def test_what_a_model_prints_does_not_disturb_json() -> None:
    given = ["--sites", "a=2xH100", "--link", "ohio-a=1Gbit/s,1ms", "--steps", "4", "--strategies", "diloco(every=2)"]
    done = CliRunner().invoke(app, ["plan", "--model", "my_script:prints", *given, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["batch"], list(found["strategies"])) == (8, ["diloco(every=2)"])
    assert "loading the weights" in done.stderr


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--optimizer", "adamm"], "--optimizer adamm: wanted one of"),
        (["--dtype", "int8"], "trained in a floating-point type"),
        (["--dtype", "fp16"], "--dtype: 'fp16' is not a type of torch"),
        (["--strategies", ""], "no strategy; wanted names"),
        (["--input", "0x3x3"], "wanted the shape of a sample"),
        (["--input", "64:quint8"], "wanted a type such as float32"),
        (["--sharding", "ddp"], "wanted none or fsdp2"),
        (["--page", "/proc/plan.html", "--strategies", "baseline"], "choose another file"),
        (["--set", "training.batch=7"], "--set changes a recipe, and there is none"),
        (["--link", "ohio-a=1bit/s,1ms", "--steps", "4", "--strategies", "baseline"], "twice"),
    ],
)
def test_options_that_cannot_be_meant_are_told(options: list[str], wanted: str) -> None:
    given = ["--sites", "a=H100", "--link", "ohio-a=1Gbit/s,1ms", "--steps", "4"]
    done = CliRunner().invoke(app, ["plan", "--model", "my_script:build", *given, *options])
    assert isinstance(done.exception, PlanError), done.output
    assert wanted in str(done.exception)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--batch", "7"], "--batch goes with --model; with a recipe, change it: --set training.batch=..."),
        (["--optimizer", "adam"], "--set training.optimizer.name="),
        (["--sites", "a=H100"], "--sites goes with --model"),
        (["--dtype", "bfloat16"], "--dtype goes with --model"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(options: list[str], wanted: str) -> None:
    done = CliRunner().invoke(app, ["plan", str(RECIPES / "laptop.yaml"), *options])
    assert isinstance(done.exception, PlanError), done.output
    assert wanted in str(done.exception)


def test_a_recipe_and_a_model_are_not_planned_together() -> None:
    done = CliRunner().invoke(app, ["plan", "laptop", "--model", "my_script:build"])
    assert isinstance(done.exception, PlanError)
    assert "a recipe (laptop) and --model my_script:build were given" in str(done.exception)


def test_the_time_of_a_recipe_is_shown_by_layer_and_phase() -> None:
    done = CliRunner().invoke(app, ["plan", str(RECIPES / "laptop.yaml"), "--strategies", "baseline", "--json"])
    found = json.loads(done.stdout)
    seconds = found["step"]["seconds"]["virginia"]
    assert sum(seconds.values()) == pytest.approx(found["sites"]["virginia"]["seconds_per_step"])
    by_layer = [layer["seconds"]["virginia"] for layer in found["step"]["layers"]]
    assert sum(own["backward"] for own in by_layer) == pytest.approx(seconds["backward"])


def test_a_link_on_which_a_site_is_lost_is_told() -> None:
    options = ["--set", "links.0.bandwidth=1 bit/s", "--strategies", "baseline,baseline(t_global=null)"]
    done = CliRunner().invoke(app, ["plan", str(RECIPES / "laptop.yaml"), *options])
    assert done.exit_code == 0, done.output
    assert "baseline: virginia would be lost, with pushes later than t_global (auto, 60 s at first)" in done.output
    assert done.output.count("would be lost") == 1


def test_a_link_on_which_a_round_takes_years_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "large_model.py").write_text("import torch\ndef build(): return torch.nn.Linear(20000, 20000)\n")
    given = ["--sites", "a=H100", "--link", "ohio-a=1bit/s,1ms", "--input", "20000", "--strategies", "baseline"]
    done = CliRunner().invoke(app, ["plan", "--model", "large_model:build", *given])
    assert isinstance(done.exception, PlanError), done.output
    assert "the links are too slow for this model" in str(done.exception)
