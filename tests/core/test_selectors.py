"""What leaves the residual."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightgrad.core import selectors
from weightgrad.core.layout import Layout
from weightgrad.core.selectors import Entries, Interval, Selector, View, fragments, intervals, merged

from .harness import LAYOUT, noise


def view(
    residual: Tensor, global_model: Tensor | None = None, step_update: Tensor | None = None, **more: object
) -> View:
    settings = {"layout": LAYOUT, "step": 1, "fragment": 0, "per_tensor": False, "threshold": 4.0, **more}
    return View(residual, torch.ones_like(residual) if global_model is None else global_model, step_update, **settings)  # type: ignore[arg-type]


def entries(selector: Selector, seen: View) -> list[int]:
    chosen = selector.choose(seen)
    assert isinstance(chosen, Entries)
    found: list[int] = chosen.indices.tolist()
    assert found == sorted(set(found))
    return found


def covered(found: list[Interval] | Entries) -> list[int]:
    assert isinstance(found, list)
    return [i for s in found for i in range(s.start, s.stop)]


def test_all_is_everything_once_flat_or_by_tensor() -> None:
    whole = list(range(LAYOUT.numel))
    assert covered(selectors.All().choose(view(noise(1)))) == whole
    by_tensor = selectors.All().choose(view(noise(1), per_tensor=True))
    assert covered(by_tensor) == whole
    assert by_tensor == [Interval(s.start, s.shape) for s in LAYOUT.slots]


@given(count=st.integers(1, 9), sizes=st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(any))
def test_fragments_are_all_of_the_model_once(count: int, sizes: list[int]) -> None:
    layout = Layout.of_shapes((str(i), (n,)) for i, n in enumerate(sizes))
    dealt = fragments(layout, count)
    assert len(dealt) == count
    assert [i for found in dealt for i in covered(list(found))] == list(range(layout.numel))
    assert all(interval.stop > interval.start for found in dealt for interval in found)
    chosen = [
        i
        for p in range(count)
        for i in covered(selectors.Fragment(count).choose(view(noise(1), layout=layout, fragment=p)))
    ]
    assert chosen == list(range(layout.numel))


def test_fragments_are_about_equal() -> None:
    layout = Layout.of_shapes((str(i), (10,)) for i in range(12))
    assert [sum(s.stop - s.start for s in found) for found in fragments(layout, 4)] == [30, 30, 30, 30]


def test_merged_joins_neighbours_only() -> None:
    assert merged([Interval(0, (2, 3)), Interval(6, (4,)), Interval(12, (2,))]) == [
        Interval(0, (10,)),
        Interval(12, (2,)),
    ]


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
    found = selectors.Significant("tensor").choose(view(residual, None, step, per_tensor=True))
    assert found == [Interval(first.start, first.shape), Interval(second.start, second.shape)]
    flat = selectors.Significant("tensor").choose(view(residual, None, step))
    assert flat == [Interval(0, (second.stop,))]


def test_significant_elements_by_their_own_ratio() -> None:
    step, residual = torch.ones(LAYOUT.numel), torch.ones(LAYOUT.numel)
    residual[3], residual[7], residual[9] = 4.0, -4.5, 3.9
    step[11], residual[11] = 0.0, 0.0  # nothing happened here: nothing to say
    assert entries(selectors.Significant("element"), view(residual, None, step)) == [3, 7]


def test_nothing_is_significant_where_nothing_is_residual() -> None:
    zero = torch.zeros(LAYOUT.numel)
    assert selectors.Significant("tensor").choose(view(zero, None, zero)) == []
    assert entries(selectors.Significant("element"), view(zero, None, zero)) == []
    assert entries(selectors.Nonzero(), view(zero)) == []
    assert entries(selectors.Gaia(), view(zero, zero)) == []


def test_nonzero_is_what_is_there() -> None:
    residual = torch.zeros(LAYOUT.numel)
    residual[[2, 5, 63]] = torch.tensor([1.0, -1e-30, 2.0])
    assert entries(selectors.Nonzero(), view(residual)) == [2, 5, 63]


def test_stretches_of_a_layout_skip_empty_tensors() -> None:
    layout = Layout.of_shapes([("a", (0, 3)), ("b", (2,))])
    assert intervals(layout, True) == [Interval(0, (2,))]
