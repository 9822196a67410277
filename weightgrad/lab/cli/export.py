"""`weightgrad export`: the model of a run, or of a file, quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weightgrad.lab.cli import recipe_argument
from weightgrad.lab.report.number_text import bytes_text, percent_text, ratio_text
from weightgrad.lab.run import export as run_export
from weightgrad.lab.run.export import Export


def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_FILE",
            help="Directory of a run (simulate, launch, emulate, serve --out), or a safetensors file.",
            exists=True,
        ),
    ],
    out: Annotated[Path, typer.Option(help="The file to write.", dir_okay=False)],
    weights: Annotated[
        str,
        typer.Option(
            metavar="CODEC", help="Codec of the weights: lossaware(bits=4), codebook(bits=4), qsgd(bits=8), fp16 ..."
        ),
    ] = "lossaware(bits='ternary')",
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Matrices that stay in full precision: names with * and ?, separated by commas, or none.",
            show_default="those that the strategy exempts: the first and the last",
        ),
    ] = None,
    layout: Annotated[
        str,
        typer.Option(help="auto: as compressed-tensors packs integers, where they fit. weightgrad: always our own."),
    ] = "auto",
    recipe: Annotated[
        str | None,
        typer.Option(help="The recipe of the model, for the accuracy.", show_default="recipe.yaml beside it"),
    ] = None,
) -> None:
    """Quantize a trained model and write it as one safetensors file, which weightgrad.load_quantized reads."""
    chosen = None if recipe is None else recipe_argument.load(recipe, None)
    kept = () if keep == "none" else keep
    show(run_export.export(source, out, weights=weights, keep=kept, layout=layout, recipe=chosen))


def show(done: Export) -> None:
    """Print what was written."""
    model = done.model
    quantized = len(model.packed) + len(model.halves)
    kept = model.kept_matrices
    kept_text = f"{', '.join(kept)} and all vectors" if kept else "all vectors"
    if not done.ordered:
        kept_text += " (the file does not say which matrix is the first or the last: name them with --keep)"
    accuracy = "not known: there is no recipe.yaml beside the model; name the recipe with --recipe"
    if done.accuracy is not None:
        accuracy = f"{percent_text(done.accuracy)} % on the test data, {percent_text(done.accuracy_before)} % before"
    ratio = ratio_text(done.bytes_before / done.nbytes)
    for name, value in (
        ("weights", f"{model.weights} for {quantized} of {quantized + len(kept)} matrices"),
        ("full precision", kept_text),
        ("size", f"{bytes_text(done.nbytes)}, {ratio} smaller than {bytes_text(done.bytes_before)}"),
        ("accuracy", accuracy),
        ("written", f"{done.out}; weightgrad.load_quantized reads it"),
    ):
        print(f"{name:16}{value}")
