"""Full disks, damaged states and states of another run: what a server and a site say, and that they go on later."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from weightgrad.errors import CheckpointError
from weightgrad.runtime.site.rank_connection import RankConnection
from weightgrad.wire.messages import Bulk, PushPart

from .deployment import Hub, Runner, finish, read_checkpoint, tiny

# -- a full disk --------------------------------------------------------------------------------


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_for(directory: Path) -> Callable[..., Any]:
    """A way to open files for torch that finds no room under that directory."""
    create = FileSystem.create_stream

    def opened(system: FileSystem, path: str | os.PathLike[str], mode: str) -> Any:
        if "w" in mode and directory in Path(path).parents:
            full()
        return create(system, path, mode)

    return opened


def test_a_server_whose_disk_is_full_ends_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = tiny("{name: diloco, every: 4, t_global: null}", workers=1, steps=24)
    with Hub(recipe) as whole:
        finish(*[Runner(recipe, name, whole.address) for name in ("east", "west")])
        wanted = whole.global_model.digest()
    out = tmp_path / "out"
    out.mkdir()
    hub = Hub(recipe, state=tmp_path / "state", out=out)
    sites = [Runner(recipe, name, hub.address, to=6) for name in ("east", "west")]
    hub.until(lambda: all(site.version == 1 for site in sites))
    with monkeypatch.context() as patch:
        patch.setattr("weightgrad.runtime.checkpoints.input_log_file.os.writev", full)
        patch.setattr("weightgrad.runtime.server.final_model.save_file", full)
        for site in sites:
            site.limit = 12
        hub.join()
    assert isinstance(hub.error, CheckpointError)
    assert "the disk is full; the previous state is kept" in str(hub.error), "and not that of the last global model"
    assert "model.safetensors: the disk is full" in caplog.text
    assert hub.server.status()["healthy"] is False
    with Hub(recipe, state=tmp_path / "state", listen=hub.address) as again:
        finish(*sites)
        assert again.global_model.digest() == wanted


def test_a_site_whose_disk_is_full_ends_and_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny("{name: diloco, every: 4, t_global: null}", workers=1, steps=16)
    with Hub(recipe) as whole:
        finish(*[Runner(recipe, name, whole.address) for name in ("east", "west")])
        wanted = whole.global_model.digest()
    with Hub(recipe, state=tmp_path / "server") as hub:
        east = Runner(recipe, "east", hub.address, state=tmp_path / "east", checkpoint_every=3)
        west = Runner(recipe, "west", hub.address, to=5, state=tmp_path / "west", checkpoint_every=3)
        hub.until(lambda: west.site.steps == 5)
        with monkeypatch.context() as patch:
            patch.setattr(FileSystem, "create_stream", full_for(tmp_path / "west"))
            west.limit = 12
            hub.until(lambda: west.error is not None)
        assert isinstance(west.error, CheckpointError)
        assert "checkpoint-000000000006: the disk is full; the previous state is kept" in str(west.error)
        assert west.site.steps == 6
        assert [path.name for path in (tmp_path / "west").glob("checkpoint-*")] == ["checkpoint-000000000003"]
        west = Runner(recipe, "west", hub.address, state=tmp_path / "west", checkpoint_every=3)
        finish(east, west)
        assert hub.global_model.digest() == wanted


# -- what was not sent yet ----------------------------------------------------------------------


def test_a_push_that_a_killed_site_had_not_sent_is_sent_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it waits for the result of a push that the server waits for. Found by benchmarks/soak.py."""
    recipe = tiny("{name: weightgrad, t_global: null}", workers=1, steps=24)
    with Hub(recipe) as whole:
        finish(*[Runner(recipe, name, whole.address) for name in ("east", "west")])
        wanted = whole.global_model.digest()
    send, lost = RankConnection.send_bulk, list[int]()

    def send_nothing_of_it(connection: RankConnection, number: int, message: Bulk) -> None:
        if connection.site == "west" and isinstance(message, PushPart) and message.segments:
            lost.append(message.round)
        else:
            send(connection, number, message)

    with Hub(recipe, state=tmp_path / "server") as hub:
        east = Runner(recipe, "east", hub.address)
        with monkeypatch.context() as patch:
            patch.setattr(RankConnection, "send_bulk", send_nothing_of_it)
            west = Runner(recipe, "west", hub.address, to=1, state=tmp_path / "west", checkpoint_every=1)
            hub.until(lambda: lost or west.extend(1))
            hub.until(lambda: (tmp_path / "west" / f"checkpoint-{west.limit:012d}").exists())
            west.vanish()
        _, saved = read_checkpoint(tmp_path / "west")
        assert f"shard.0.in_flight.{lost[0]}" in saved
        west = Runner(recipe, "west", hub.address, state=tmp_path / "west", checkpoint_every=1)
        finish(east, west)
        assert hub.global_model.digest() == wanted


