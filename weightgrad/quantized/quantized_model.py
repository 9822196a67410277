"""A model whose large tensors are quantized, and how it is made from weights of full precision."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn

from weightgrad import codecs
from weightgrad.codecs import Codec, Fp32, LossAware
from weightgrad.core.layout import Layout
from weightgrad.errors import EncodeError, SpecError
from weightgrad.kernels import derive
from weightgrad.local.weight_encoder import WeightEncoder
from weightgrad.quantized import quantized_file
from weightgrad.quantized.packed_tensor import FORMATS, PACK_QUANTIZED, PackedTensor

_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_LAYOUTS = ("auto", "weightgrad")


@dataclass(frozen=True, kw_only=True)
class QuantizedModel:
    """A model with quantized tensors.

    Attributes:
        weights: The codec, as text.
        packed: The quantized tensors.
        halves: Tensors in half precision, by name.
        halves_of: The dtypes that those had before.
        kept: Tensors as they were: those that are exempt, and all that are no matrices of floats.
        names: Names of all tensors in their order in the model.
    """

    weights: str
    packed: tuple[PackedTensor, ...]
    halves: Mapping[str, Tensor]
    halves_of: Mapping[str, torch.dtype]
    kept: Mapping[str, Tensor]
    names: tuple[str, ...]

    @property
    def kept_matrices(self) -> list[str]:
        """Names of the tensors of two dimensions or more that stay as they were."""
        return [name for name, tensor in self.kept.items() if tensor.dim() >= 2 and tensor.is_floating_point()]

    def state_dict(self) -> dict[str, Tensor]:
        """The values that a reader of the file gets, by name, in the order of the model."""
        found = {**self.kept, **{name: t.to(self.halves_of[name]) for name, t in self.halves.items()}}
        found |= {tensor.name: tensor.decode() for tensor in self.packed}
        return {name: found[name] for name in self.names}

    def save(self, path: str | Path) -> int:
        """Write the model.

        Args:
            path: The file.

        Returns:
            Its size in bytes.

        Raises:
            ModelFileError: The file cannot be written, or two tensors of it would have one name.
        """
        return quantized_file.write(
            Path(path),
            packed=self.packed,
            halves={name: (tensor, self.halves_of[name]) for name, tensor in self.halves.items()},
            kept=self.kept,
            facts={"weights": self.weights, "order": json.dumps(list(self.names)), **self._config()},
        )

    def _config(self) -> dict[str, str]:
        """What compressed-tensors has to know, as it stands in the config.json of a model; nothing without such."""
        groups: dict[tuple[int, str, int | None], list[str]] = {}
        for tensor in self.packed:
            if tensor.layout != PACK_QUANTIZED or not tensor.name.endswith(".weight"):
                continue
            per_row = tensor.scales.shape[1] if tensor.scales.dim() == 2 else 0
            strategy = ("tensor", "channel")[per_row] if per_row < 2 else "group"
            size = tensor.columns // per_row if per_row > 1 else None
            groups.setdefault((tensor.bits, strategy, size), []).append(tensor.name.removesuffix(".weight"))
        if not groups:
            return {}
        config = {
            "quant_method": "compressed-tensors",
            "format": PACK_QUANTIZED,
            "quantization_status": "compressed",
            "ignore": [name.removesuffix(".weight") for name in self.kept_matrices if name.endswith(".weight")],
            "config_groups": {
                f"group_{number}": {
                    "targets": targets,
                    "weights": {
                        "num_bits": bits,
                        "type": "int",
                        "symmetric": True,
                        "strategy": strategy,
                        "group_size": size,
                        "dynamic": False,
                    },
                }
                for number, ((bits, strategy, size), targets) in enumerate(groups.items())
            },
        }
        return {"quantization_config": json.dumps(config)}


def quantize(
    model: nn.Module | Mapping[str, Tensor],
    weights: str | Codec = "lossaware(bits='ternary')",
    *,
    keep: str | Sequence[str] = "default",
    layout: str = "auto",
    curvature: Mapping[str, Tensor] | None = None,
) -> QuantizedModel:
    """Quantize the matrices of a model: its floating-point tensors of two dimensions or more.

    Vectors and scalars (biases, norms, running statistics) and integers are never quantized: they are small and
    sensitive.

    Args:
        model: A module, or a state dict in the order of its module.
        weights: A codec without memory that encodes weights: lossaware, codebook, qsgd, sign, fp16, bf16 or fp32.
        keep: Matrices that stay as they are: "default", the first and the last of the model, as the strategies have
            it; or names with * and ?, of which each must match a matrix; an empty list keeps none.
        layout: "auto", or "weightgrad" for our own layout throughout: ternary weights then take 1.6 bits instead of 2,
            and compressed-tensors cannot read them.
        curvature: For lossaware: how much the loss bends with each weight, by name; without it all weights count alike.

    Returns:
        The quantized model.

    Raises:
        SpecError: The codec is none for weights, or `keep` or `layout` is wrong.
        EncodeError: A tensor cannot be encoded; the error names it.
    """
    codec = _weight_codec(weights)
    if layout not in _LAYOUTS:
        raise SpecError(f"layout={layout!r}; it is one of {', '.join(_LAYOUTS)}")
    state = {name: _plain(tensor) for name, tensor in _tensors(model).items()}
    matrices = [name for name, tensor in state.items() if tensor.dim() >= 2 and tensor.is_floating_point()]
    exempt = _kept(state, matrices, keep, codec)
    packed: list[PackedTensor] = []
    halves: dict[str, Tensor] = {}
    for place, name in enumerate(matrices):
        tensor = state[name]
        if name in exempt or not tensor.numel() or isinstance(codec, Fp32):
            continue
        bends = None if curvature is None else curvature.get(name)
        try:
            if isinstance(codec, LossAware) and bends is not None:
                payload, _ = codec.encode(tensor, {}, derive(0, place), curvature=bends)
            else:
                payload, _ = codec.encode(tensor, {}, derive(0, place))
        except EncodeError as error:
            raise type(error)(f"{name}: {error}") from error
        if payload.codec in _HALVES:
            halves[name] = payload.body.view(_HALVES[payload.codec]).view(tensor.shape)
            continue
        one = PackedTensor.of(name, payload, layout)
        if one is None:
            raise _no_weight_codec(codec)
        packed.append(one)
    done = {one.name for one in packed} | halves.keys()
    return QuantizedModel(
        weights=str(codec),
        packed=tuple(packed),
        halves=halves,
        halves_of={name: state[name].dtype for name in halves},
        kept={name: tensor for name, tensor in state.items() if name not in done},
        names=tuple(state),
    )


def save_quantized(
    model: nn.Module | Mapping[str, Tensor],
    path: str | Path,
    *,
    weights: str = "lossaware(bits='ternary')",
    keep: str | Sequence[str] = "default",
    layout: str = "auto",
) -> QuantizedModel:
    """Quantize the matrices of a model and write it to a file, which `load_quantized` reads.

    Args:
        model: A module, or a state dict in the order of its module.
        path: The file to write.
        weights: The codec of the weights, such as "lossaware(bits='ternary')", "codebook(bits=4)" or "fp16".
        keep: Matrices that stay in full precision: "default", the first and the last; or names with * and ?.
        layout: "auto" writes packed integers as compressed-tensors does, where they fit; "weightgrad" never does.

    Returns:
        What was written.

    Raises:
        SpecError: The codec is none for weights, or `keep` or `layout` is wrong.
        EncodeError: A tensor cannot be encoded.
        ModelFileError: The file cannot be written.
    """
    found = quantize(model, weights, keep=keep, layout=layout)
    found.save(path)
    return found


def _tensors(model: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return model.state_dict() if isinstance(model, nn.Module) else model


def _plain(tensor: Tensor) -> Tensor:
    """A copy on the CPU that shares memory with no other tensor, as safetensors wants it."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _weight_codec(weights: str | Codec) -> Codec:
    codec = codecs.parse(weights) if isinstance(weights, str) else weights
    if codec.init(torch.zeros(2, 2, dtype=torch.float32)):
        raise _no_weight_codec(codec)
    payload, _ = codec.encode(torch.ones(2, 2, dtype=torch.float32), {}, 0)
    if payload.codec not in (*FORMATS, *_HALVES, "fp32"):
        raise _no_weight_codec(codec)
    return codec


def _no_weight_codec(codec: Codec) -> SpecError:
    return SpecError(
        f"weights={str(codec)!r} does not give a file: weights take a codec without memory that encodes every element, "
        "such as lossaware(bits='ternary'), codebook(bits=4), qsgd(bits=4, rounding='nearest') or fp16"
    )


def _kept(state: Mapping[str, Tensor], matrices: list[str], keep: str | Sequence[str], codec: Codec) -> set[str]:
    if keep == "default":
        layout = Layout.of_shapes((name, tuple(tensor.shape)) for name, tensor in state.items())
        exempt = WeightEncoder(codec).exempt_slots(layout)
        return {layout.slots[place].name for place in exempt}
    found: set[str] = set()
    for pattern in keep.split(",") if isinstance(keep, str) else keep:
        own = {name for name in matrices if fnmatchcase(name, pattern.strip())}
        if not own:
            raise SpecError(f"keep={pattern.strip()!r} is none of the matrices {', '.join(matrices) or '(none)'}")
        found |= own
    return found
