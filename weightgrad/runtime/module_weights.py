"""The parameters of a user's module as elements of the index space: which of them this rank has, and access to them.

A parameter is one of three kinds:

- plain: every rank that has the module has all of it (a single GPU, DDP);
- sharded by rows: a DTensor whose local part is a stretch of rows (FSDP2, HSDP, tensor parallelism over dimension 0);
- sharded otherwise: a DTensor cut by columns, or in another way. When a round takes or gives weights it is
  redistributed to rows by `DTensor.redistribute`, which all ranks of its mesh do together. Steps between rounds do not
  touch it.

Frozen parameters take no part. Parameters stay where they are, in their own dtype and on their own device; nothing is
copied but the piece that a round works on.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from weightgrad.codecs import unpack_entries
from weightgrad.core.layout import Layout
from weightgrad.errors import StrategyError
from weightgrad.kernels import fixed, select
from weightgrad.runtime.device_copies import DeviceCopies, Download
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.wire.intervals import Intervals, Span
from weightgrad.wire.messages import Segment

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


class Stretch(NamedTuple):
    """Neighbouring elements of one parameter within some intervals: its number, where they lie in both, how many."""

    parameter: int
    place: int
    offset: int
    size: int


@dataclass(frozen=True)
class NamedParameter:
    """A trainable parameter and its name in the run."""

    name: str
    parameter: nn.Parameter

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all of it, however it is sharded."""
        return tuple(self.parameter.shape)

    def rows(self) -> Span | None:
        """The elements that this rank has, within the parameter, if they are a stretch of rows; else None."""
        if not is_sharded(self.parameter):
            return (0, math.prod(self.shape))
        chunks = self.parameter.__create_chunk_list__()  # type: ignore[no-untyped-call]
        if not chunks:
            return (0, 0)
        (chunk, *others), width = chunks, math.prod(self.shape[1:])
        sizes, offsets = tuple(chunk.sizes), tuple(chunk.offsets)
        if others or math.prod(sizes) != self.parameter.to_local().numel():
            return None
        if 0 in sizes:
            return (0, 0)
        if sizes[1:] != self.shape[1:] or any(offsets[1:]):
            return None
        return (offsets[0] * width, (offsets[0] + sizes[0]) * width)


def trainable(module: nn.Module, *, frozen: bool = False) -> list[NamedParameter]:
    """The parameters of a module that take part; tied ones once.

    Args:
        module: The user's model.
        frozen: Whether those that are frozen now take part, too.

    Raises:
        StrategyError: There is none, or one that is not dense and floating-point, or of 8 bits.
    """
    found = [NamedParameter(plain_name(name), p) for name, p in module.named_parameters() if frozen or p.requires_grad]
    if not found:
        raise StrategyError("the model has no parameter that is trained; prepare() it before freezing everything")
    for one in found:
        if not one.parameter.is_floating_point() or one.parameter.is_sparse:
            raise StrategyError(
                f"{one.name} is {one.parameter.dtype}; only dense floating-point parameters can be shared"
            )
        if one.parameter.dtype.itemsize == 1:
            raise StrategyError(
                f"{one.name} is {one.parameter.dtype}, in which updates would be lost and optimizers cannot step; keep "
                "parameters in bfloat16 or float32, and let the layers cast them"
            )
    return found


def plain_name(name: str) -> str:
    """The name without what wrappers add to it, so that a wrapped and a plain module are the same model."""
    for anywhere in ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(anywhere, "")
    return name.removeprefix("module.")


