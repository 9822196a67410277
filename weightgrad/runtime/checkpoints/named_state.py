"""Everything that a rank of a site has to keep, by name, and where it goes when it is read.

Vectors of the index space, parameters and optimizer states are one object for all ranks, and read by whoever holds them
now; buffers, pushes in flight and what a rank remembers of its steps are of one rank. Both a checkpoint on a disk
(`site_checkpoint.py`) and a state that the user keeps (`portable_state.py`) have these names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weightgrad.core.layout import Layout
from weightgrad.core.optimizers.options import WrittenOptions
from weightgrad.core.site.coordinator import SiteCoordinator
from weightgrad.core.site.shard import SiteShard, pack_in_flight, unpack_in_flight
from weightgrad.core.strategies import Strategy
from weightgrad.core.vector_checks import with_prefix
from weightgrad.errors import CheckpointError
from weightgrad.runtime.layout_match import first_difference
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.runtime.site.rank_step import RankStep
from weightgrad.runtime.strategy_difference import strategy_difference
from weightgrad.wire.intervals import Intervals

if TYPE_CHECKING:
    from weightgrad.runtime.model.trained_model import TrainedModel


class NamedState:
    """The state of a site, as far as this rank has it.

    Args:
        group: the ranks of the site.
        strategy: the strategy of the run.
        seed: the seed of the run.
        model: what this rank trains.
        rank_step: what this rank remembers of gradients and weights.
        shard: what this rank holds.
    """

    def __init__(
        self,
        group: SiteGroup,
        strategy: Strategy,
        seed: int,
        model: TrainedModel,
        rank_step: RankStep,
        shard: SiteShard,
    ) -> None:
        self._group, self._strategy, self._seed = group, strategy, seed
        self._model, self._rank_step, self._shard = model, rank_step, shard
        self._written = WrittenOptions(model.optimizer)

    # -- of which run it is ----------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """Of which run a checkpoint is."""
        layout = [[slot.name, list(slot.shape)] for slot in self._model.layout.slots]
        return {"strategy": self._strategy.to_dict(), "seed": self._seed, "layout": layout, "ranks": self._group.size}

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

    # -- writing ---------------------------------------------------------------------------------

    def collect(self, coordinator: SiteCoordinator | None) -> dict[str, Any]:
        """Everything of this rank, by name; vectors of the index space are one object for all ranks."""
        model, rank = self._model, self._group.rank
        found: dict[str, Any] = dict(self._kept_parameters())
        found |= dict(_optimizer_state(model))
        found |= with_prefix("options.", self._written.tensors())
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

    # -- reading ---------------------------------------------------------------------------------

    def put(self, wanted: Mapping[str, Any], coordinator: SiteCoordinator | None, ranks: int) -> None:
        """Give everybody what has been read into `wanted`, which `ranks` ranks had written."""
        self._give_optimizer(wanted)
        self._written.load(_under("options.", wanted))
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
                found[name] = _interval_tensor(
                    model.layout.numel, self._shard, torch.zeros(held.numel, dtype=torch.float32)
                )
            elif name.startswith("optimizer."):
                kept = self._rank_step.keeps(name.split("|", 1)[1])
                if kept and (target := _optimizer_target(model, name, about)) is not None:
                    found[name] = target
            elif (
                (name.startswith("buffer.") and name.endswith(f".{mine}"))
                or name.startswith((f"rank_step.{rank}.", "coordinator.", "options."))
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
    from weightgrad.runtime.checkpoints.interval_tensor import IntervalTensor

    return IntervalTensor(numel, shard.held, tensor)


def _empty(about: Any) -> Tensor:
    return torch.empty(about.size, dtype=about.properties.dtype)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
