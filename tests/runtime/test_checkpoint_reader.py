"""A site's checkpoint is read as a stranger's: no code in it runs, and nobody else can read or change it."""

from __future__ import annotations

import json
import logging
import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from weightgrad.errors import CheckpointError
from weightgrad.runtime.checkpoints.checkpoint_files import file_digest
from weightgrad.runtime.checkpoints.checkpoint_reader import CheckpointReader

from .deployment import Hub, Runner, finish, tiny

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Code:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self._path),)


def saved(directory: Path, **more: object) -> Path:
    save({"a": torch.arange(3.0), **more}, storage_writer=FileSystemWriter(directory), no_dist=True)
    return directory


def change(directory: Path, how: Callable[[Metadata], object]) -> None:
    """Change what is written about the tensors."""
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    found = how(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata if found is None else found))


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    target = {"a": torch.zeros(3)}
    load(target, storage_reader=CheckpointReader(saved(tmp_path)), no_dist=True)
    assert target["a"].tolist() == [0, 1, 2]


def test_code_does_not_run(tmp_path: Path) -> None:
    directory, marker = saved(tmp_path / "c"), tmp_path / "code has run"
    change(directory, lambda metadata: [metadata, Code(marker)])
    with pytest.raises(pickle.UnpicklingError, match="mkdir, which no checkpoint needs"):
        CheckpointReader(directory).read_metadata()
    assert not marker.exists()


def _outside(metadata: Metadata) -> None:
    for place in (metadata.storage_data or {}).values():
        place.relative_path = "../elsewhere"


def test_objects_that_torch_would_unpickle_are_refused(tmp_path: Path) -> None:
    with pytest.raises(pickle.UnpicklingError, match="BytesStorageMetadata"):
        CheckpointReader(saved(tmp_path, b={"an": "object"}["an"])).read_metadata()


@pytest.mark.parametrize(
    ("how", "why"), [(_outside, "no file of the checkpoint"), (lambda _: [1], "no metadata")], ids=["outside", "list"]
)
def test_what_is_no_checkpoint_is_refused(how: Callable[[Metadata], object], why: str, tmp_path: Path) -> None:
    change(saved(tmp_path), how)
    with pytest.raises(pickle.UnpicklingError, match=why):
        CheckpointReader(tmp_path).read_metadata()


def test_a_site_does_not_run_code_from_its_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    recipe, marker = tiny("{name: diloco, every: 2}", workers=1, steps=4), tmp_path / "code has run"
    with Hub(recipe) as hub:
        sites = [Runner(recipe, name, hub.address, state=tmp_path / name) for name in ("east", "west")]
        finish(*sites)
        for directory in (tmp_path / "east").glob("checkpoint-*"):
            (directory / ".metadata").write_bytes(pickle.dumps(Code(marker)))
            digests = json.loads((directory / "digests-0.json").read_text())
            digests[".metadata"] = file_digest(directory / ".metadata")
            (directory / "digests-0.json").write_text(json.dumps(digests))
        again = Runner(recipe, "east", hub.address, state=tmp_path / "east")
        with pytest.raises(CheckpointError, match="can be read"):
            finish(again)
    assert "which no checkpoint needs" in caplog.text
    assert not marker.exists()


def test_state_is_for_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    recipe = tiny("{name: weightgrad}", workers=1, steps=4)
    before = os.umask(0)
    try:
        with Hub(recipe, state=tmp_path / "server", out=tmp_path / "out", until_finished=True) as hub:
            finish(*(Runner(recipe, name, hub.address, state=tmp_path / name) for name in ("east", "west")))
            hub.join()
    finally:
        os.umask(before)

    def is_open(path: Path) -> bool:
        return bool(stat.S_IMODE(path.stat().st_mode) & 0o077)

    states = [tmp_path / name for name in ("server", "east", "west")]
    assert not [path for path in states if is_open(path)]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    closed = {path for path in tmp_path.rglob("*") if path.is_dir() and not is_open(path)}
    assert not [path for path in files if is_open(path) and not closed & set(path.parents)]
