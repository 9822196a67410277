"""Parameters as elements of the index space: plain, in rows, in columns, tied, frozen, in other dtypes."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from weightgrad import codecs
from weightgrad.codecs import Fp32
from weightgrad.core.layout import Layout
from weightgrad.kernels import fixed
from weightgrad.runtime.model.module_gradients import gradients_of
from weightgrad.runtime.model.module_weights import ModuleWeights
from weightgrad.runtime.model.named_parameter import NamedParameter, layout_of, trainable
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.messages import Segment

from .rank_processes import run
from .ranks import check_access, fill, net, values_of


def weights_of(module: nn.Module, held: Intervals | None = None) -> tuple[ModuleWeights, Layout]:
    parameters = trainable(module)
    layout = layout_of(parameters)
    return ModuleWeights(parameters, layout, held), layout


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def test_frozen_parameters_take_no_part_and_tied_ones_once() -> None:
    first, last = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    last.weight = first.weight
    module = nn.Sequential(first, nn.Linear(3, 3).requires_grad_(False), last)
    weights, layout = weights_of(module)
    assert [slot.name for slot in layout.slots] == ["0.weight"]
    weights.write(weights.held, torch.arange(9.0))
    assert torch.equal(last.weight.flatten(), torch.arange(9.0))
    assert last.weight is first.weight


# -- plain parameters -------------------------------------------------------------------------------


def test_access_to_plain_parameters() -> None:
    model, layout = net()
    fill(model, layout, values_of(layout))
    weights, _ = weights_of(model)
    assert weights.held == weights.available == Intervals.whole(layout.numel)
    assert weights.exact
    assert not weights.redistributes
    check_access(weights, layout)
    assert torch.equal(flat(model), 10 * values_of(layout))


def test_intervals_across_parameters() -> None:
    model, layout = net()
    fill(model, layout, values_of(layout))
    weights, _ = weights_of(model)
    some = Intervals(((28, 33), (34, 36), (40, 41)))
    wanted = torch.cat([values_of(layout)[start:stop] for start, stop in some.spans])
    assert torch.equal(weights.read(some, torch.empty(8)), wanted)
    weights.write(some, -wanted)
    changed = values_of(layout)
    for start, stop in some.spans:
        changed[start:stop] *= -1
    assert torch.equal(flat(model), changed)


def test_what_lies_in_one_parameter_is_read_without_a_copy() -> None:
    model, _ = net()
    weights, _ = weights_of(model)
    found = weights.read(Intervals(((6, 12),)), torch.empty(6))
    assert found.data_ptr() == model.first.weight[1].data_ptr()


def test_elements_that_other_ranks_have_are_left_alone() -> None:
    """A stage of a pipeline has some parameters of the whole model; segments reach beyond them."""
    module = nn.Linear(3, 2)
    parameters = [NamedParameter(f"last.{one.name}", one.parameter) for one in trainable(module)]
    layout = Layout.of_shapes([("first", (4,)), ("last.weight", (2, 3)), ("last.bias", (2,))])
    weights = ModuleWeights(parameters, layout)
    assert weights.available == Intervals(((4, 12),))
    before = flat(module)
    weights.add_segment(Segment(0, Fp32().encode(torch.arange(12.0), {}, 0)[0]), fixed.ADD)
    assert torch.equal(flat(module), before + torch.arange(4.0, 12.0))


def test_a_sparse_segment_touches_only_its_entries() -> None:
    model, layout = net()
    fill(model, layout, torch.zeros(layout.numel))
    weights, _ = weights_of(model)
    update = torch.zeros(layout.numel)
    update[torch.tensor([0, 29, 30, 34, layout.numel - 1])] = torch.tensor([1.0, -2.0, 3.0, 4.0, 5.0])
    codec = codecs.parse(f"topk({5 / layout.numel})")
    payload, _ = codec.encode(update, codec.init(update), 0)
    assert payload.codec == "sparse"
    weights.add_segment(Segment(0, payload), fixed.ADD)
    assert torch.equal(flat(model), update)
    weights.add_segment(Segment(0, payload), fixed.SUBTRACT)
    assert torch.equal(flat(model), torch.zeros(layout.numel))


def test_a_sample_is_at_equal_distances() -> None:
    model, layout = net()
    fill(model, layout, values_of(layout))
    weights, _ = weights_of(model)
    assert weights.sample(Intervals(((2, 12),)), 4).tolist() == [3.0, 7.0, 11.0]


def test_parameters_in_bfloat16_round_what_is_written() -> None:
    module = nn.Linear(4, 2).bfloat16()
    weights, layout = weights_of(module)
    assert not weights.exact
    values = torch.linspace(0.1, 1.7, layout.numel)
    weights.write(weights.held, values)
    found = weights.read(weights.held, torch.empty(layout.numel))
    assert found.dtype == torch.float32
    assert torch.equal(found, values.bfloat16().float())
    assert torch.equal(weights.round_(values.clone(), weights.held), found)


def test_a_parameter_without_a_gradient_counts_as_zero() -> None:
    model, layout = net()
    model.last(torch.ones(2, 5)).sum().backward()
    weights, _ = weights_of(model)
    gradients = gradients_of(weights, layout)
    found = gradients.read(weights.held, torch.full((layout.numel,), torch.nan))
    assert torch.equal(found[:35], torch.zeros(35))
    assert torch.equal(found[35:], torch.full((6,), 2.0))
    gradients.write(weights.held, torch.ones(layout.numel))
    assert model.first.weight.grad is None


# -- sharded parameters ------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_that_fsdp2_has_dealt(ranks: int, tmp_path: Path) -> None:
    """Uneven: five rows on two ranks, and one row that only the first rank has."""
    found = run("fsdp2", ranks, tmp_path)
    numel = found[0]["numel"]
    held = sorted(chain.from_iterable(rank["held"] for rank in found))
    assert Intervals.of(held) == Intervals.whole(numel)
    assert sum(stop - start for start, stop in held) == numel, "each element on one rank"
    if ranks == 2:
        assert found[1]["held"] == ((18, 30), (33, 35)), "and nothing of the last layer's bias or its one row"
    for rank in found:
        assert torch.equal(rank["after"], 10 * (torch.arange(float(numel)) + 1))


@pytest.mark.parametrize("ranks", [2, 3])
def test_columns_are_brought_into_rows_and_back(ranks: int, tmp_path: Path) -> None:
    found = run("columns", ranks, tmp_path)
    held = sorted(chain.from_iterable(rank["held"] for rank in found))
    assert sum(stop - start for start, stop in held) == found[0]["numel"]
    for rank in found:
        assert torch.equal(rank["after"], 10 * (torch.arange(30.0) + 1).view(5, 6))
