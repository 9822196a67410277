"""`weightgrad export`: runs and files out, with size, ratio and accuracy."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import weightgrad as wg
from weightgrad.errors import ModelFileError, SpecError
from weightgrad.lab.cli.export import export
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run.simulation import simulate

app = typer.Typer()
app.command()(export)
RECIPE = Path(__file__).parents[3] / "recipes" / "laptop.yaml"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose weights are judged as ternary ones."""
    out = tmp_path_factory.mktemp("run")
    settings = ["strategy=weightgrad-paper", "training.steps=20", "training.evaluate_every=1000"]
    simulate(Recipe.load(RECIPE).with_settings(settings), out)
    return out


def lines(*arguments: str | Path) -> dict[str, str]:
    done = CliRunner().invoke(app, [str(one) for one in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return dict(re.split(r"\s{2,}|(?<=full precision)\s+", line, maxsplit=1) for line in done.output.splitlines())


def test_a_run_is_exported_as_it_was_judged(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "ternary.safetensors"
    said = lines(run, "--out", out)
    accuracy = json.loads((run / "summary.json").read_text())["accuracy"]
    assert said["accuracy"] == f"{100 * accuracy:.2f} % on the test data, {100 * accuracy:.2f} % before"
    assert said["full precision"] == "conv1.weight, linear2.weight and all vectors"
    assert re.fullmatch(r"36\.\d kB, 11\.\d× smaller than 421 kB", said["size"])  # noqa: RUF001
    found, judged = wg.load_quantized(out), load_file(run / "model.safetensors")
    assert found.keys() == judged.keys()
    assert all(torch.equal(found[name], judged[name]) for name in judged), "ternary weights lose nothing"


def test_another_codec_gets_the_weights_of_full_precision(run: Path, tmp_path: Path) -> None:
    said = lines(run, "--out", tmp_path / "m", "--weights", "fp16", "--keep", "none")
    assert said["weights"] == "fp16() for 4 of 4 matrices"
    found, master = wg.load_quantized(tmp_path / "m"), load_file(run / "master.safetensors")
    assert torch.equal(found["linear1.weight"], master["linear1.weight"].half().float())


def test_a_file_of_a_stranger(tmp_path: Path) -> None:
    tensors = {f"{name}.weight": torch.randn(64, 64) for name in ("b", "a", "c")} | {"a.bias": torch.zeros(64)}
    save_file(tensors, str(tmp_path / "theirs.safetensors"))
    said = lines(tmp_path / "theirs.safetensors", "--out", tmp_path / "m", "--weights", "codebook(bits=4)")
    assert said["accuracy"].startswith("not known: there is no recipe.yaml")
    assert "name them with --keep" in said["full precision"]
    assert [one.name for one in wg.load_packed(tmp_path / "m")] == ["a.weight", "b.weight", "c.weight"]
    lines(tmp_path / "theirs.safetensors", "--out", tmp_path / "m", "--keep", "a.weight,c*")
    assert [one.name for one in wg.load_packed(tmp_path / "m")] == ["b.weight"]


def test_what_cannot_be_exported(run: Path, tmp_path: Path) -> None:
    def refused(*arguments: str | Path) -> None:
        CliRunner().invoke(app, [str(one) for one in arguments], catch_exceptions=False)

    with pytest.raises(SpecError, match="no codec"):
        refused(run, "--out", tmp_path / "m", "--weights", "zip(3)")
    with pytest.raises(ModelFileError, match="is not there"):
        refused(tmp_path, "--out", tmp_path / "m")
    with pytest.raises(ModelFileError, match="is the file that is exported"):
        refused(run / "model.safetensors", "--out", run / "model.safetensors")
    (tmp_path / "text.safetensors").write_text("text")
    with pytest.raises(ModelFileError, match="no safetensors file"):
        refused(tmp_path / "text.safetensors", "--out", tmp_path / "m")
    save_file({"conv1.weight": torch.zeros(3, 3)}, str(tmp_path / "other.safetensors"))
    with pytest.raises(ModelFileError, match=r"the model of the recipe has conv1\.weight of shape"):
        refused(tmp_path / "other.safetensors", "--out", tmp_path / "m", "--recipe", RECIPE)
