"""A site's checkpoint is of the site, not of its ranks: it comes back with any number of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from weightgrad.runtime.checkpoints.interval_tensor import IntervalTensor
from weightgrad.wire.intervals import Intervals

from .rank_processes import run


def together(ranks: list[dict[str, Any]], name: str) -> Tensor:
    """A vector of the index space, of what each rank holds."""
    found = torch.full((ranks[0]["numel"],), torch.nan)
    for rank in ranks:
        offset = 0
        for start, stop in rank["held"]:
            found[start:stop] = rank["vectors"][name][offset : offset + stop - start]
            offset += stop - start
    return found


@pytest.mark.parametrize(("how", "ranks"), [("restore", 1), ("restore", 2), ("restore", 3), ("restore_portable", 3)])
def test_what_two_ranks_have_saved_any_number_loads(how: str, ranks: int, tmp_path: Path) -> None:
    saved = run("save", 2, tmp_path / "saved")
    shutil.copytree(tmp_path / "saved" / "state", tmp_path / "loaded" / "state")
    loaded = run(how, ranks, tmp_path / "loaded")
    assert len(loaded) == ranks
    for name in saved[0]["vectors"]:
        wanted = together(saved, name)
        assert not wanted.isnan().any()
        assert torch.equal(together(loaded, name), wanted), name
    assert together(saved, "in flight 2").count_nonzero() > 0
    assert together(saved, "residual").count_nonzero() > 0
    for what in ("weights", "optimizer"):
        assert saved[0][what].keys() == loaded[0][what].keys()
        for name, tensor in saved[0][what].items():
            assert torch.equal(loaded[0][what][name], tensor), name
    assert loaded[0]["progress"] == saved[0]["progress"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_vector_is_saved_and_loaded_in_intervals(tmp_path: Path) -> None:
    held, numel = Intervals(((0, 3), (5, 6), (8, 12))), 12
    stored = torch.arange(8.0)
    save({"vector": IntervalTensor(numel, held, stored)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    fewer = Intervals(((1, 3), (9, 11)))
    found = torch.zeros(4)
    wanted = {"vector": IntervalTensor(numel, fewer, found)}
    load(wanted, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    assert found.tolist() == [1.0, 2.0, 5.0, 6.0]


def test_an_interval_tensor_is_for_checkpoints_only() -> None:
    tensor = IntervalTensor(12, Intervals(((0, 3),)), torch.zeros(3))
    assert tensor.shape == (12,)
    assert repr(tensor) == "IntervalTensor(12 elements, 3 here)"
    with pytest.raises(TypeError, match="only for checkpoints"):
        tensor.clone()
