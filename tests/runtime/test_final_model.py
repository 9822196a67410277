"""The final model on disk: one file, or several with the index that Hugging Face reads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from weightgrad.core.layout import Layout
from weightgrad.errors import CheckpointError
from weightgrad.runtime.server import final_model
from weightgrad.runtime.server.group import ServerGroup
from weightgrad.wire.intervals import Intervals

from .rank_processes import run
from .ranks import LAYOUT, server_shard, values_of


def write(directory: Path) -> None:
    final_model.write_final_model(directory, server_shard(Intervals.whole(LAYOUT.numel)), ServerGroup())


def assert_is_the_model(found: dict[str, Tensor]) -> None:
    assert found.keys() == {slot.name for slot in LAYOUT.slots}
    for slot in LAYOUT.slots:
        assert found[slot.name].shape == slot.shape
        assert torch.equal(found[slot.name], slot.of(values_of(LAYOUT)))


def read_as_hugging_face(directory: Path) -> dict[str, Tensor]:
    """By the index: every tensor from the file that it names, and every file is of the format that is expected."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 4 * LAYOUT.numel}
    found = {}
    for name, file in index["weight_map"].items():
        with safe_open(str(directory / file), framework="pt") as opened:
            assert opened.metadata()["format"] == "pt"
            found[name] = opened.get_tensor(name)
    return found


def test_a_small_model_is_one_file(tmp_path: Path) -> None:
    write(tmp_path / "made")
    assert os.listdir(tmp_path / "made") == ["model.safetensors"]
    assert_is_the_model(load_file(str(tmp_path / "made" / "model.safetensors")))


def test_a_large_model_is_several_files_and_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(final_model, "FILE_BYTES", 100)
    write(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    assert_is_the_model(read_as_hugging_face(tmp_path))


def test_tensors_stay_whole_and_in_order() -> None:
    layout = Layout.of_shapes([("a", (1 << 28,)), ("b", (3,)), ("c", (1 << 29,)), ("d", (1 << 27,)), ("e", (1 << 27,))])
    plan = [[slot.name for slot in slots] for slots in final_model.file_plan(layout)]
    assert plan == [["a"], ["b"], ["c"], ["d", "e"]], "1 GB a file; a tensor of 2 GB has one of its own"


@pytest.mark.parametrize("processes", [2, 3])
def test_tensors_that_several_processes_serve_are_put_together(processes: int, tmp_path: Path) -> None:
    run("write_model", processes, tmp_path)
    assert_is_the_model(read_as_hugging_face(tmp_path / "model"))


@pytest.mark.parametrize("where", ["final_model.save_file", "final_model.Path.write_text"])
def test_a_full_disk_is_named(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(final_model, "FILE_BYTES", 100)
    monkeypatch.setattr(f"weightgrad.runtime.server.{where}", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*model.*: the disk is full"):
        write(tmp_path)
