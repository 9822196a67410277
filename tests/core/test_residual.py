"""Residual: what was sent + the residual = what was put in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from weightgrad import codecs, wire
from weightgrad.codecs import Fp32
from weightgrad.core import selectors
from weightgrad.core.residual import Residual
from weightgrad.core.selectors import Selector
from weightgrad.wire.messages import Segment

from .harness import LAYOUT, noise

N = LAYOUT.numel
GLOBAL_MODEL = torch.ones(N)
CODECS = [
    "fp32",
    "fp16",
    "bf16",
    "qsgd(bits=4)",
    "terngrad(clip=2.5)",
    "onebit()",
    "adaptive(pi=8)",
    "powersgd(rank=2)",
    "topk(0.1)",
    "topk(0.1, exact=False) > qsgd(bits=8)",
    "threshold(0.5)",
    "sign()",
    "codebook(bits=2)",
    "elias(bits=4)",
    "dgc(0.1, momentum=0.0)",
    "ef(topk(0.05) > sign())",
    "clip(2.5) > qsgd(bits=4)",
]
SELECTORS = ["all", "fragment(3)", "significant('tensor')"]
ENTRIES = ["largest(0.1)", "gaia(0.5)", "significant('element')", "nonzero"]


def residual(codec: str, per_tensor: bool = False, keep: bool = True) -> Residual:
    return Residual(LAYOUT, codecs.parse(codec), 3, per_tensor=per_tensor, keep_loss=keep)


def select(text: str) -> Selector:
    from weightgrad.core import parts

    found: Selector = parts.parse("selector", text)
    return found


def send(out: Residual, fresh: Tensor, selector: Selector, count: int, **more: Any) -> tuple[Segment, ...]:
    return out.take(
        fresh, selector, GLOBAL_MODEL, step=count, count=count, fragment=count, step_update=fresh, threshold=1.0, **more
    )


def decoded(segments: tuple[Segment, ...]) -> Tensor:
    flat = torch.zeros(N)
    for one in segments:
        one.into(flat, 1)
    return flat.double()


def conserve(out: Residual, selector: Selector, rounds: int = 12) -> int:
    put, left, sent = torch.zeros(N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64), 0
    for count in range(1, rounds):
        fresh = noise(count)
        put += fresh.double()
        if count % 4 == 0:
            out.put(fresh)
            continue
        segments = send(out, fresh, selector, count)
        left += decoded(segments)
        sent += len(segments)
    torch.testing.assert_close(left + out.vector.double(), put, rtol=1e-4, atol=1e-4)
    return sent


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("codec", CODECS)
def test_conservation_with_every_codec(codec: str, per_tensor: bool, selector: str) -> None:
    assert conserve(residual(codec, per_tensor), select(selector))


@pytest.mark.parametrize("selector", ENTRIES)
@pytest.mark.parametrize("codec", ["fp32", "fp16", "qsgd(bits=4)", "sign()", "codebook(bits=2)"])
def test_conservation_of_entries(codec: str, selector: str) -> None:
    assert conserve(residual(codec), select(selector))


def test_the_check_of_conservation_can_fail() -> None:
    with pytest.raises(AssertionError):
        conserve(residual("qsgd(bits=4)", keep=False), select("all"))


def test_stretches_that_change_their_size_do_not_get_each_others_state() -> None:
    # significant tensors that are neighbours are merged: the interval at 0 has another size every time
    assert conserve(residual("dgc(0.1, momentum=0.0)"), select("significant('tensor')"), rounds=40)
    out = residual("dgc(0.1, momentum=0.0)")
    step = torch.ones(N)
    for count, stop in enumerate((30, 36, 30, N), 1):
        fresh = torch.zeros(N)
        fresh[:stop] = noise(count)[:stop] + 5
        out.vector.zero_()
        (one,) = out.take(
            fresh, selectors.Significant(), GLOBAL_MODEL, step=1, count=count, step_update=step, threshold=1.0
        )
        assert one.payload.numel == stop


def test_exact_codecs_leave_nothing() -> None:
    out = residual("fp32")
    segments = send(out, noise(1), select("all"), 1)
    assert not out.vector.any()
    assert torch.equal(decoded(segments).float(), noise(1))


def test_what_is_not_chosen_stays() -> None:
    out = residual("fp32")
    segments = send(out, noise(1), select("largest(0.1)"), 1)
    chosen = decoded(segments) != 0
    assert int(chosen.sum()) == round(0.1 * N)
    assert not out.vector[chosen].any()
    assert torch.equal(out.vector[~chosen], noise(1)[~chosen])


def test_nothing_chosen_is_no_segment() -> None:
    out = residual("fp32")
    assert send(out, noise(1), select("gaia(1e9)"), 1) == ()
    assert torch.equal(out.vector, noise(1))


def test_all_of_it_goes_when_that_is_smaller_than_naming_the_entries() -> None:
    out = residual("fp32")
    (one,) = send(out, noise(1) + 10, select("nonzero"), 1)
    assert one.payload.codec == "fp32"
    assert wire.frame_bytes(one.payload) <= 4 * N + 64
    assert torch.equal(decoded((one,)).float(), noise(1) + 10)
    assert not out.vector.any()
    (few,) = send(out, noise(1), select("largest(0.1)"), 2)
    assert few.payload.codec == "sparse"


def test_without_keep_loss_the_noise_is_forgotten_and_only_that() -> None:
    out = residual("qsgd(bits=4)", keep=False)
    send(out, noise(1), select("fragment(3)"), 0)
    interval = selectors.fragments(LAYOUT, 3)[0]
    stop = interval[-1].stop
    assert not out.vector[:stop].any()
    assert torch.equal(out.vector[stop:], noise(1)[stop:])
    sparse = residual("qsgd(bits=4)", keep=False)
    segments = send(sparse, noise(1), select("largest(0.1)"), 1)
    assert int((sparse.vector == 0).sum()) == round(0.1 * N)
    assert segments


def test_the_flush_takes_everything_by_its_own_codec() -> None:
    out = residual("topk(0.05) > sign()")
    for count in range(1, 4):
        send(out, noise(count), select("all"), count)
    before = out.vector.clone()
    segments = send(out, noise(9), select("all"), 9, codec=Fp32())
    torch.testing.assert_close(decoded(segments).float(), before + noise(9))
    assert not out.vector.any()


@pytest.mark.parametrize("selector", ["all", "fragment(3)", "largest(0.1)"])
@pytest.mark.parametrize("codec", CODECS)
def test_a_restored_one_goes_on_bit_for_bit(codec: str, selector: str) -> None:
    per_tensor = True
    if selector == "largest(0.1)":
        codec = "qsgd(bits=4)"
    first = residual(codec, per_tensor)
    chooser = select(selector)
    for count in range(1, 5):
        send(first, noise(count), chooser, count)
    state = first.state()
    again = residual(codec, per_tensor)
    again.load(state)
    for count in range(5, 9):
        a, b = (send(one, noise(count), chooser, count) for one in (first, again))
        assert [wire.to_bytes(p.payload) for p in a] == [wire.to_bytes(p.payload) for p in b]
        assert torch.equal(first.vector, again.vector)
    frozen = residual(codec, per_tensor)
    frozen.load(state)  # what was given away did not move with the first one
    for count in range(5, 9):
        send(frozen, noise(count), chooser, count)
    assert torch.equal(frozen.vector, first.vector)