# -- states of another run ----------------------------------------------------------------------


def test_the_state_of_another_run_is_refused_by_the_server(tmp_path: Path) -> None:
    strategy = "{name: diloco, every: 4, t_global: 60}"
    with Hub(tiny(strategy, workers=1, steps=4), state=tmp_path) as hub:
        finish(*[Runner(tiny(strategy, workers=1, steps=4), name, hub.address) for name in ("east", "west")])
    other = tiny("{name: diloco, every: 8, t_global: 60}", workers=1)
    with pytest.raises(
        CheckpointError,
        match=r"is of another run: its strategy is another, trigger is 'every\(8\)' here and 'every\(4\)'",
    ):
        Hub(other, state=tmp_path)
    seeded = tiny(strategy, workers=1).model_copy(update={"seed": 4})
    with pytest.raises(
        CheckpointError, match=r"its seed is 3, here it is 4; give --state another directory, or the rec"
    ):
        Hub(seeded, state=tmp_path)


def test_the_state_of_another_run_is_refused_by_the_site(tmp_path: Path) -> None:
    strategy = "{name: diloco, every: 4, t_global: 60}"

    def train(recipe: Any, module: torch.nn.Module | None = None) -> None:
        with Hub(recipe) as hub:
            options: dict[str, Any] = {"state": tmp_path / "east", "checkpoint_every": 2, "module": module}
            finish(Runner(recipe, "east", hub.address, **options))

    recipe = tiny(strategy, workers=1)
    with Hub(recipe) as hub:
        east = Runner(recipe, "east", hub.address, to=3, state=tmp_path / "east", checkpoint_every=2)
        hub.until(lambda: east.site.steps == 3)
        east.vanish()
    with pytest.raises(
        CheckpointError, match=r"east is of another run: its strategy is another, trigger is 'every\(2\)'"
    ):
        train(tiny("{name: diloco, every: 2, t_global: 60}", workers=1, steps=8))
    with pytest.raises(
        CheckpointError, match=r"east is of another run: its seed is 3, now it is 4; give state another"
    ):
        train(tiny(strategy, workers=1, steps=8).model_copy(update={"seed": 4}))
    with pytest.raises(
        CheckpointError, match=r"east is of another run: its model is another, it has a parameter 1\.weight"
    ):
        train(tiny(strategy, workers=1, steps=8), torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)))


def flip(path: Path, at: int) -> None:
    """One bit."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda newest: truncate(newest / "__0_0.distcp"),
        lambda newest: flip(newest / "__0_0.distcp", 2000),
        lambda newest: flip(newest / ".metadata", 100),
        lambda newest: flip(newest / "facts.json", 40),
        lambda newest: flip(newest / "digests-0.json", 40),
        lambda newest: (newest / "__0_0.distcp").unlink(),
        lambda newest: (newest / ".metadata").unlink(),
    ],
    ids=[
        "truncated",
        "a bit",
        "a bit of the metadata",
        "a bit of the facts",
        "a bit of the digests",
        "gone",
        "no index",
    ],
)
def test_a_site_with_a_damaged_newest_state_goes_on_from_the_one_before(
    spoil: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = tiny("{name: diloco, every: 4, t_global: null}", workers=1, steps=16)
    caplog.set_level(logging.INFO)
    with Hub(recipe, state=tmp_path / "server") as hub:
        east = Runner(recipe, "east", hub.address, state=tmp_path / "east", checkpoint_every=3)
        west = Runner(recipe, "west", hub.address, to=11, state=tmp_path / "west", checkpoint_every=3)
        hub.until(lambda: west.site.steps == 11)
        west.vanish()
        newest = tmp_path / "west" / "checkpoint-000000000009"
        spoil(newest)
        west = Runner(recipe, "west", hub.address, state=tmp_path / "west", checkpoint_every=3)
        finish(east, west)
        assert "checkpoint-000000000009 is damaged" in caplog.text
        assert "going on with the checkpoint before it" in caplog.text
        assert "west goes on from step 6" in caplog.text
        assert west.digest() == hub.global_model.digest()


def test_when_all_checkpoints_of_a_site_are_damaged_the_error_says_what_to_do(tmp_path: Path) -> None:
    recipe = tiny("{name: diloco, every: 4, t_global: null}", workers=1)
    with Hub(recipe) as hub:
        east = Runner(recipe, "east", hub.address, to=3, state=tmp_path / "east", checkpoint_every=1)
        hub.until(lambda: east.site.steps == 3)
        east.vanish()
        for path in (tmp_path / "east").glob("checkpoint-*"):
            flip(path / "__0_0.distcp", 2000)
        again = Runner(recipe, "east", hub.address, state=tmp_path / "east")
        with pytest.raises(
            CheckpointError, match=r"no checkpoint in .*east can be read. Restore one from a backup, or"
        ):
            finish(again)
