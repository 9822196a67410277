"""Files of quantized models: what is written is read, and what a stranger has changed is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import weightgrad as wg
from weightgrad.errors import EncodeError, ModelFileError, SpecError, WeightGradError
from weightgrad.quantized import quantize


class Network(nn.Module):
    """Convolutions, batch norm, and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 8, 3, bias=False)
        self.hidden = nn.Linear(32, 64)
        self.last = nn.Linear(64, 10)


WEIGHTS = ["lossaware(bits='ternary')", "lossaware(bits=4, per='row')", "codebook(bits=4)", "qsgd(bits=8)", "fp16"]


def written(path: Path, weights: str = WEIGHTS[0], **options: Any) -> Path:
    wg.save_quantized(Network(), path / "m.safetensors", weights=weights, **options)
    return path / "m.safetensors"


def contents(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(str(path), framework="pt") as opened:
        return load_file(str(path)), opened.metadata()


@pytest.mark.parametrize("layout", ["auto", "weightgrad"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_state_dict_comes_back(weights: str, layout: str, tmp_path: Path) -> None:
    found = wg.load_quantized(written(tmp_path, weights, layout=layout))
    module = Network()
    assert list(found) == list(module.state_dict())
    module.load_state_dict(found, strict=True)
    wanted = quantize(Network(), weights).state_dict()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name])
        assert tensor.dtype == Network().state_dict()[name].dtype
    for name in ("first.weight", "last.weight", "hidden.bias", "norm.running_var", "norm.num_batches_tracked"):
        assert torch.equal(found[name], Network().state_dict()[name]), "which are kept"
    assert not torch.equal(found["hidden.weight"], Network().state_dict()["hidden.weight"])


def test_packed_tensors_for_a_kernel(tmp_path: Path) -> None:
    second, hidden = wg.load_packed(written(tmp_path))
    assert (second.name, second.shape, second.bits) == ("second.weight", (8, 4, 3, 3), 2)
    values = (hidden.levels().float() * hidden.scales).view(hidden.shape)
    assert torch.equal(values, wg.load_quantized(tmp_path / "m.safetensors")["hidden.weight"])
    assert set(hidden.levels().unique().tolist()) == {-1, 0, 1}


def test_ternary_weights_are_written_without_loss(tmp_path: Path) -> None:
    once = wg.load_quantized(written(tmp_path))
    wg.save_quantized(once, tmp_path / "again.safetensors")
    again = wg.load_quantized(tmp_path / "again.safetensors")
    assert all(torch.equal(once[name], again[name]) for name in once)


def test_the_same_model_is_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    assert written(tmp_path).read_bytes() == written(tmp_path / "b").read_bytes()


def test_matrices_that_are_kept(tmp_path: Path) -> None:
    none = quantize(Network(), keep=())
    assert [one.name for one in none.packed] == ["first.weight", "second.weight", "hidden.weight", "last.weight"]
    assert quantize(Network(), keep="*.weight").packed == ()
    assert quantize(Network(), keep=["second*", "last.weight"]).kept_matrices == ["second.weight", "last.weight"]
    with pytest.raises(SpecError, match=r"keep='layer4.weight' is none of the matrices first.weight, second.weight"):
        quantize(Network(), keep=["layer4.weight"])


@pytest.mark.parametrize("weights", ["topk(0.1)", "ef(qsgd(bits=4))", "powersgd()", "onebit()"])
def test_a_codec_that_is_none_for_weights(weights: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="weights take a codec without memory"):
        written(tmp_path, weights)


def test_a_tensor_that_cannot_be_encoded_is_named(tmp_path: Path) -> None:
    state = Network().state_dict()
    state["hidden.weight"][3, 3] = float("nan")
    with pytest.raises(EncodeError, match=r"hidden\.weight: "):
        wg.save_quantized(state, tmp_path / "m.safetensors")


def test_names_that_meet(tmp_path: Path) -> None:
    state = {**Network().state_dict(), "hidden.weight_scale": torch.zeros(3)}
    with pytest.raises(ModelFileError, match=r"two tensors of the file would be called hidden\.weight_scale"):
        wg.save_quantized(state, tmp_path / "m.safetensors")


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelFileError, match="cannot write"):
        wg.save_quantized(Network(), tmp_path / "file" / "m.safetensors")


# -- hostile files --------------------------------------------------------------------------------

Tensors: TypeAlias = dict[str, Tensor]
Entries: TypeAlias = dict[str, Any]


