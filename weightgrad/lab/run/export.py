"""The model of a run, or any safetensors file, quantized and written: what `weightgrad export` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from weightgrad import codecs
from weightgrad.errors import ModelFileError
from weightgrad.lab.recipes.recipe import Recipe
from weightgrad.lab.run import model_file
from weightgrad.lab.run.model_file import ModelFile
from weightgrad.lab.run.simulation import chosen_strategy
from weightgrad.lab.run.task import Training, evaluate
from weightgrad.quantized.quantized_file import load_quantized
from weightgrad.quantized.quantized_model import QuantizedModel, quantize


@dataclass(frozen=True, kw_only=True)
class Export:
    """What was written.

    Attributes:
        model: The quantized model.
        out: The file.
        nbytes: Its size.
        bytes_before: The bytes of the model's tensors before.
        accuracy: Of the model as it is read back; None without a recipe.
        accuracy_before: Of the model that was exported; None without a recipe.
        ordered: Whether the order of the tensors was known, so that the first and the last matrix could be kept.
    """

    model: QuantizedModel
    out: Path
    nbytes: int
    bytes_before: int
    accuracy: float | None
    accuracy_before: float | None
    ordered: bool


def export(
    source: Path,
    out: Path,
    *,
    weights: str,
    keep: str | Sequence[str] | None = None,
    layout: str = "auto",
    recipe: Recipe | None = None,
) -> Export:
    """Quantize a model and write it.

    Args:
        source: The directory of a run, or a safetensors file.
        out: The file to write.
        weights: The codec of the weights.
        keep: The matrices that stay in full precision, as for `quantize`; None: those that the run's strategy exempts,
            or the first and the last.
        layout: As for `quantize`.
        recipe: The recipe of the model; None looks for recipe.yaml beside it.

    Returns:
        What was written.

    Raises:
        ModelFileError: There is no model, it does not fit the recipe, or the file cannot be written.
        SpecError: The codec is none for weights, or `keep` or `layout` is wrong.
    """
    codecs.parse(weights)  # report its mistakes first: reading a model may take a while
    directory = source if source.is_dir() else source.parent
    if recipe is None and (directory / "recipe.yaml").is_file():
        recipe = Recipe.load(directory / "recipe.yaml")
    found = _read(source, weights, recipe)
    if out.exists() and source.is_file() and out.samefile(source):
        raise ModelFileError(f"--out {out} is the file that is exported; give another one")
    torch.set_num_threads(1)  # the same sums as in the run
    task = Training(recipe) if recipe is not None else None
    before = evaluate(task, found.tensors).accuracy if task is not None else None
    if task is not None and not found.ordered:
        names = [name for name in task.module.state_dict() if name in found.tensors]
        rest = [name for name in found.tensors if name not in names]
        found = ModelFile({name: found.tensors[name] for name in (*names, *rest)}, found.buffers, ordered=True)
    model = quantize(found.tensors, weights, keep=_keep(keep, recipe, found), layout=layout)
    size = model.save(out)
    return Export(
        model=model,
        out=out,
        nbytes=size,
        bytes_before=sum(tensor.nbytes for tensor in found.tensors.values()),
        accuracy=evaluate(task, load_quantized(out)).accuracy if task is not None else None,
        accuracy_before=before,
        ordered=found.ordered,
    )


def _same_values(trained: codecs.Codec | None, wanted: codecs.Codec) -> bool:
    """Whether weights that one codec has encoded lose nothing in the other: they differ in the curvature at most."""
    if isinstance(trained, codecs.LossAware) and isinstance(wanted, codecs.LossAware):
        trained = replace(trained, fisher=wanted.fisher)
    return trained == wanted


def _read(source: Path, weights: str, recipe: Recipe | None) -> ModelFile:
    """The model; in full precision where the run has another codec for its weights than the one that is wanted."""
    strategy = chosen_strategy(recipe) if recipe is not None else None
    same = strategy is not None and _same_values(strategy.codec("weights"), codecs.parse(weights))
    masters = source.is_dir() and not same and any(source.glob("master*.safetensors"))
    return model_file.read(source, "master" if masters else "model")


def _keep(keep: str | Sequence[str] | None, recipe: Recipe | None, found: ModelFile) -> str | Sequence[str]:
    if keep is not None:
        return keep
    exempt = chosen_strategy(recipe).exempt if recipe is not None else "default"
    if exempt != "default":
        matrices = {name for name, tensor in found.tensors.items() if tensor.dim() >= 2}
        return [name for name in exempt.split(",") if _matches(name.strip(), matrices)]
    return "default" if found.ordered else ()


def _matches(pattern: str, names: set[str]) -> bool:
    """Whether a pattern of a strategy, which may also be for vectors, is for one of these."""
    return any(fnmatchcase(name, pattern) for name in names)
