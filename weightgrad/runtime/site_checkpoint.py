"""The checkpoint of a site, sharded: every rank writes what it has, by torch.distributed.checkpoint.

A checkpoint is a directory checkpoint-000000000050 of all ranks together. A site can come back with another number of
ranks, or sharded in another way: vectors of the index space, parameters and optimizer states are loaded by whoever
holds them now. Files are written while the training waits, from the memory in which they are, so nothing is copied.
They are made durable beside the next steps, and the directory gets its name when they are. The two newest are kept.
Every rank writes digests of its files, which are compared when a checkpoint is read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

from weightgrad.core.layout import Layout
from weightgrad.core.site_coordinator import SiteCoordinator
from weightgrad.core.site_shard import SiteShard, pack_in_flight, unpack_in_flight
from weightgrad.core.strategies import Strategy
from weightgrad.core.vector_checks import with_prefix
from weightgrad.errors import CheckpointError
from weightgrad.runtime.checkpoint import BackgroundWriter, cannot_write, sync_directory
from weightgrad.runtime.layout_match import first_difference
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.runtime.rank_step import RankStep
from weightgrad.runtime.strategy_difference import strategy_difference
from weightgrad.wire.intervals import Intervals

if TYPE_CHECKING:
    from weightgrad.runtime.trained_model import TrainedModel

log = logging.getLogger("weightgrad")

_PREFIX = "checkpoint-"
_KEPT = 2
_FACTS = "facts.json"
_DIGESTS = "digests-"
_PIECE_BYTES = 8 << 20


class SiteCheckpoint:
    """Writes and reads the checkpoints of a site, together with all of its ranks.

    Args:
        directory: where.
        site: the name of the site.
        group: the ranks of the site.
        strategy: the strategy of the run.
        seed: the seed of the run.
        model: what this rank trains.
        rank_step: what this rank remembers of gradients and weights.
        shard: what this rank holds.
    """

    def __init__(
        self,
        directory: Path,
        site: str,
        group: SiteGroup,
        strategy: Strategy,
        seed: int,
        model: TrainedModel,
        rank_step: RankStep,
        shard: SiteShard,
    ) -> None:
        self._directory, self._site, self._group = directory, site, group
        self._strategy, self._seed, self._model = strategy, seed, model
        self._rank_step, self._shard = rank_step, shard
        self.writer = BackgroundWriter()

    # -- writing ---------------------------------------------------------------------------------

    def write(self, steps: int, coordinator: SiteCoordinator | None) -> None:
        """Write a checkpoint; called on every rank.

        Args:
            steps: the steps done.
            coordinator: the coordinator of the site, on rank 0.

        Raises:
            CheckpointError: it, or the one before, could not be written.
        """
        self.wait()
        target = self._directory / f"{_PREFIX}{steps:012d}"
        temporary = self._directory / f".{target.name}"
        state = self.named_state(coordinator)
        try:
            if self._group.first:
                self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(mode=0o700)
                facts = {**self.identity(), "step": steps, "version": coordinator.version if coordinator else -1}
                (temporary / _FACTS).write_text(json.dumps(facts))
            self._group.barrier()
            if not (temporary / _FACTS).exists():
                raise CheckpointError(
                    f"rank {self._group.rank} of {self._site} does not see {temporary}, which rank 0 has made; give "
                    "`state` a directory that all ranks of the site share"
                )
            _save(state, temporary, self._group)
            self._write_digests(temporary)
            self._group.barrier()
        except (OSError, RuntimeError) as error:
            raise cannot_write(target, error, sum(_size(value) for value in state.values())) from error
        self.writer.begin(lambda: self._finish(temporary, target))

    def _write_digests(self, directory: Path) -> None:
        """Write down the digests of the files of this rank: torch.distributed.checkpoint notices no damage."""
        own = [path for path in directory.iterdir() if path.name.startswith(f"__{self._group.rank}_")]
        own += [directory / ".metadata", directory / _FACTS] if self._group.first else []
        found = {path.name: _file_digest(path) for path in own}
        (directory / f"{_DIGESTS}{self._group.rank}.json").write_text(json.dumps(found))

    def _finish(self, temporary: Path, target: Path) -> None:
        """Make the files durable and give the directory its name, on rank 0 of every machine."""
        try:
            for path in temporary.iterdir():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            sync_directory(temporary)
        except FileNotFoundError:
            return  # another rank was sooner: it has synced all of them
        except OSError as error:
            raise cannot_write(target, error, 0) from error
        if not self._group.first:
            return
        try:
            shutil.rmtree(target, ignore_errors=True)
            os.replace(temporary, target)
            sync_directory(self._directory)
        except OSError as error:
            raise cannot_write(target, error, 0) from error
        for old in _all(self._directory)[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    def look(self) -> None:
        """Raise what went wrong with the last checkpoint, if that is known."""
        self.writer.look()

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk, here and on the other ranks."""
        self.writer.wait()
        self._group.barrier()

    def named_state(self, coordinator: SiteCoordinator | None) -> dict[str, Any]:
        """Everything of this rank, by name; vectors of the index space are one object for all ranks."""
        model, rank = self._model, self._group.rank
        found: dict[str, Any] = dict(self._kept_parameters())
        found |= dict(_optimizer_state(model))
        found |= {f"buffer.{place}.{rank}": buffer for place, buffer in enumerate(model.buffers)}
        found |= with_prefix(f"rank_step.{rank}.", self._rank_step.state())
        for name, tensor in self._shard.state().items():
            if _is_vector(name, tensor, self._shard.held.numel):
                found[f"vector.{name}"] = _interval_tensor(model.layout.numel, self._shard, tensor.cpu())
            else:
                found[f"shard.{rank}.{name}"] = tensor.cpu()
        if coordinator is not None:
            found |= with_prefix("coordinator.", coordinator.state())
        return found

    def _kept_parameters(self) -> Iterator[tuple[str, Any]]:
        """The parameters that rounds work on; a rank that does not serve a tensor has only what it computes on."""
        for one in self._model.weights.parameters:
            if self._rank_step.keeps(one.name):
                yield f"model.{one.name}", one.parameter.detach()

    def identity(self) -> dict[str, Any]:
        """Of which run a checkpoint is."""
        layout = [[slot.name, list(slot.shape)] for slot in self._model.layout.slots]
        return {"strategy": self._strategy.to_dict(), "seed": self._seed, "layout": layout, "ranks": self._group.size}

    # -- reading ---------------------------------------------------------------------------------

    def restore(self, coordinator: SiteCoordinator | None) -> int | None:
        """Load the newest checkpoint; called on every rank.

        Args:
            coordinator: the coordinator of the site, on rank 0.

        Returns:
            Its step; None if there is no checkpoint.

        Raises:
            CheckpointError: every checkpoint is damaged, or it is of another run.
        """
        own = "\n".join(path.name for path in _all(self._directory)) if self._group.first else ""
        names = self._group.bytes_from_first(own.encode()).decode().splitlines()
        if not names:
            return None
        for name in reversed(names):
            damaged, step = 0, 0
            try:
                facts = self._verify(self._directory / name)
                self.check(facts, self._directory)
                step = int(facts["step"])
                self._load(self._directory / name, coordinator, int(facts["ranks"]))
            except CheckpointError:
                raise
            except Exception as error:  # whatever a damaged file does to the reader
                log.error("%s: %s is damaged (%s); going on with the checkpoint before it", self._site, name, error)
                damaged = 1
            if self._group.maximum(damaged):  # on any rank: all go on from the same step
                continue
            if self._group.first:
                log.info("%s goes on from step %d", self._site, step)
            return step
        raise CheckpointError(
            f"no checkpoint in {self._directory} can be read. Restore one from a backup, or remove the directory to "
            "start from the beginning"
        )

    def _verify(self, directory: Path) -> dict[str, Any]:
        """The facts of a checkpoint; every rank compares the digests of some files, and all hear what was found.

        Raises:
            ValueError: a file is not as it was written.
        """
        damaged = ""
        try:
            facts: dict[str, Any] = json.loads((directory / _FACTS).read_text())
            for rank in range(self._group.rank, int(facts["ranks"]), self._group.size):
                digests = json.loads((directory / f"{_DIGESTS}{rank}.json").read_text())
                damaged = next((name for name in digests if _file_digest(directory / name) != digests[name]), damaged)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            damaged = str(error)
        if self._group.maximum(bool(damaged)):
            raise ValueError(f"not as it was written: {damaged or 'a file that another rank has looked at'}")
        return facts

    def check(self, facts: Mapping[str, Any], source: Path) -> None:
        """Compare a checkpoint with this run.

        Raises:
            CheckpointError: It is of another run.
        """
        theirs = Layout.of_shapes((name, tuple(shape)) for name, shape in facts["layout"])
        what: str | None = None
        if (found := first_difference(self._model.layout, theirs)) is not None:
            what = f"model is another, {found}"
        elif facts["seed"] != self._seed:
            what = f"seed is {facts['seed']}, now it is {self._seed}"
        elif facts["strategy"] != json.loads(json.dumps(strategy := self._strategy.to_dict())):
            what = f"strategy is another, {strategy_difference(strategy, facts['strategy']) or 'the overlap'}"
        if what is not None:
            raise CheckpointError(f"{source} is of another run: its {what}; give state another directory, or remove it")

    def _load(self, directory: Path, coordinator: SiteCoordinator | None, ranks: int) -> None:
        metadata = _metadata(directory)
        wanted = self.wanted(metadata, ranks)
        _restore(wanted, directory, self._group)
        self.put(wanted, coordinator, ranks)

    def put(self, wanted: Mapping[str, Any], coordinator: SiteCoordinator | None, ranks: int) -> None:
        """Give everybody what has been read into `wanted`, which `ranks` ranks had written."""
        self._give_optimizer(wanted)
        model, rank = self._model, self._group.rank
        for place, buffer in enumerate(model.buffers):
            buffer.copy_(wanted[f"buffer.{place}.{rank if rank < ranks else 0}"])
        own = {name: value for name, value in wanted.items() if not name.startswith("vector.")}
        if ranks == self._group.size:
            self._rank_step.load(_under(f"rank_step.{rank}.", own))
        self._shard.load_state(self._shard_state(wanted, own, ranks))
        if coordinator is not None:
            coordinator.load(_under("coordinator.", own))

    def wanted(self, metadata: Mapping[str, Any], ranks: int) -> dict[str, Any]:
        """What this rank reads, with memory for it."""
        model, held, rank = self._model, self._shard.held, self._group.rank
        found: dict[str, Any] = dict(self._kept_parameters())
        mine = rank if rank < ranks else 0
        for name, about in metadata.items():
            if name.startswith("vector."):
                found[name] = _interval_tensor(model.layout.numel, self._shard, torch.zeros(held.numel))
            elif name.startswith("optimizer."):
                kept = self._rank_step.keeps(name.split("|", 1)[1])
                if kept and (target := _optimizer_target(model, name, about)) is not None:
                    found[name] = target
            elif (
                (name.startswith("buffer.") and name.endswith(f".{mine}"))
                or name.startswith((f"rank_step.{rank}.", "coordinator."))
                or ".in_flight." in name
                or name.endswith((".in_flight_share", ".waiting"))
                or (name.startswith(f"shard.{rank}.") and ranks == self._group.size)
            ):
                found[name] = _empty(about)
        return found

    def _give_optimizer(self, wanted: Mapping[str, Any]) -> None:
        optimizer = self._model.optimizer
        optimizer.state.clear()
        parameters = {one.name: one.parameter for one in self._model.weights.parameters}
        for name, value in wanted.items():
            if name.startswith("optimizer."):
                key, parameter = name.removeprefix("optimizer.").split("|", 1)
                number = key.endswith("#")
                optimizer.state[parameters[parameter]][key.removesuffix("#")] = float(value) if number else value

    def _shard_state(self, wanted: Mapping[str, Any], own: Mapping[str, Tensor], ranks: int) -> dict[str, Tensor]:
        found = {name.removeprefix("vector."): wanted[name].stored for name in wanted if name.startswith("vector.")}
        if ranks == self._group.size:
            return found | _under(f"shard.{self._group.rank}.", own)
        return found | _merged_in_flight(own) | _of_other_ranks(own, self._shard.held)


