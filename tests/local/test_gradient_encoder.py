"""The worker's half: one payload a slot, from the clipped and corrected gradient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightgrad import codecs
from weightgrad.errors import NonFiniteError, RangeError, StateError, StrategyError
from weightgrad.kernels import derive
from weightgrad.local import GradientEncoder, Layout, decode_flat

LAYOUT = Layout.of_shapes([("conv", (8, 3, 5, 5)), ("bias", (8,)), ("odd", (3, 7)), ("fc", (40, 31)), ("scalar", ())])
SPECS = [
    "fp32()",
    "terngrad()",
    "qsgd(bits=4)",
    "ef(qsgd(bits=2))",
    "ef(topk(0.05, exact=False) > qsgd(bits=4))",
    "dgc(fraction=0.05, warmup=8)",
    "onebit()",
    "adaptive(pi=8)",
    "powersgd(rank=2)",
]


def randn(seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(seed))


def bytes_of(payloads: tuple[codecs.Payload, ...]) -> list[tuple[str, bytes, bytes]]:
    return [(p.codec, p.params, p.body.numpy().tobytes()) for p in payloads]


@pytest.mark.parametrize("spec", SPECS)
def test_a_slot_is_encoded_as_the_codec_does_alone(spec: str) -> None:
    codec = codecs.parse(spec)
    encoder = GradientEncoder(LAYOUT, codec, key=5)
    states = [codec.init(torch.empty(slot.shape)) for slot in LAYOUT.slots]
    for step in range(3):
        gradient = randn(step)
        before = gradient.clone()
        payloads = encoder.encode(gradient, step)
        assert torch.equal(gradient, before)
        alone = []
        for place, slot in enumerate(LAYOUT.slots):
            own = slot.of(gradient).clone()
            payload, states[place] = codec.encode(own, states[place], derive(5, step, place))
            alone.append(payload)
        assert bytes_of(payloads) == bytes_of(tuple(alone))


@pytest.mark.parametrize("spec", [*SPECS, "lossaware()", "codebook(bits=3)", "sign()"])
def test_payloads_own_their_bytes(spec: str) -> None:
    encoder = GradientEncoder(LAYOUT, codecs.parse(spec), key=5)
    first = encoder.encode(randn(1), 0)
    kept = bytes_of(first)
    second = encoder.encode(randn(2), 1)
    assert bytes_of(first) == kept
    assert bytes_of(second) != kept


def test_keys_differ_by_step_and_slot() -> None:
    same = Layout.of_shapes([("a", (400,)), ("b", (400,))])
    gradient = torch.linspace(-1, 1, 400).repeat(2)
    encoder = GradientEncoder(same, codecs.parse("terngrad()"), key=1)
    a, b = encoder.encode(gradient, 0)
    c, _ = encoder.encode(gradient, 1)
    again, _ = encoder.encode(gradient, 0)
    assert not torch.equal(a.body, b.body)
    assert not torch.equal(a.body, c.body)
    assert torch.equal(a.body, again.body)


@given(clip=st.floats(0.01, 100), scale=st.floats(0, 100))
def test_clipping_is_by_tensor(clip: float, scale: float) -> None:
    encoder = GradientEncoder(LAYOUT, codecs.parse("fp32()"), key=0, clip_norm=clip)
    gradient = randn(3, scale)
    got = decode_flat(LAYOUT, encoder.encode(gradient, 0))
    for view, whole in zip(LAYOUT.views(got), LAYOUT.views(gradient), strict=True):
        norm = float(whole.double().norm())
        wanted = whole if norm <= clip else whole * (clip / norm)
        torch.testing.assert_close(view, wanted)
        assert float(view.norm()) <= clip * (1 + 1e-5)


def test_momentum_correction_is_its_equation() -> None:
    encoder = GradientEncoder(LAYOUT, codecs.parse("fp32()"), key=0, clip_norm=2.0, momentum=0.9)
    velocity = torch.zeros(LAYOUT.numel)
    for step in range(5):
        gradient = randn(step)
        for view, g in zip(LAYOUT.views(velocity), LAYOUT.views(gradient), strict=True):
            view.copy_(0.9 * view + g * min(1.0, 2.0 / max(float(g.norm()), 1e-30)))
        payloads = encoder.encode(gradient, step)
        torch.testing.assert_close(decode_flat(LAYOUT, payloads), velocity)


def test_momentum_of_worker_and_plain_sgd_is_momentum_of_sgd() -> None:
    encoder = GradientEncoder(LAYOUT, codecs.parse("fp32()"), key=0, momentum=0.9)
    here, there = torch.zeros(LAYOUT.numel), torch.nn.Parameter(torch.zeros(LAYOUT.numel))
    sgd = torch.optim.SGD([there], lr=0.1, momentum=0.9)
    for step in range(10):
        there.grad = randn(step)
        here -= 0.1 * decode_flat(LAYOUT, encoder.encode(randn(step), step))
        sgd.step()
    torch.testing.assert_close(here, there.detach())


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("spec", SPECS)
def test_a_saved_state_continues_the_same(spec: str, momentum: float) -> None:
    if spec.startswith("dgc") and momentum:
        spec = "dgc(fraction=0.05, momentum=0.0)"
    through, again = (GradientEncoder(LAYOUT, codecs.parse(spec), 9, momentum=momentum) for _ in range(2))
    for step in range(10):
        through.encode(randn(step), step)
    saved = through.state()
    wanted = [bytes_of(through.encode(randn(step), step)) for step in range(10, 15)]
    again.load(saved)
    assert [bytes_of(again.encode(randn(step), step)) for step in range(10, 15)] == wanted
    if momentum or "ef(" in spec:
        fresh = GradientEncoder(LAYOUT, codecs.parse(spec), 9, momentum=momentum)
        assert bytes_of(fresh.encode(randn(10), 10)) != wanted[0]


def test_a_state_of_another_codec_is_refused() -> None:
    one = GradientEncoder(LAYOUT, codecs.parse("ef(sign())"), 0)
    other = GradientEncoder(LAYOUT, codecs.parse("onebit()"), 0)
    with pytest.raises(StateError, match="conv/means"):
        other.load(one.state())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_changes_nothing_and_is_named(bad: float) -> None:
    encoder = GradientEncoder(LAYOUT, codecs.parse("ef(qsgd(bits=2))"), 0, momentum=0.9)
    encoder.encode(randn(), 0)
    before = encoder.state()
    gradient = randn(1)
    gradient[LAYOUT.slots[2].start + 4] = bad
    with pytest.raises(NonFiniteError, match="odd: element 4 of 21"):
        encoder.encode(gradient, 1)
    after = encoder.state()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_an_error_of_the_codec_names_the_slot() -> None:
    encoder = GradientEncoder(LAYOUT, codecs.parse("fp16()"), 0)
    gradient = randn()
    gradient[LAYOUT.slots[3].start] = 1e6
    with pytest.raises(RangeError, match="fc: element 0"):
        encoder.encode(gradient, 0)


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(StrategyError, match="own momentum correction"):
        GradientEncoder(LAYOUT, codecs.parse("dgc(fraction=0.1)"), 0, momentum=0.9)
    with pytest.raises(StrategyError, match="clip_norm=0"):
        GradientEncoder(LAYOUT, codecs.parse("fp32()"), 0, clip_norm=0.0)
    with pytest.raises(StrategyError, match=r"momentum=1\.0"):
        GradientEncoder(LAYOUT, codecs.parse("fp32()"), 0, momentum=1.0)