def entry(**changes: Any) -> Callable[[Tensors, Entries], None]:
    return lambda tensors, entries: entries["hidden.weight"].update(changes)


def tensor(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Tensors, Entries], None]:
    return lambda tensors, entries: tensors.update({name: make(tensors[name])})


def without(name: str) -> Callable[[Tensors, Entries], None]:
    return lambda tensors, entries: tensors.__delitem__(name)


BAD_PACKED: dict[str, tuple[Callable[[Tensors, Entries], None], str]] = {
    "an unknown layout": (entry(layout="zip"), "is described by"),
    "one key more": (entry(hidden=1), "is described by"),
    "no description": (lambda tensors, entries: entries.update({"hidden.weight": [1]}), "is described by"),
    "an unknown dtype": (entry(dtype="int8"), "has dtype"),
    "a dtype that is none": (entry(dtype=["float32"]), "has dtype"),
    "three bits": (entry(bits=3), "has codes of 3 bits"),
    "bits that are no number": (entry(bits="2"), "has codes of 2 bits"),
    "true bits": (entry(bits=True), "has codes of True bits"),
    "another width than was packed": (entry(bits=4), r"hidden.weight_packed is int32\[64, 2\]"),
    "a shape of others": (entry(shape=[64, 64]), "hidden.weight_packed is int32"),
    "a huge shape": (entry(shape=[2**40, 2**40]), "elements"),
    "a negative size": (entry(shape=[-64, -32]), "has shape"),
    "a fraction": (entry(shape=[64.0, 32]), "has shape"),
    "no shape": (entry(shape=[]), "has shape"),
    "a shape of text": (entry(shape="64"), "has shape"),
    "no scale": (without("hidden.weight_scale"), "hidden.weight_scale is missing"),
    "no codes": (without("hidden.weight_packed"), "hidden.weight_packed is missing"),
    "two scales": (tensor("hidden.weight_scale", lambda t: torch.ones(2)), "hidden.weight_scale is float32"),
    "scales for no group": (tensor("hidden.weight_scale", lambda t: torch.ones(64, 3)), "hidden.weight_scale is"),
    "no scales a row": (tensor("hidden.weight_scale", lambda t: torch.ones(64, 0)), "hidden.weight_scale is"),
    "a scale that is not finite": (tensor("hidden.weight_scale", lambda t: t / 0), "not finite"),
    "a scale of another dtype": (tensor("hidden.weight_scale", Tensor.double), "hidden.weight_scale is float64"),
    "codes of another dtype": (tensor("hidden.weight_packed", Tensor.long), "hidden.weight_packed is int64"),
    "another shape in the file": (tensor("hidden.weight_shape", lambda t: t.flip(0)), "hidden.weight_shape is"),
    "a level that no encoder writes": (tensor("hidden.weight_packed", torch.zeros_like), "a level of -2"),
    "packed and whole": (lambda t, e: t.update({"hidden.weight": torch.zeros(64, 32)}), "twice"),
    "a tensor more": (lambda t, e: t.update({"stranger": torch.zeros(3)}), "'order' does not name its tensors"),
}
BAD_CODES: dict[str, tuple[Callable[[Tensors, Entries], None], str]] = {
    "an unknown format": (entry(format="sparse"), "is of format"),
    "a format that is none": (entry(format=3), "is of format"),
    "nine bits": (entry(bits=9), "has codes of 9 bits"),
    "a group of a codebook": (entry(group=5), "has groups of 5"),
    "a value less": (tensor("hidden.weight_scales", lambda t: t[1:].clone()), "hidden.weight_scales is"),
    "a byte less": (tensor("hidden.weight_codes", lambda t: t[1:].clone()), "hidden.weight_codes is"),
    "another format": (entry(format="uniform", group=2048), "hidden.weight_scales is"),
}


def spoil(path: Path, how: Callable[[Tensors, Entries], None]) -> None:
    tensors, metadata = contents(path)
    entries = json.loads(metadata["tensors"])
    how(tensors, entries)
    save_file(tensors, str(path), metadata={**metadata, "tensors": json.dumps(entries)})


@pytest.mark.parametrize("case", BAD_PACKED)
def test_a_bad_packed_tensor(case: str, tmp_path: Path) -> None:
    how, why = BAD_PACKED[case]
    spoil(written(tmp_path), how)
    with pytest.raises(ModelFileError, match=why):
        wg.load_quantized(tmp_path / "m.safetensors")