def newest_version(directory: Path | None) -> int:
    """The version of the global model in the newest checkpoint; -1 without one."""
    for path in reversed(_all(directory) if directory is not None else []):
        with contextlib.suppress(OSError, ValueError, KeyError):
            return int(json.loads((path / _FACTS).read_text())["version"])
    return -1


def newest_step(directory: Path) -> int | None:
    """The step of the newest checkpoint; None without one."""
    for path in reversed(_all(directory)):
        with contextlib.suppress(OSError, ValueError, KeyError):
            return int(json.loads((path / _FACTS).read_text())["step"])
    return None


def newest_global_model(directory: Path) -> tuple[int, Tensor] | None:
    """The version of the global model in the newest checkpoint and its weights, read by one process.

    Where sites share gradients, the global model is the trained one.

    Args:
        directory: the directory of the site's checkpoints.

    Returns:
        Version and flat vector; None if there is no checkpoint.
    """
    for path in _all(directory)[-1:]:
        facts, metadata = json.loads((path / _FACTS).read_text()), _metadata(path)
        layout = Layout.of_shapes((name, tuple(shape)) for name, shape in facts["layout"])
        vector, whole = torch.empty(layout.numel), "vector.global_model"
        wanted = {f"model.{slot.name}": slot.of(vector) for slot in layout.slots}
        _restore({whole: vector} if whole in metadata else wanted, path, None)
        return int(facts["version"]), vector
    return None


