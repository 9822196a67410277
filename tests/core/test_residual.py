"""Residual: what was sent + the residual = what was put in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weightgrad import codecs, wire
from weightgrad.codecs import Codec, Fp32
from weightgrad.core import parts, pieces
from weightgrad.core.local_model import Scratch
from weightgrad.core.parts import selectors
from weightgrad.core.parts.selectors import Selector, View
from weightgrad.core.pieces import Piece
from weightgrad.core.residual import Residual
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.messages import Segment

from .harness import LAYOUT, at, noise

N = LAYOUT.numel
WHOLE = Intervals.whole(N)
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


class Sender:
    """A residual of the whole model, and how its holder cuts the model into pieces."""

    def __init__(self, codec: str, *, per_tensor: bool = False, keep: bool = True) -> None:
        self.per_tensor = per_tensor
        self.out = Residual(WHOLE, codecs.parse(codec), 3, keep_loss=keep, scratch=Scratch())

    @property
    def vector(self) -> Tensor:
        """The residual; zeros if nothing has stayed behind."""
        return torch.zeros(N) if self.out.vector is None else self.out.vector

    def put(self, update: Tensor) -> None:
        for piece in pieces.cut(WHOLE, LAYOUT, per_tensor=self.per_tensor):
            self.out.put(piece, at(update, piece.intervals))

    def send(
        self,
        fresh: Tensor,
        selector: Selector,
        count: int,
        *,
        step_update: Tensor | None = None,
        codec: Codec | None = None,
    ) -> tuple[Segment, ...]:
        """Take every piece of a round; what the round is not about is put into the residual."""
        last = fresh if step_update is None else step_update

        def look(piece: Piece, own: Tensor) -> View:
            return View(
                residual=own,
                global_model=lambda: at(GLOBAL_MODEL, piece.intervals),
                last_norm=lambda: float(at(last, piece.intervals).norm()),
                last_update=lambda: at(last, piece.intervals),
                step=count,
                threshold=1.0,
            )

        chosen = selector.pieces(WHOLE, LAYOUT, per_tensor=self.per_tensor, fragment=count)
        rest = WHOLE - Intervals.of(span for piece in chosen for span in piece.intervals.spans)
        for piece in pieces.cut(rest, LAYOUT, per_tensor=False):
            self.out.put(piece, at(fresh, piece.intervals))
        found = [
            self.out.take(piece, at(fresh, piece.intervals), selector, look, count=count, codec=codec)
            for piece in chosen
        ]
        return tuple(one for one in found if one is not None)

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.out.state().items()}


def select(text: str) -> Selector:
    found: Selector = parts.parse("selector", text)
    return found


def plainly(piece: Piece, own: Tensor) -> View:
    return View(residual=own, global_model=lambda: at(GLOBAL_MODEL, piece.intervals))


def decoded(segments: tuple[Segment, ...]) -> Tensor:
    flat = torch.zeros(N)
    for one in segments:
        one.into(flat, 1)
    return flat.double()


def conserve(out: Sender, selector: Selector, rounds: int = 12) -> int:
    put, left, sent = torch.zeros(N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64), 0
    for count in range(1, rounds):
        fresh = noise(count)
        put += fresh.double()
        if count % 4 == 0:
            out.put(fresh)
            continue
        segments = out.send(fresh, selector, count)
        left += decoded(segments)
        sent += len(segments)
    torch.testing.assert_close(left + out.vector.double(), put, rtol=1e-4, atol=1e-4)
    return sent


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("codec", CODECS)
def test_conservation_with_every_codec(codec: str, per_tensor: bool, selector: str) -> None:
    assert conserve(Sender(codec, per_tensor=per_tensor), select(selector))


@pytest.mark.parametrize("selector", ENTRIES)
@pytest.mark.parametrize("codec", ["fp32", "fp16", "qsgd(bits=4)", "sign()", "codebook(bits=2)"])
def test_conservation_of_entries(codec: str, selector: str) -> None:
    assert conserve(Sender(codec), select(selector))


def test_the_check_of_conservation_can_fail() -> None:
    with pytest.raises(AssertionError):
        conserve(Sender("qsgd(bits=4)", keep=False), select("all"))


def test_pieces_that_change_their_size_do_not_get_each_others_state() -> None:
    assert conserve(Sender("dgc(0.1, momentum=0.0)"), select("significant('tensor')"), rounds=40)
    out = Sender("dgc(0.1, momentum=0.0)")
    put, left = torch.zeros(N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64)
    for count, stop in enumerate((30, 36, 30, N), 1):
        fresh = noise(count)[:stop] + 5
        put[:stop] += fresh.double()
        piece = Piece(Intervals(((0, stop),)), (stop,))
        one = out.out.take(piece, fresh, selectors.All(), plainly, count=count)
        assert one is not None
        assert one.payload.numel == stop
        left += decoded((one,))
    torch.testing.assert_close(left + out.vector.double(), put, rtol=1e-4, atol=1e-4)


def test_exact_codecs_leave_nothing() -> None:
    out = Sender("fp32")
    segments = out.send(noise(1), select("all"), 1)
    assert not out.vector.any()
    assert torch.equal(decoded(segments).float(), noise(1))


def test_what_is_not_chosen_stays() -> None:
    out = Sender("fp32")
    segments = out.send(noise(1), select("largest(0.1)"), 1)
    chosen = decoded(segments) != 0
    assert int(chosen.sum()) == round(0.1 * N)
    assert not out.vector[chosen].any()
    assert torch.equal(out.vector[~chosen], noise(1)[~chosen])


def test_nothing_chosen_is_no_segment() -> None:
    out = Sender("fp32")
    assert out.send(noise(1), select("gaia(1e9)"), 1) == ()
    assert torch.equal(out.vector, noise(1))


def test_all_of_it_goes_when_that_is_smaller_than_naming_the_entries() -> None:
    out = Sender("fp32")
    (one,) = out.send(noise(1) + 10, select("nonzero"), 1)
    assert one.payload.codec == "fp32"
    assert wire.frame_bytes(one.payload) <= 4 * N + 64
    assert torch.equal(decoded((one,)).float(), noise(1) + 10)
    assert not out.vector.any()
    (few,) = out.send(noise(1), select("largest(0.1)"), 2)
    assert few.payload.codec == "sparse"


def test_without_keep_loss_the_noise_is_forgotten_and_only_that() -> None:
    out = Sender("qsgd(bits=4)", keep=False)
    out.send(noise(1), select("fragment(3)"), 0)
    stop = pieces.fragments(LAYOUT, 3)[0].end
    assert not out.vector[:stop].any()
    assert torch.equal(out.vector[stop:], noise(1)[stop:])
    sparse = Sender("qsgd(bits=4)", keep=False)
    segments = sparse.send(noise(1), select("largest(0.1)"), 1)
    assert int((sparse.vector == 0).sum()) == round(0.1 * N)
    assert segments


def test_the_flush_takes_everything_by_its_own_codec() -> None:
    out = Sender("topk(0.05) > sign()")
    for count in range(1, 4):
        out.send(noise(count), select("all"), count)
    before = out.vector.clone()
    segments = out.send(noise(9), select("all"), 9, codec=Fp32())
    torch.testing.assert_close(decoded(segments).float(), before + noise(9))
    assert not out.vector.any()


@pytest.mark.parametrize("selector", ["all", "fragment(3)", "significant('tensor')", "largest(0.1)"])
@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("codec", CODECS)
def test_a_restored_one_goes_on_bit_for_bit(codec: str, per_tensor: bool, selector: str) -> None:
    if selector == "largest(0.1)":
        codec = "qsgd(bits=4)"
    first = Sender(codec, per_tensor=per_tensor)
    chooser = select(selector)
    for count in range(1, 5):
        first.send(noise(count), chooser, count)
    state = first.state()
    again = Sender(codec, per_tensor=per_tensor)
    again.out.load(state)
    for count in range(5, 9):
        a, b = (one.send(noise(count), chooser, count) for one in (first, again))
        assert [wire.to_bytes(p.payload) for p in a] == [wire.to_bytes(p.payload) for p in b]
        assert torch.equal(first.vector, again.vector)
    frozen = Sender(codec, per_tensor=per_tensor)
    frozen.out.load(state)  # what was given away did not move with the first one
    for count in range(5, 9):
        frozen.send(noise(count), chooser, count)
    assert torch.equal(frozen.vector, first.vector)


def test_states_of_pieces_in_several_intervals_are_restored_where_they_are_held() -> None:
    held = Intervals(((0, 6), (10, 20)))
    piece, codec = Piece(held, (16,)), codecs.parse("dgc(0.5, momentum=0.9)")

    def made(own: Intervals) -> Residual:
        return Residual(own, codec, 3, keep_loss=True, scratch=Scratch())

    def send(one: Residual, count: int) -> bytes:
        sent = one.take(piece, noise(count)[:16], selectors.All(), plainly, count=count)
        assert sent is not None
        assert sent.spans == held.spans
        return wire.to_bytes(sent.payload)

    first, again = made(held), made(held)
    for count in (1, 2):
        send(first, count)
    again.load(first.state())
    assert [send(again, count) for count in (3, 4)] == [send(first, count) for count in (3, 4)]
    elsewhere = made(Intervals(((0, 16),)))
    elsewhere.load({name: tensor for name, tensor in first.state().items() if name != "vector"})
    assert elsewhere.state() == {}, "of a piece that is not held here nothing is known"


def test_no_two_pieces_of_a_round_have_the_same_noise() -> None:
    out = Residual(WHOLE, codecs.parse("qsgd(bits=2)"), 3, keep_loss=True, scratch=Scratch())
    sent = []
    for start in (0, 32):
        piece = Piece(Intervals(((start, start + 32),)), (32,))
        values = torch.linspace(0.1, 1.0, 32)
        one = out.take(piece, values, select("nonzero"), plainly, count=1)
        assert one is not None
        sent.append(codecs.decode(one.payload))
    assert not torch.equal(*sent)
