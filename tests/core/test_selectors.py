"""What leaves the residual."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightgrad.core.layout import Layout
from weightgrad.core.parts import selectors
from weightgrad.core.parts.selectors import Entries, Selector, View
from weightgrad.core.pieces import Piece, fragments
from weightgrad.wire.intervals import Intervals

from .harness import LAYOUT, at, noise

WHOLE = Intervals.whole(LAYOUT.numel)


def view(
    residual: Tensor,
    global_model: Tensor | None = None,
    step_update: Tensor | None = None,
    piece: Piece | None = None,
    *,
    step: int = 1,
    threshold: float = 4.0,
) -> View:
    """What a selector sees of a piece; without one, of the whole model as one piece."""
    here = WHOLE if piece is None else piece.intervals
    weights = torch.ones_like(residual) if global_model is None else global_model
    last = None if step_update is None else at(step_update, here)
    return View(
        residual=at(residual, here),
        global_model=lambda: at(weights, here),
        last_norm=lambda: 0.0 if last is None else float(last.norm()),
        last_update=lambda: last,
        step=step,
        threshold=threshold,
    )


def entries(selector: Selector, seen: View) -> list[int]:
    chosen = selector.choose(seen)
    assert isinstance(chosen, Entries)
    found: list[int] = chosen.indices.tolist()
    assert found == sorted(set(found))
    return found


def covered(found: tuple[Piece, ...]) -> list[int]:
    return [i for piece in found for start, stop in piece.intervals.spans for i in range(start, stop)]


def whole_pieces(selector: Selector, residual: Tensor, step_update: Tensor, *, per_tensor: bool) -> list[Piece]:
    """The pieces that leave as a whole."""
    found = selector.pieces(WHOLE, LAYOUT, per_tensor=per_tensor, fragment=0)
    chosen = [selector.choose(view(residual, None, step_update, piece)) for piece in found]
    assert all(isinstance(one, bool) for one in chosen)
    return [piece for piece, one in zip(found, chosen, strict=True) if one]


def test_all_is_everything_once_flat_or_by_tensor() -> None:
    whole = list(range(LAYOUT.numel))
    flat = selectors.All().pieces(WHOLE, LAYOUT, per_tensor=False, fragment=0)
    assert covered(flat) == whole
    by_tensor = selectors.All().pieces(WHOLE, LAYOUT, per_tensor=True, fragment=0)
    assert covered(by_tensor) == whole
    assert by_tensor == tuple(Piece(Intervals(((s.start, s.stop),)), s.shape) for s in LAYOUT.slots)
    assert selectors.All().choose(view(noise(1))) is True


@given(
    count=st.integers(1, 9),
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(any),
    per_tensor=st.booleans(),
)
def test_fragments_are_all_of_the_model_once(count: int, sizes: list[int], per_tensor: bool) -> None:
    layout = Layout.of_shapes((str(i), (n,)) for i, n in enumerate(sizes))
    dealt = fragments(layout, count)
    assert len(dealt) == count
    whole = list(range(layout.numel))
    assert [i for found in dealt for start, stop in found.spans for i in range(start, stop)] == whole
    chosen = [
        selectors.Fragment(count).pieces(
            Intervals.whole(layout.numel), layout, per_tensor=per_tensor, fragment=fragment + 3 * count
        )
        for fragment in range(count)
    ]
    assert [i for found in chosen for i in covered(found)] == whole
    assert all(piece.numel for found in chosen for piece in found)


def test_fragments_are_about_equal() -> None:
    layout = Layout.of_shapes((str(i), (10,)) for i in range(12))
    assert [found.numel for found in fragments(layout, 4)] == [30, 30, 30, 30]


def test_largest_takes_the_largest_magnitudes() -> None:
    residual = noise(2)
    found = entries(selectors.Largest(0.1), view(residual))
    assert len(found) == round(0.1 * LAYOUT.numel)
    rest = sorted(set(range(LAYOUT.numel)) - set(found))
    assert residual[found].abs().min() >= residual[rest].abs().max()
    assert len(entries(selectors.Largest(1e-9), view(residual))) == 1


def test_gaia_compares_with_the_weight_and_the_threshold_decays() -> None:
    residual, global_model = torch.zeros(LAYOUT.numel), torch.zeros(LAYOUT.numel)
    global_model[:4] = torch.tensor([1.0, 1.0, -2.0, 1.0])
    residual[:6] = torch.tensor([0.11, 0.09, 0.19, -0.5, 0.0, 1e-9])
    assert entries(selectors.Gaia(0.1), view(residual, global_model)) == [
        0,
        3,
        5,
    ]  # entry 5: the weight is 0, the change is not
    assert entries(selectors.Gaia(0.1), view(residual, global_model, step=4)) == [0, 1, 2, 3, 5]
    assert entries(selectors.Gaia(0.1, decay=False), view(residual, global_model, step=4)) == [0, 3, 5]


def test_significant_tensors_by_the_ratio_of_norms() -> None:
    step = torch.ones(LAYOUT.numel)
    residual = torch.ones(LAYOUT.numel)
    first, second, third, _ = LAYOUT.slots
    residual[first.start : first.stop] = 4.0
    residual[second.start : second.stop] = -5.0
    residual[third.start : third.stop] = 3.9
    found = whole_pieces(selectors.Significant("tensor"), residual, step, per_tensor=True)
    assert [(piece.start, piece.shape) for piece in found] == [(s.start, s.shape) for s in (first, second)]
    flat = whole_pieces(selectors.Significant("tensor"), residual, step, per_tensor=False)
    assert [(piece.start, piece.shape) for piece in flat] == [(s.start, (s.numel,)) for s in (first, second)]


def test_significant_elements_by_their_own_ratio() -> None:
    step, residual = torch.ones(LAYOUT.numel), torch.ones(LAYOUT.numel)
    residual[3], residual[7], residual[9] = 4.0, -4.5, 3.9
    step[11], residual[11] = 0.0, 0.0  # nothing happened here: nothing to say
    assert entries(selectors.Significant("element"), view(residual, None, step)) == [3, 7]


def test_nothing_is_significant_where_nothing_is_residual() -> None:
    zero = torch.zeros(LAYOUT.numel)
    assert selectors.Significant("tensor").choose(view(zero, None, zero)) is False
    assert entries(selectors.Significant("element"), view(zero, None, zero)) == []
    assert entries(selectors.Nonzero(), view(zero)) == []
    assert entries(selectors.Gaia(), view(zero, zero)) == []


def test_nonzero_is_what_is_there() -> None:
    residual = torch.zeros(LAYOUT.numel)
    residual[[2, 5, 63]] = torch.tensor([1.0, -1e-30, 2.0])
    assert entries(selectors.Nonzero(), view(residual)) == [2, 5, 63]


def test_pieces_of_a_layout_skip_empty_tensors() -> None:
    layout = Layout.of_shapes([("a", (0, 3)), ("b", (2,))])
    for selector in (selectors.All(), selectors.Significant()):
        (piece,) = selector.pieces(Intervals.whole(2), layout, per_tensor=True, fragment=0)
        assert piece == Piece(Intervals(((0, 2),)), (2,))
