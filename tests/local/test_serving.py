"""Who serves what inside a site, and that a part of the local server does what the whole one does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightgrad.core.layout import Layout
from weightgrad.core.strategies import find
from weightgrad.local import LocalServer, WeightEncoder, owners, serving
from weightgrad.wire.intervals import Intervals

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8)


def layout_of(shapes: list[tuple[int, ...]]) -> Layout:
    return Layout.of_shapes((f"t{place}", shape) for place, shape in enumerate(shapes))


@given(SHAPES, st.integers(2, 6), st.sampled_from(["server", "sharded"]))
def test_every_tensor_is_served_whole_by_one_worker(shapes: list[tuple[int, ...]], workers: int, exchange: str) -> None:
    layout = layout_of(shapes)
    served = serving(layout, find("weightgrad", {"exchange": exchange}), workers)
    assert served is not None
    assert len(served) == workers
    assert sum(one.numel for one in served) == layout.numel
    who = owners(layout, served)
    assert who is not None
    for slot, owner in zip(layout.slots, who, strict=True):
        own = Intervals(((slot.start, slot.stop),) if slot.numel else ())
        assert served[owner] & own == own
    if exchange == "server":
        assert set(who) == {0}


def test_without_a_local_server_nobody_serves() -> None:
    layout = layout_of([(4, 4)])
    assert serving(layout, find("baseline"), 4) is None
    assert serving(layout, find("weightgrad"), 1) is None
    assert owners(layout, None) is None


@pytest.mark.parametrize("weights", ["lossaware(bits='ternary')", "lossaware(bits=8)", "qsgd(bits=4)", "fp32"])
@pytest.mark.parametrize("combine", ["mean", "serial"])
def test_two_parts_of_a_local_server_are_the_whole_one(weights: str, combine: str) -> None:
    layout = layout_of([(6, 5), (7,), (5, 6), (3, 4), (4,)])
    parts = ([0, 1, 4], [2, 3])
    start = torch.randn(layout.numel, generator=torch.Generator().manual_seed(1))
    encoder = WeightEncoder.of(find("weightgrad", {"weights": weights}))
    sgd = ("sgd", {"lr": 0.1, "momentum": 0.9})

    def server(flat: torch.Tensor, served: list[int] | None) -> LocalServer:
        return LocalServer(layout, flat, sgd, combine=combine, weight_encoder=encoder, key=3, served=served)

    def part_of(flat: torch.Tensor, served: list[int]) -> torch.Tensor:
        return torch.cat([layout.slots[place].of(flat).flatten() for place in served])

    whole = server(start.clone(), None)
    divided = [server(part_of(start, served), served) for served in parts]
    for step in range(3):
        seed = torch.Generator().manual_seed(10 + step)
        gradients = [torch.randn(layout.numel, generator=seed) for _ in range(3)]
        whole.step(gradients, 0.1)
        whole.released()
        for one, served in zip(divided, parts, strict=True):
            one.step([part_of(gradient, served) for gradient in gradients], 0.1)
            one.released()
            assert torch.equal(one.master(), part_of(whole.master(), served))
            assert torch.equal(one.working_weights(), part_of(whole.working_weights(), served))
