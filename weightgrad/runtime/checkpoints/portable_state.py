"""The state of a site as bytes, for a checkpoint of the user's own: `site.state_dict()` beside `model.state_dict()`.

It has all that a checkpoint of `join(state=...)` has, put together from all ranks: the weights that rounds work on and
their optimizer, what was made and not shared, pushes in flight, and how far the site has come. So it can be loaded by
another number of ranks. It is one object, so that `torch.save` and torch.distributed.checkpoint both take it without
being told what is in it; and it is gathered in memory on every rank. For models of which that is too much there is
`join(state=...)`, in which every rank writes its own part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from weightgrad.core.local_model import gather
from weightgrad.core.site.coordinator import SiteCoordinator
from weightgrad.errors import CheckpointError
from weightgrad.runtime.model.sharded_tensor import is_sharded
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.wire.intervals import Intervals

if TYPE_CHECKING:
    from weightgrad.runtime.checkpoints.named_state import NamedState

_FACTS = "facts"


@dataclass(frozen=True)
class PortableState:
    """A site's state.

    Attributes:
        facts: of which run it is, and how far the site had come.
        tensors: whole tensors by their names in a checkpoint.
    """

    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def version(self) -> int:
        """The version of the site's global model."""
        return int(self.facts["version"])

    @staticmethod
    def of(state: NamedState, group: SiteGroup, steps: int, coordinator: SiteCoordinator | None) -> bytes:
        """Put the state together; called on every rank, each of which gets all of it.

        Args:
            state: names what this rank has.
            group: the ranks of the site.
            steps: the steps done.
            coordinator: the coordinator of the site, on rank 0.
        """
        own = state.collect(coordinator)
        version = group.number_from_first(coordinator.version if coordinator is not None else 0)
        facts = {**state.identity(), "step": steps, "version": version}
        whole: dict[str, Tensor] = {}
        for name in sorted(own):
            if name.startswith("vector."):
                whole[name] = _whole_vector(own[name], group)
            elif is_sharded(own[name]):
                whole[name] = own[name].full_tensor().cpu()
        plain = {name: one for name, one in own.items() if name not in whole}
        for blob in group.exchange(_to_tensor(save(_first_here(plain, group)))):
            whole |= load(bytes(blob.numpy()))
        tensors = {name: one.detach().cpu().contiguous().clone() for name, one in whole.items()}
        return save(tensors, {_FACTS: json.dumps(facts)})

    @staticmethod
    def read(data: Any) -> PortableState:
        """Read what `of` returned.

        Raises:
            CheckpointError: It is something else, or damaged.
        """
        if not isinstance(data, bytes) or not data:
            raise CheckpointError(
                "load_state_dict() was given no state of a site; wanted what site.state_dict() returned after prepare()"
            )
        try:
            size = int.from_bytes(data[:8], "little")
            facts = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][_FACTS])
            return PortableState(facts, load(data))
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"the state of a site cannot be read ({error}); it is damaged") from error

    def restore(self, state: NamedState, coordinator: SiteCoordinator | None) -> int:
        """Load the state; called on every rank.

        Args:
            state: knows where the tensors go.
            coordinator: the coordinator of the site, on rank 0.

        Returns:
            The step.

        Raises:
            CheckpointError: It is of another run.
        """
        state.check(self.facts, Path("the state given to load_state_dict()"))
        ranks = int(self.facts["ranks"])
        wanted = state.wanted({name: _About(one) for name, one in self.tensors.items()}, ranks)
        for name, target in wanted.items():
            _fill(target, self.tensors[name])
        state.put(wanted, coordinator, ranks)
        return int(self.facts["step"])


class _About:
    """What a checkpoint's metadata say of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.size, self.properties = tensor.shape, self
        self.dtype = tensor.dtype


@torch.no_grad()
def _fill(target: Any, whole: Tensor) -> None:
    if hasattr(target, "stored"):
        target.stored.copy_(
            gather(
                whole, Intervals.whole(whole.numel()), target.held, torch.empty(target.held.numel, dtype=torch.float32)
            )
        )
    elif is_sharded(target):
        from torch.distributed.tensor import distribute_tensor

        made = distribute_tensor(whole.to(target.device), target.device_mesh, target.placements)
        target.to_local().copy_(made.to_local())
    else:
        target.copy_(whole)


def _whole_vector(own: Any, group: SiteGroup) -> Tensor:
    """A vector of the index space from what each rank stores of it."""
    whole = torch.zeros(own.shape[0], dtype=torch.float32)
    bounds = torch.tensor([bound for span in own.held.spans for bound in span], dtype=torch.int64)
    spans = group.exchange(bounds.view(torch.uint8))
    values = group.exchange(own.stored.detach().contiguous().view(torch.uint8))
    for span, value in zip(spans, values, strict=True):
        flat, place = value.clone().view(torch.float32), 0
        places = span.clone().view(torch.int64).tolist()
        for start, stop in zip(places[::2], places[1::2], strict=True):
            whole[start:stop] = flat[place : place + stop - start]
            place += stop - start
    return whole


def _first_here(plain: Mapping[str, Any], group: SiteGroup) -> dict[str, Tensor]:
    """Those tensors that no rank before this one has, too."""
    names = [json.loads(bytes(one.numpy())) for one in group.exchange(_to_tensor(json.dumps(sorted(plain)).encode()))]
    before = {name for others in names[: group.rank] for name in others}
    return {name: one.detach().cpu().contiguous().clone() for name, one in plain.items() if name not in before}


def _to_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