@pytest.mark.parametrize("case", BAD_CODES)
def test_a_bad_tensor_of_our_layout(case: str, tmp_path: Path) -> None:
    how, why = BAD_CODES[case]
    spoil(written(tmp_path, "codebook(bits=4)"), how)
    with pytest.raises(ModelFileError, match=why):
        wg.load_quantized(tmp_path / "m.safetensors")


JUNK: list[Any] = [None, True, -1, 0, 2**31, 2**70, 1e308, "", "half", "sign", [], {}, [[]], [2**40, 2**40], {"a": 1}]


@pytest.mark.parametrize("weights", [WEIGHTS[0], "codebook(bits=4)", "fp16"])
def test_whatever_stands_in_the_place_of_a_value_it_is_read_or_refused(weights: str, tmp_path: Path) -> None:
    """A global server reads such files of its sites: anything but a refusal would end it."""
    tensors, metadata = contents(path := written(tmp_path, weights))
    entries = json.loads(metadata["tensors"])
    name = next(iter(entries))
    for key in [*entries[name], "more"]:
        for value in JUNK:
            changed = {**entries, name: {**entries[name], key: value}}
            save_file(tensors, str(path), metadata={**metadata, "tensors": json.dumps(changed)})
            with suppress(ModelFileError):
                wg.load_quantized(path)
    for value in JUNK:
        for changed in ({**entries, name: value}, {**entries, "stranger": value}, value):
            save_file(tensors, str(path), metadata={**metadata, "tensors": json.dumps(changed)})
            with suppress(ModelFileError):
                wg.load_quantized(path)


def test_trits_that_no_encoder_writes(tmp_path: Path) -> None:
    spoil(written(tmp_path, layout="weightgrad"), tensor("hidden.weight_codes", lambda t: torch.full_like(t, 243)))
    with pytest.raises(ModelFileError, match=r"hidden\.weight: ternary: a byte of 243"):
        wg.load_quantized(tmp_path / "m.safetensors")


def test_a_half_that_is_none(tmp_path: Path) -> None:
    spoil(written(tmp_path, "fp16"), tensor("hidden.weight", Tensor.float))
    with pytest.raises(ModelFileError, match="half precision"):
        wg.load_quantized(tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("weightgrad_quantized", "2", "it says '2'"),
        ("weightgrad_quantized", None, "make one with weightgrad export"),
        ("tensors", "[" * 100_000, "'tensors' is no JSON dict"),
        ("tensors", "[]", "'tensors' is no JSON dict"),
        ("tensors", None, "'tensors' is no JSON dict"),
        ("order", "{}", "'order' is no JSON list"),
        ("order", '["hidden.weight", 5]', "'order' does not name its tensors"),
    ],
)
def test_bad_metadata(key: str, value: str | None, why: str, tmp_path: Path) -> None:
    tensors, metadata = contents(written(tmp_path))
    changed = {**metadata, key: value} if value is not None else {k: v for k, v in metadata.items() if k != key}
    save_file(tensors, str(tmp_path / "m.safetensors"), metadata={k: str(v) for k, v in changed.items()})
    with pytest.raises(ModelFileError, match=why):
        wg.load_quantized(tmp_path / "m.safetensors")


@pytest.mark.parametrize("name", ["nothing", ".", "text", "plain"])
def test_what_is_no_quantized_model(name: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no safetensors")
    save_file({"w": torch.zeros(3)}, str(tmp_path / "plain"))
    with pytest.raises(ModelFileError):
        wg.load_quantized(tmp_path / name)
    with pytest.raises(ModelFileError):
        wg.load_packed(tmp_path / name)


@pytest.mark.parametrize("weights", [WEIGHTS[0], "codebook(bits=4)"])
def test_damage_is_refused_or_gives_a_model_of_the_same_shapes(weights: str, tmp_path: Path) -> None:
    good, draw = written(tmp_path, weights).read_bytes(), random.Random(3)
    shapes = {name: tensor.shape for name, tensor in Network().state_dict().items()}
    refused = 0
    for _ in range(300):
        data = bytearray(good)
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        if draw.random() < 0.2:
            data = data[: draw.randrange(len(data))]
        (tmp_path / "bad").write_bytes(data)
        try:
            found = wg.load_quantized(tmp_path / "bad")
        except WeightGradError:
            refused += 1
            continue
        assert {name: tensor.shape for name, tensor in found.items()} == shapes
    assert 50 < refused < 300