def _merged_in_flight(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The pushes in flight of ranks that were other ones: every rank gets all parts, and uses what it holds of them."""
    rounds: dict[str, list[Any]] = {}
    for name, tensor in own.items():
        if ".in_flight." in name:
            rounds.setdefault(name.rsplit(".", 1)[1], []).extend(unpack_in_flight(tensor))
    return {
        f"in_flight.{round_}": pack_in_flight(int(round_), tuple(sorted(segments, key=lambda one: one.start)))
        for round_, segments in rounds.items()
    }


def _of_other_ranks(own: Mapping[str, Tensor], held: Intervals) -> dict[str, Tensor]:
    """What ranks that held other elements knew about those that this rank holds now."""
    shares = [tensor for name, tensor in own.items() if name.endswith(".in_flight_share")]  # all alike
    found = {"in_flight_share": shares[0]} if shares else {}
    waiting = [span for name, tensor in own.items() if name.endswith(".waiting") for span in tensor.tolist()]
    if here := held & Intervals.of((start, stop) for start, stop in waiting):
        found["waiting"] = torch.tensor(here.spans)
    return found


def _optimizer_state(model: TrainedModel) -> Iterator[tuple[str, Any]]:
    for one in model.weights.parameters:
        for key, value in model.optimizer.state.get(one.parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"optimizer.{key}|{one.name}", value.detach()
            elif isinstance(value, (int, float)):
                yield f"optimizer.{key}#|{one.name}", torch.tensor(float(value), dtype=torch.float64)


def _optimizer_target(model: TrainedModel, name: str, about: Any) -> Tensor | None:
    key, parameter = name.removeprefix("optimizer.").split("|", 1)
    del key
    for one in model.weights.parameters:
        if one.name == parameter:
            same = tuple(about.size) == one.shape and len(one.shape) > 0
            return torch.zeros_like(one.parameter.detach(), dtype=about.properties.dtype) if same else _empty(about)
    return None


def _is_vector(name: str, tensor: Tensor, numel: int) -> bool:
    return name in ("global_model", "residual.vector", "anchor") and tensor.numel() == numel


def _interval_tensor(numel: int, shard: SiteShard, tensor: Tensor) -> Any:
    from weightgrad.runtime.interval_tensor import IntervalTensor

    return IntervalTensor(numel, shard.held, tensor)


def _empty(about: Any) -> Tensor:
    return torch.empty(about.size, dtype=about.properties.dtype)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _file_digest(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _size(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else 0


def _all(directory: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(path for path in directory.iterdir() if path.name.startswith(_PREFIX) and path.is_dir())
    return []


def _save(state: dict[str, Any], directory: Path, group: SiteGroup) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(directory, sync_files=False, overwrite=True)
    with _plain_errors():
        save(state, storage_writer=writer, process_group=group.group, no_dist=group.size == 1)


def _restore(state: dict[str, Any], directory: Path, group: SiteGroup | None) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    from weightgrad.runtime.checkpoint_reader import CheckpointReader

    reader = CheckpointReader(directory)
    with _plain_errors():
        if group is None or group.size == 1:
            load(state, storage_reader=reader, no_dist=True)
        else:
            load(state, storage_reader=reader, process_group=group.group)


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise what went wrong on a rank, on all ranks, and not torch's collection of it, which is no `Exception`.

    A site of one rank is no mistake, about which torch would warn.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            yield
        except CheckpointException as error:
            failure, _ = error.failures[min(error.failures)]
            raise failure from error


def _metadata(directory: Path) -> Mapping[str, Any]:
    from weightgrad.runtime.checkpoint_reader import CheckpointReader

    found: Mapping[str, Any] = CheckpointReader(directory).read_metadata().state_dict_metadata
    return found
