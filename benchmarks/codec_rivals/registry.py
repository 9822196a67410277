"""The rival codecs, each for one of the jobs that WeightGrad's codecs do.

Three kinds. Expressions: what gradient compression research code writes in plain torch, on the
whole tensor, every step a new temporary. Chunks: the same arithmetic as fast as we could make it
without a kernel of its own, a piece at a time so that temporaries stay in the cache, results
preallocated, sixteen random bits an element from numpy's fastest generator instead of torch.rand,
torch's vectorized quantizer instead of a cast, the piece size tuned on the spot. Libraries:
bitsandbytes and hivemind, when they are installed, whole and in parts, and pi-quant (pypiquant).

A rival counts the bytes it would have to send: codes, scales, indices. None of them checks for
NaN, frames its bytes or describes them; WeightGrad's rows pay for that.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from codec_rivals.coder import CHUNKS, Coder, ErrorFeedback, Label, LibraryCoder, Maker, Pieces, Rival
from codec_rivals.dense import (
    Cast,
    Levels,
    OneBitExpressions,
    PackedSigns,
    PerTensor,
    QsgdExpressions,
    SignExpressions,
    TernGradExpressions,
)
from codec_rivals.piquant_coder import PiQuant
from codec_rivals.sparse import DgcChunks, DgcExpressions, LocalTopK, PowerSgd, SampledTopK, TopK
from torch import Tensor


def _bitsandbytes(found: Any) -> list[Rival]:
    functional = found.functional
    name = f"bitsandbytes {found.__version__}"

    def eight(block: int) -> Maker:
        return lambda like, chunk: LibraryCoder(
            like,
            chunk,
            lambda part: functional.quantize_blockwise(part, blocksize=block),
            lambda kept: functional.dequantize_blockwise(*kept),
            lambda kept: kept[0].numel() + 4 * kept[1].absmax.numel(),
        )

    def four(kind: str, block: int) -> Maker:
        return lambda like, chunk: LibraryCoder(
            like,
            chunk,
            lambda part: functional.quantize_4bit(part, quant_type=kind, blocksize=block),
            lambda kept: functional.dequantize_4bit(*kept),
            lambda kept: kept[0].numel() + 4 * kept[1].absmax.numel(),
        )

    table = [
        ("8 bit", "nearest", "quantize_blockwise(512)", eight(512)),
        ("8 bit", "nearest", "quantize_blockwise(4096)", eight(4096)),
        ("4 bit", "nearest, table", "quantize_4bit(fp4, 64)", four("fp4", 64)),
        ("4 bit", "nearest, table", "quantize_4bit(nf4, 64)", four("nf4", 64)),
        ("4 bit", "nearest, table", "quantize_4bit(nf4, 512)", four("nf4", 512)),
    ]
    return _whole_and_parts(table, name, CHUNKS)


def _hivemind(found: Any) -> list[Rival]:
    compression = found.compression
    name = f"hivemind {found.__version__}"

    def coder(kind: str) -> Maker:
        codec = getattr(compression, kind)()

        def make(like: Tensor, chunk: int) -> Coder:
            info = compression.CompressionInfo.from_tensor(like)
            return LibraryCoder(
                like,
                chunk,
                lambda part: codec.compress(part, info),
                lambda kept: codec.extract(kept),
                lambda kept: len(kept.buffer),
            )

        return make

    kinds = {
        "Float16Compression": ("half precision", "fp16"),
        "Uniform8BitQuantization": ("8 bit", "nearest"),
        "Quantile8BitQuantization": ("8 bit", "nearest"),
        "BlockwiseQuantization": ("8 bit", "nearest"),
    }
    table = [(job, task, kind, coder(kind)) for kind, (job, task) in kinds.items()]
    return _whole_and_parts(table, name, (1 << 17, 1 << 18))  # its averager cuts parts of 2**19 bytes


def _piquant(found: Any, threads: int) -> list[Rival]:
    name = f"pi-quant {found.__version__}"

    def maker(bits: int, rounding: str) -> Maker:
        return lambda like, _: PiQuant(like, found, threads, bits, rounding)

    return [
        Rival(Label(job, task, f"uint{bits}, one scale", name), maker(bits, rounding))
        for job, bits in (("8 bit", 8), ("4 bit", 4))
        for task, rounding in (("stochastic", "STOCHASTIC"), ("nearest", "NEAREST"))
    ]


def _whole_and_parts(
    table: Sequence[tuple[str, str, str, Maker]], library: str, chunks: tuple[int, ...]
) -> list[Rival]:
    rivals = []
    for job, task, name, make in table:
        rivals.append(Rival(Label(job, task, name, library), make))
        rivals.append(Rival(Label(job, task, f"{name}, parts", library), make, chunks))
    return rivals


def libraries(threads: int) -> tuple[list[Rival], list[str]]:
    """Rivals of the libraries that are installed, and a line about each that is not."""
    os.environ["QUANTIZATION_THREADS"] = str(threads)  # hivemind reads it once, when imported
    rivals, notes = [], []
    makers: dict[str, Callable[[Any], list[Rival]]] = {
        "bitsandbytes": _bitsandbytes,
        "hivemind": _hivemind,
        "piquant": lambda found: _piquant(found, threads),
    }
    for name, maker in makers.items():
        try:
            rivals += maker(importlib.import_module(name))
        except ImportError as error:
            notes.append(f"{name} is not installed ({error}); its rows are left out")
        except Exception as error:  # an optional library must not stop the benchmark
            notes.append(f"{name} is installed and fails to import ({error}); its rows are left out")
    return rivals, notes


# --- The list ------------------------------------------------------------------------------


def torch_rivals() -> list[Rival]:
    """Casts, expressions and chunks: what needs only torch."""
    rivals: list[Rival] = []

    def add(job: str, task: str, name: str, make: Maker, chunks: tuple[int, ...] = ()) -> None:
        rivals.append(Rival(Label(job, task, name, "torch"), make, chunks))

    def residual(inner: Callable[[Tensor, int], Pieces]) -> Maker:
        return lambda like, chunk: ErrorFeedback(inner(like, chunk), like)

    add("half precision", "fp16", "cast", lambda like, _: Cast(like, torch.float16))
    add("half precision", "bf16", "cast", lambda like, _: Cast(like, torch.bfloat16))
    add("8 bit", "stochastic", "qsgd expressions, int8", lambda like, c: QsgdExpressions(like, c, 8))
    add("8 bit", "stochastic", "qsgd chunks", lambda like, c: Levels(like, c, 8), CHUNKS)
    add("8 bit", "nearest", "quantize_per_tensor", PerTensor)
    add("8 bit", "nearest", "quantize_per_tensor, chunks", PerTensor, CHUNKS)
    add("8 bit", "nearest", "rounding chunks", lambda like, c: Levels(like, c, 8, stochastic=False), CHUNKS)

    def qsgd_whole(like: Tensor, chunk: int) -> Pieces:
        return QsgdExpressions(like, chunk, 4)

    def qsgd_chunks(like: Tensor, chunk: int) -> Pieces:
        return Levels(like, chunk, 4)

    add("4 bit", "stochastic", "qsgd expressions, packed", qsgd_whole)
    add("4 bit", "stochastic", "qsgd chunks", qsgd_chunks, CHUNKS)
    add("4 bit", "nearest", "rounding chunks", lambda like, c: Levels(like, c, 4, stochastic=False), CHUNKS)
    add("4 bit", "feedback", "qsgd expressions, residual", residual(qsgd_whole))
    add("4 bit", "feedback", "qsgd chunks, residual", residual(qsgd_chunks), CHUNKS)

    def ternary_chunks(like: Tensor, chunk: int) -> Pieces:
        return Levels(like, chunk, 2, clip=2.5)

    add("ternary", "stochastic", "terngrad expressions, int8", TernGradExpressions)
    add("ternary", "stochastic", "terngrad chunks, 2 bit", ternary_chunks, CHUNKS)
    add("ternary", "feedback", "terngrad expressions, residual", residual(TernGradExpressions))
    add("ternary", "feedback", "terngrad chunks, residual", residual(ternary_chunks), CHUNKS)

    def means_chunks(like: Tensor, chunk: int) -> Pieces:
        return PackedSigns(like, chunk, two_means=True)

    add("one bit", "sign", "signsgd expressions, uint8", SignExpressions)
    add("one bit", "sign", "signsgd chunks, packbits", lambda like, c: PackedSigns(like, c, two_means=False), CHUNKS)
    add("one bit", "means", "onebit masks", OneBitExpressions)
    add("one bit", "means", "onebit chunks, packbits", means_chunks, CHUNKS)
    add("one bit", "feedback", "onebit masks, residual", residual(OneBitExpressions))
    add("one bit", "feedback", "onebit chunks, residual", residual(means_chunks), CHUNKS)

    add("sparse", "top 1%", "topk, int64", lambda like, _: TopK(like, 0.01, torch.int64))
    add("sparse", "top 1%", "topk, int32", lambda like, _: TopK(like, 0.01, torch.int32))
    add("sparse", "about 1%", "topk of each chunk", lambda like, c: LocalTopK(like, c, 0.01), CHUNKS)
    add("sparse", "about 1%", "sampled threshold chunks", lambda like, c: SampledTopK(like, c, 0.01), CHUNKS)
    add("sparse", "top 1%, feedback", "topk, residual", lambda like, _: TopK(like, 0.01, torch.int32, residual=True))
    for name, kind in (("topk of each chunk, residual", LocalTopK), ("sampled threshold, residual", SampledTopK)):

        def about(like: Tensor, chunk: int, kind: Callable[..., Coder] = kind) -> Coder:
            return kind(like, chunk, 0.01, residual=True)

        add("sparse", "about 1%, feedback", name, about, CHUNKS)
    add("sparse", "dgc 0.1%", "dgc expressions, int64", lambda like, _: DgcExpressions(like, 0.001))
    add("sparse", "dgc 0.1%", "dgc chunks, int32", lambda like, c: DgcChunks(like, c, 0.001), CHUNKS)
    for task, feedback in (("plain", False), ("feedback", True)):
        for name, by_column in (("powersgd hook arithmetic", False), ("powersgd, by column", True)):

            def power(like: Tensor, _: int, feedback: bool = feedback, by_column: bool = by_column) -> Coder:
                return PowerSgd(like, 2, residual=feedback, by_column=by_column)

            add("low rank", task, f"{name}, error" if feedback else name, power)
    return rivals