class ModuleWeights:
    """The weights of a module as a `LocalModel`.

    Args:
        parameters: The trainable parameters of this rank.
        layout: Where they lie in the index space; it may have more of them, on other ranks.
        held: The elements that this rank holds, of those it has; None: all that it has.
        source: What is read and written: the parameters, or their gradients.
        copies: How values cross between each device and the host; shared by all that work on the same parameters.
    """

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        layout: Layout,
        held: Intervals | None = None,
        *,
        source: Callable[[nn.Parameter], Tensor | None] | None = None,
        copies: dict[torch.device, DeviceCopies] | None = None,
    ) -> None:
        slots = {slot.name: slot for slot in layout.slots}
        self.parameters = sorted(parameters, key=lambda one: slots[one.name].start)
        self._source = source
        self._written: list[tuple[Stretch, Tensor]] = []
        self._rows: dict[int, Tensor] = {}  # of parameters that are sharded otherwise, while a round works on them
        spans: list[Span] = []
        for place, one in enumerate(self.parameters):
            start, rows = slots[one.name].start, one.rows()
            if rows is None:
                rows = self._row_span(place)
            spans.append((start + rows[0], start + rows[1]))
        self._spans = spans
        self.available = Intervals.of(spans)
        """The elements whose weights this rank has."""
        self.held = self.available if held is None else held
        self._stretches = lru_cache(maxsize=4096)(self._find_stretches)
        self._bounds = lru_cache(maxsize=4096)(_bounds)
        self.copies: dict[torch.device, DeviceCopies] = {} if copies is None else copies
        self._upcoming: list[Intervals] = []  # what will be read, the next one last
        self._coming: tuple[Intervals, Download] | None = None  # the next one, on its way from the device
        self._rooms: list[Any] | None = None  # where they arrive

    @property
    def device(self) -> torch.device:
        """Where the first parameter is."""
        return self.parameters[0].parameter.device

    # -- sharded otherwise ---------------------------------------------------------------------

    @property
    def redistributes(self) -> bool:
        """Whether some parameters must be redistributed to rows, which all ranks do together."""
        return any(one.rows() is None for one in self.parameters)

    def _row_span(self, place: int) -> Span:
        one = self.parameters[place]
        by_rows = _by_rows(one.parameter)
        found = NamedParameter(one.name, by_rows).rows()
        if found is None:
            raise StrategyError(
                f"{one.name} has the placements {by_rows.placements}, which cannot be made rows; shard it by rows or "
                "columns"
            )
        return found

    @property
    def redistributed(self) -> bool:
        """Whether `begin` has brought parameters into rows and `end` has not brought them back."""
        return bool(self._rows)

    def begin(self) -> None:
        """Before a round works on the weights, on all ranks: bring parameters that are sharded otherwise into rows."""
        for place, one in enumerate(self.parameters):
            tensor = one.parameter if self._source is None else self._source(one.parameter)
            if one.rows() is None and tensor is not None:
                self._rows[place] = _by_rows(tensor).to_local().detach().contiguous().clone()

    def end(self, *, changed: bool) -> None:
        """After a round, on all ranks: bring them back.

        Args:
            changed: Whether weights were written.
        """
        self._forget()
        rows, self._rows = self._rows, {}
        for place in sorted(rows) if changed else ():
            tensor = self._whole(place)
            assert tensor is not None
            _put_rows(tensor, rows[place])

    # -- LocalModel ----------------------------------------------------------------------------

    @property
    def exact(self) -> bool:
        """Whether all weights are float32 on the CPU."""
        return all(one.parameter.dtype == torch.float32 for one in self.parameters)

    def expect(self, upcoming: Sequence[Intervals]) -> None:
        """Let what will be read next come from its device meanwhile, one after the other."""
        self._forget()
        if self.device.type != "cpu":
            self._upcoming = list(reversed(upcoming))
            self._fetch()

    def _fetch(self) -> None:
        """Start to copy what will be read next, if it is on one device."""
        while self._upcoming:
            intervals = self._upcoming.pop()
            parts = [self._part(stretch) for stretch in self._stretches(intervals)]
            found = [part for part in parts if part is not None]
            if found and len(found) == len(parts) and {part.device for part in found} == {self.device}:
                copies = self.copies_of(self.device)
                self._rooms = copies.rooms() if self._rooms is None else self._rooms
                self._coming = (intervals, copies.download(found, self._rooms))
                return

    def parts(self, intervals: Intervals) -> list[Tensor]:
        """The parts of the parameters that some intervals consist of, where they are and in their dtypes."""
        found = [self._part(stretch) for stretch in self._stretches(intervals)]
        return [part for part in found if part is not None]

    def _forget(self) -> None:
        """Expect nothing more; what is on its way is waited for, since parameters may change from now on."""
        self._upcoming = []
        if self._coming is not None:
            self._coming[1].wait()
            self._coming = None

    def copies_of(self, device: torch.device) -> DeviceCopies:
        """How values cross between a device and the host."""
        if device not in self.copies:
            self.copies[device] = DeviceCopies(device)
        return self.copies[device]

    def read(self, intervals: Intervals, out: Tensor) -> Tensor:
        """The weights.

        A view if they are float32 in one parameter where `out` is; if they were expected, memory that the read after
        the next one uses again; else copies in `out`, which may be on the device of the parameters.
        """
        stretches = self._stretches(intervals)
        if self._coming is not None and self._coming[0] == intervals:
            return self._arrived(stretches, out)
        if len(stretches) == 1 and stretches[0].size == intervals.numel:
            own = self._part(stretches[0])
            if own is not None and own.dtype == torch.float32 and own.device == out.device:
                return own
        out = out[: intervals.numel]
        crossing: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        for stretch in stretches:
            own = self._part(stretch)
            target = out[stretch.offset : stretch.offset + stretch.size]
            if own is None:
                target.zero_()
            elif own.device == target.device:
                target.copy_(own)
            else:
                sources, targets = crossing.setdefault(own.device, ([], []))
                sources.append(own)
                targets.append(target)
        for device, (sources, targets) in crossing.items():
            self.copies_of(device).read(sources, targets)
        return out

    def _arrived(self, stretches: tuple[Stretch, ...], out: Tensor) -> Tensor:
        """What was expected, while the next comes."""
        assert self._coming is not None
        parts = self._coming[1].wait()
        self._coming = None
        self._fetch()
        if len(parts) == 1 and parts[0].dtype == torch.float32:
            return parts[0]
        for stretch, part in zip(stretches, parts, strict=True):
            out[stretch.offset : stretch.offset + stretch.size].copy_(part)
        return out[: sum(part.numel() for part in parts)]

    def views(self, intervals: Intervals) -> list[tuple[int, Tensor]] | None:
        """The parameters' own memory; None unless they are contiguous float32 on the CPU."""
        found: list[tuple[int, Tensor]] = []
        for stretch in self._stretches(intervals):
            whole = self._rows.get(stretch.parameter)
            whole = self._whole(stretch.parameter) if whole is None else whole
            local = None if whole is None else local_part(whole)
            if local is None or local.dtype != torch.float32 or local.device.type != "cpu" or not local.is_contiguous():
                return None
            found.append((stretch.offset, local.view(-1)[stretch.place : stretch.place + stretch.size]))
        return found

    def sample(self, interval: Intervals, distance: int) -> Tensor:
        """The weights at equal distances in one parameter, on its device."""
        (stretch,) = self._stretches(interval)
        count = -(-stretch.size // distance)
        if stretch.parameter not in self._rows and self.parameters[stretch.parameter].rows() is None:
            whole = self._whole(stretch.parameter)  # its columns are as good a sample as its rows
            own = None if whole is None else local_part(whole).reshape(-1)
        else:
            own = self._part(stretch)
        if own is None:
            return torch.zeros(count)
        found = torch.zeros(count, device=own.device)
        values = own[::distance][:count]
        found[: values.numel()] = values
        return found

    @torch.no_grad()
    def write(self, intervals: Intervals, values: Tensor) -> None:
        """Copy values into the parameters."""
        self._forget()
        for device, (targets, sources) in self._pairs(intervals, values).items():
            if device == values.device:
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source) if target.data_ptr() != source.data_ptr() else None
            else:
                self.copies_of(device).store(targets, sources)
        self._put_back()

    @torch.no_grad()
    def add(self, intervals: Intervals, values: Tensor) -> None:
        """Add values to the parameters."""
        self._forget()
        for device, (targets, sources) in self._pairs(intervals, values).items():
            if device == values.device:
                for target, source in zip(targets, sources, strict=True):
                    target += source
            else:
                self.copies_of(device).add(targets, sources)
        self._put_back()

    def _pairs(self, intervals: Intervals, values: Tensor) -> dict[torch.device, tuple[list[Tensor], list[Tensor]]]:
        """Parts of the parameters and the values that belong to them, by device."""
        found: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        for stretch in self._stretches(intervals):
            own = self._part(stretch)
            if own is not None:
                targets, sources = found.setdefault(own.device, ([], []))
                targets.append(own)
                self._written.append((stretch, own))
                sources.append(values[stretch.offset : stretch.offset + stretch.size])
        return found

    @torch.no_grad()
    def add_segment(self, segment: Segment, mode: int, *, share: float = 1.0) -> None:
        """Add a share of what a segment decodes to; of a sparse one only its entries are touched."""
        self._forget()
        if segment.payload.codec != "sparse":
            here = segment.intervals & self.available
            decoded = torch.zeros(here.numel, device=segment.payload.body.device)
            segment.into(decoded, mode, here, share=share)
            self.add(here, decoded)
            return
        indices, values = unpack_entries(segment.payload)
        if share != 1:
            values.mul_(share)
        if mode == fixed.SUBTRACT:
            values.neg_()
        stretches = self._stretches(segment.intervals)
        bounds = _below(indices, self._bounds(stretches), segment.payload.numel)
        for stretch, first, last in zip(stretches, bounds[::2], bounds[1::2], strict=True):
            own = self._part(stretch)
            if own is None or last == first:
                continue
            self._written.append((stretch, own))
            places = indices[first:last]
            if own.device != places.device:
                self.copies_of(own.device).add_entries(own, places - stretch.offset, values[first:last])
            elif own.dtype == torch.float32 and own.device.type == "cpu":
                select.scatter(places, values[first:last], own, fixed.ADD, first=stretch.offset)
            else:
                own.index_add_(0, places - stretch.offset, values[first:last].to(own.dtype))
        self._put_back()

    def round_(self, values: Tensor, intervals: Intervals) -> Tensor:
        """Round values as the parameters would."""
        for stretch in self._stretches(intervals):
            dtype = self.parameters[stretch.parameter].parameter.dtype
            if dtype != torch.float32:
                own = values[stretch.offset : stretch.offset + stretch.size]
                own.copy_(own.to(dtype))
        return values

    # -- where elements lie --------------------------------------------------------------------

    def _find_stretches(self, intervals: Intervals) -> tuple[Stretch, ...]:
        """The parts of the parameters that some intervals consist of, in ascending order."""
        found: list[Stretch] = []
        offset, place = 0, 0
        for start, stop in intervals.spans:
            while place < len(self._spans) and self._spans[place][1] <= start:
                place += 1
            at = place
            while at < len(self._spans) and self._spans[at][0] < stop:
                first, last = max(start, self._spans[at][0]), min(stop, self._spans[at][1])
                if first < last:
                    found.append(Stretch(at, first - self._spans[at][0], offset + first - start, last - first))
                at += 1
            offset += stop - start
        return tuple(found)

    def _whole(self, place: int) -> Tensor | None:
        parameter = self.parameters[place].parameter
        return parameter if self._source is None else self._source(parameter)

    def _part(self, stretch: Stretch) -> Tensor | None:
        """The elements of a stretch, flat; None where there is no gradient.

        They are in the parameter's own memory, or copies if that has another order, as channels_last has: whoever
        writes to them notes it in `_written`, and calls `_put_back`.
        """
        if stretch.parameter in self._rows:
            flat = self._rows[stretch.parameter].view(-1)
        else:
            tensor = self._whole(stretch.parameter)
            if tensor is None:
                return None
            flat = local_part(tensor).reshape(-1)
        return flat[stretch.place : stretch.place + stretch.size]

    def _put_back(self) -> None:
        """Write what `_part` had to copy, and somebody has written to, into the parameters."""
        written, self._written = self._written, []
        for stretch, own in written:
            tensor = None if stretch.parameter in self._rows else self._whole(stretch.parameter)
            if tensor is not None and not (local := local_part(tensor)).is_contiguous():
                flat = local.reshape(-1)
                flat[stretch.place : stretch.place + stretch.size] = own
                local.copy_(flat.view(local.shape))


