"""Nothing is lost: what was decoded and the residual add up to what came in."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from weightgrad import codecs, errors, kernels

# Inside ef(...): one of every codec that does not keep its own error.
INNER = [
    "fp32()",
    "fp16()",
    "bf16()",
    "qsgd(bits=4)",
    "qsgd(bits=2, bucket=64)",
    "qsgd(bits=3, norm='l2')",
    "qsgd(bits=8, rounding='nearest')",
    "elias(bits=2)",
    "elias(bits=4, bucket=64, norm='max')",
    "terngrad()",
    "terngrad(clip=0.0)",
    "terngrad(scaler='shared')",
    "onebit(feedback=False)",
    "adaptive(pi=8, feedback=False)",
    "powersgd(rank=2, feedback=False)",
    "sign()",
    "codebook(bits=3)",
    "topk(0.05)",
    "topk(0.05, exact=False)",
    "topk(0.05) > qsgd(bits=4)",
    "topk(0.05, exact=False) > fp16()",
    "threshold(1.0)",
    "threshold(1.0) > sign()",
    "clip(2.0)",
    "clip(2.0) > terngrad()",
    "warmup(1, qsgd(bits=4))",
    "warmup(3, topk(0.05) > sign())",
    "lossaware()",
    "lossaware(bits=1)",
    "lossaware(bits=4)",
    "lossaware(bits=5, per='row')",
]
OWN = [
    "onebit()",
    "adaptive(pi=8)",
    "adaptive(pi=64)",
    "powersgd(rank=2)",
    "dgc(fraction=0.05, momentum=0.0)",
    "dgc(fraction=0.05, momentum=0.0, warmup=4) > qsgd(bits=4)",
]
SPECS = [f"ef({inner})" for inner in INNER] + OWN
SHAPES = [(24, 37), (1031,), (6, 5, 3, 3), (1,), (0,), ()]
BACKENDS = kernels.BACKENDS if kernels.status().backend == "native" else ("reference",)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def residual_of(codec: codecs.Codec, like: Tensor, state: codecs.State) -> Tensor:
    """The error that a state carries, flat."""
    if isinstance(codec, (codecs.OneBit, codecs.Adaptive)):
        return codec.error(like, state).view(-1)
    return state["residual"].clone()


def test_every_codec_is_here() -> None:
    inside = {part.split("(")[0].strip() for spec in INNER for part in spec.split(">")}
    assert inside | {spec.split("(")[0] for spec in OWN} | {"ef"} == set(codecs.available())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", SPECS)
def test_sent_and_held_add_up(spec: str, backend: str) -> None:
    codec = codecs.parse(spec)
    for shape in SHAPES:
        like = torch.empty(shape)
        state = codec.init(like)
        came, sent = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
        with kernels.use(backend):
            for step in range(5):
                x = randn(*shape, seed=step) * 1.5**step
                payload, state = codec.encode(x, state, step)
                came += x
                sent += codecs.decode(payload)
                # In between too: a state read half way must be right as it stands.
                rest = residual_of(codec, like, state).view(shape)
                # Rounding is relative to the largest number on the way, which may be a noisy level.
                largest = max([1.0, *(float(t.abs().max()) for t in (sent, rest, came) if t.numel())])
                torch.testing.assert_close(sent + rest, came, rtol=0, atol=1e-6 * largest)


# These send more noise than there is signal, so that feedback amplifies the residual.
EXPANDING = {"ef(elias(bits=2))", "ef(qsgd(bits=3, norm='l2'))", "ef(terngrad(clip=0.0))"}


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec not in EXPANDING])
def test_what_was_held_is_sent_in_the_end(spec: str) -> None:
    """Nothing new comes in: the residual gets smaller, and what was sent comes to the tensor."""
    codec, x = codecs.parse(spec), randn(30, 40)
    state = codec.init(x)
    sent = torch.zeros(30, 40)
    for step in range(40):
        payload, state = codec.encode(x if step == 0 else torch.zeros(30, 40), state, step)
        sent += codecs.decode(payload)
    # A threshold never sends what is below it.
    limit = 0.8 if "threshold" in spec else 0.35
    assert float((sent - x).norm() / x.norm()) < limit


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", SPECS)
def test_a_refused_tensor_leaves_the_error_as_it_was(spec: str, backend: str) -> None:
    codec, shape = codecs.parse(spec), (61, 83)
    like = torch.empty(shape)
    state = codec.init(like)
    with kernels.use(backend):
        for step in range(2):
            _, state = codec.encode(randn(*shape, seed=step), state, step)
        before = residual_of(codec, like, state)
        for place in (0, 1500, 5062):
            for bad in (math.nan, math.inf, -math.inf):
                x = randn(*shape, seed=5)
                x.view(-1)[place] = bad
                with pytest.raises(errors.NonFiniteError):
                    codec.encode(x, state, 7)
                torch.testing.assert_close(residual_of(codec, like, state), before, rtol=1e-5, atol=2e-6)
        # And it goes on as if nothing had been there.
        x = randn(*shape, seed=6)
        payload, state = codec.encode(x, state, 8)
        total = codecs.decode(payload).view(-1) + residual_of(codec, like, state)
        torch.testing.assert_close(total, before + x.view(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", ["dgc(fraction=0.05)", "dgc(fraction=0.05, momentum=0.5, clip=2.0) > fp16()"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_refused_tensor_leaves_the_velocity_as_it_was(spec: str, backend: str) -> None:
    codec, shape = codecs.parse(spec), (61, 83)
    state = codec.init(torch.empty(shape))
    with kernels.use(backend):
        for step in range(3):
            _, state = codec.encode(randn(*shape, seed=step), state, step)
        before = {name: tensor.clone() for name, tensor in state.items()}
        x = randn(*shape, seed=5)
        x[50, 3] = math.nan
        with pytest.raises(errors.NonFiniteError):
            codec.encode(x, state, 7)
    torch.testing.assert_close(state, before, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", SPECS)
def test_a_sum_that_overflows_leaves_the_error_as_it_was(spec: str, backend: str) -> None:
    """The tensor is finite and so is the error, but not the two together."""
    codec, shape = codecs.parse(spec), (61, 83)
    like = torch.empty(shape)
    state = codec.init(like)
    owed = state["residual"]
    owed.copy_(randn(*shape).view(-1))
    owed[1500] = 3e38
    before = residual_of(codec, like, state)
    x = randn(*shape, seed=1)
    x.view(-1)[1500] = 3e38
    with kernels.use(backend), pytest.raises(errors.EncodeError):
        codec.encode(x, state, 7)
    torch.testing.assert_close(residual_of(codec, like, state), before, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "spec",
    [
        "ef(fp16())",
        "ef(topk(0.1) > fp16())",
        "ef(topk(0.1, exact=False) > fp16())",
        "ef(threshold(0.5) > fp16())",
        "ef(clip(100.0) > fp16())",
        "dgc(fraction=0.1) > fp16()",
    ],
)
def test_a_value_out_of_range_leaves_the_error_as_it_was(spec: str, backend: str) -> None:
    codec, shape = codecs.parse(spec), (61, 83)
    state = codec.init(torch.empty(shape))
    with kernels.use(backend):
        _, state = codec.encode(randn(*shape), state, 0)
        before = {name: tensor.clone() for name, tensor in state.items()}
        x = randn(*shape, seed=1)
        x[50, 3] = 1e6
        with pytest.raises(errors.RangeError, match="too large for fp16"):
            codec.encode(x, state, 1)
    at = 50 * shape[1] + 3
    for name, tensor in state.items():
        if tensor.dim():
            # A million added and taken away again leaves four digits less.
            torch.testing.assert_close(tensor[at], before[name][at], rtol=0, atol=0.1)
            tensor[at] = before[name][at] = 0.0
        torch.testing.assert_close(tensor, before[name], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("spec", ["powersgd(rank=2)", "ef(powersgd(rank=2, feedback=False))"])
def test_products_out_of_range_leave_the_error_as_it_was(spec: str) -> None:
    codec, shape = codecs.parse(spec), (30, 40)
    state = codec.init(torch.empty(shape))
    _, state = codec.encode(randn(*shape), state, 0)
    before = {name: tensor.clone() for name, tensor in state.items()}
    with pytest.raises(errors.RangeError, match="overflow float32"):
        codec.encode(torch.full(shape, 3e38), state, 1)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state.values())
    # 3e38 added and taken away again leaves nothing of numbers of size one.
    torch.testing.assert_close(state["residual"], before["residual"], rtol=0, atol=3e38 * 2.0**-23)


@pytest.mark.parametrize(
    "inner", ["onebit()", "adaptive()", "powersgd()", "dgc()", "ef(fp32())", "clip(2.5) > onebit()"]
)
def test_feedback_around_feedback_is_refused(inner: str) -> None:
    with pytest.raises(errors.SpecError, match=r"keeps its own error already; leave ef\(\) away"):
        codecs.parse(f"ef({inner})")
    with pytest.raises(errors.SpecError, match="keeps its own error"):
        codecs.ErrorFeedback(codecs.parse(inner))


@pytest.mark.parametrize("spec", ["onebit(feedback=False)", "adaptive(feedback=False)", "powersgd(feedback=False)"])
def test_inside_and_outside_feedback_are_the_same(spec: str) -> None:
    """ef(codec(feedback=False)) sends what codec() sends, up to rounding in the error."""
    outside = codecs.parse(f"ef({spec})")
    inside = codecs.parse(spec.replace("feedback=False", ""))
    x = randn(40, 57)
    states = [codec.init(x) for codec in (outside, inside)]
    for step in range(2):
        x = randn(40, 57, seed=step)
        (one, states[0]), (two, states[1]) = (
            codec.encode(x, state, step) for codec, state in zip((outside, inside), states, strict=True)
        )
        if step == 0 or "adaptive" not in spec:
            torch.testing.assert_close(codecs.decode(one), codecs.decode(two), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", [f"ef({inner})" for inner in INNER])
def test_the_state_is_updated_in_place(spec: str) -> None:
    """A residual is as large as the model: a copy of it a step would cost more than the codec."""
    codec, x = codecs.parse(spec), randn(30, 40)
    state = codec.init(x)
    place = state["residual"].data_ptr()
    for step in range(3):
        _, state = codec.encode(x, state, step)
        assert state["residual"].data_ptr() == place
