"""The warm start: everything for some calls, then the codec as if it had begun there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weightgrad import codecs
from weightgrad.core import strategies
from weightgrad.errors import NonFiniteError, SpecError


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape or (12, 7), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("inner", ["onebit()", "adaptive(pi=4)", "qsgd(bits=4)", "dgc(0.1)", "topk(0.1) > sign()"])
def test_after_the_warm_up_the_codec_inside_is_as_fresh(inner: str) -> None:
    warmed, plain = codecs.parse(f"warmup(3, {inner})"), codecs.parse(inner)
    state, fresh = warmed.init(randn(0)), plain.init(randn(0))
    for step in range(3):
        payload, state = warmed.encode(randn(step), state, step)
        assert payload.codec == "fp32"
        assert torch.equal(codecs.decode(payload), randn(step))
    for step in range(3, 6):
        payload, state = warmed.encode(randn(step), state, step)
        wanted, fresh = plain.encode(randn(step), fresh, step)
        assert (payload.codec, bytes(payload.body.numpy())) == (wanted.codec, bytes(wanted.body.numpy()))


def test_the_residual_of_a_caller_is_empty_until_the_codec_takes_over() -> None:
    """As in the residual of a strategy, which is the codec's error feedback."""
    codec = codecs.parse("warmup(2, onebit())")
    residual, state = randn(9).view(-1).clone(), codec.init(randn(0))
    came, sent = residual.clone().view(12, 7), torch.zeros(12, 7)
    for step in range(5):
        payload, state = codec.encode_feedback(randn(step), residual, state, step)
        came, sent = came + randn(step), sent + codecs.decode(payload)
        assert bool(residual.any()) == (step >= 2)
        torch.testing.assert_close(sent + residual.view(12, 7), came, rtol=0, atol=1e-5)


def test_a_refused_tensor_does_not_count() -> None:
    codec = codecs.parse("warmup(1, sign())")
    state = codec.init(randn(0))
    with pytest.raises(NonFiniteError):
        codec.encode(torch.full((12, 7), float("nan")), state, 0)
    payload, state = codec.encode(randn(1), state, 0)
    assert payload.codec == "fp32"
    assert codec.encode(randn(2), state, 0)[0].codec == "sign"


def test_it_says_what_the_codec_inside_is() -> None:
    assert codecs.parse("warmup(5, onebit())").carries_error
    assert not codecs.parse("warmup(5, qsgd(bits=4))").carries_error
    assert codecs.parse("warmup(5, qsgd(bits=4))").unbiased
    assert not codecs.parse("warmup(5, sign())").unbiased


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("warmup(-1, sign())", "steps"),
        ("warmup(1.5, sign())", "steps"),
        ("warmup(3, 4)", "expected a codec"),
        ("warmup(3)", "needs inner"),
        ("warmup(3, ef(topk(0.1)))", "ef(warmup(3, topk("),
        ("ef(warmup(3, onebit()))", "leave ef"),
        ("topk(0.1) > warmup(3, sign())", "cannot keep state"),
    ],
)
def test_a_wrong_spec_says_what_would_be_right(spec: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        codecs.parse(spec)
    assert says in str(caught.value)


def test_one_bit_begins_with_everything() -> None:
    """Seide et al.; `adaptive`, whose error feedback has the same need, as well."""
    for name in ("onebit", "adaptive"):
        assert isinstance(strategies.find(name).wan_codec("up"), codecs.WarmUp)