def _bounds(stretches: tuple[Stretch, ...]) -> Tensor:
    """Where each stretch begins and ends within its intervals."""
    return torch.tensor([at for one in stretches for at in (one.offset, one.offset + one.size)], dtype=torch.int64)


def _below(indices: Tensor, edges: Tensor, numel: int) -> list[int]:
    """How many of some ascending indices below `numel` are below each edge; asks a device only if it must."""
    if edges.tolist() == [0, numel]:
        return [0, indices.numel()]
    found: list[int] = torch.searchsorted(indices, edges.to(indices.device)).cpu().tolist()
    return found


def gradients_of(weights: ModuleWeights, layout: Layout) -> ModuleWeights:
    """The gradients of the same parameters; a parameter without a gradient counts as zero."""
    return ModuleWeights(
        weights.parameters, layout, weights.held, source=lambda parameter: parameter.grad, copies=weights.copies
    )


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, in its own memory."""
    return (tensor.to_local() if is_sharded(tensor) else tensor).detach()


def flat_local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, as one dimension, in its own memory.

    Raises:
        StrategyError: Its memory is not contiguous, so that it has no such view.
    """
    local = local_part(tensor)
    if not local.is_contiguous():
        raise StrategyError(
            f"a parameter of shape {list(local.shape)} with strides {local.stride()} is not contiguous; make it so "
            "with p.data = p.data.contiguous() before prepare()"
        )
    return local.view(-1)


def is_sharded(tensor: Tensor) -> TypeIs[DTensor]:
    """Whether it is a DTensor. Without their module, which takes a second to import, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _row_placements(tensor: DTensor) -> tuple[Any, ...]:
    """Placements that shard by rows over every dimension of the mesh over which the tensor is sharded at all."""
    from torch.distributed.tensor import Replicate, Shard

    return tuple(Replicate() if isinstance(one, Replicate) else Shard(0) for one in tensor.placements)


def _by_rows(tensor: Any) -> Any:
    return tensor.redistribute(placements=_row_placements(tensor))


@torch.no_grad()
def _put_rows(tensor: Any, rows: Tensor) -> None:
    """Write rows back into a tensor that is sharded otherwise."""
    from torch.distributed.tensor import DTensor

    made = DTensor.from_local(
        rows,
        tensor.device_mesh,
        _row_placements(tensor),
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    tensor.to_local().copy_(made.redistribute(placements=tensor.placements).to_local())


def layout_of(parameters: Sequence[NamedParameter]) -> Layout:
    """The index space of parameters in their order."""
    return Layout.of_shapes((one.name, one.shape) for one in parameters)


def all_stages(own: Layout, group: SiteGroup) -> Layout:
    """The index space of a model that is cut by layers: the parameters of all ranks, rank after rank.

    Raises:
        StrategyError: Two ranks have parameters of one name.
    """
    mine = json.dumps([[slot.name, list(slot.shape)] for slot in own.slots]).encode()
    blobs = group.exchange(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    everything = [(name, tuple(shape)) for blob in blobs for name, shape in json.loads(bytes(blob.numpy()))]
    names = [name for name, _ in everything]
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise StrategyError(
            f"two stages have a parameter {twice}; let every stage keep the names of the whole model, for instance by "
            "setting the layers of other stages to None, so that sites that are cut differently can train together"
        )
    return Layout.of_shapes(everything)
