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

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from weightgrad.core.layout import Layout
from weightgrad.errors import StrategyError
from weightgrad.kernels import fixed
from weightgrad.runtime.model.device_copies import DeviceCopies
from weightgrad.runtime.model.expected_reads import ExpectedReads
from weightgrad.runtime.model.named_parameter import NamedParameter
from weightgrad.runtime.model.parameter_stretches import ParameterStretches, Stretch
from weightgrad.runtime.model.sharded_tensor import by_rows, local_part, put_rows
from weightgrad.wire.intervals import Intervals, Span
from weightgrad.wire.messages import Segment


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
        self.available = Intervals.of(spans)
        """The elements whose weights this rank has."""
        self.held = self.available if held is None else held
        self._stretches = ParameterStretches(spans)
        self.copies: dict[torch.device, DeviceCopies] = {} if copies is None else copies
        self._expected = ExpectedReads(lambda: self.copies_of(self.device), self._parts_on_device)

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
        in_rows = by_rows(one.parameter)
        found = NamedParameter(one.name, in_rows).rows()
        if found is None:
            raise StrategyError(
                f"{one.name} has the placements {in_rows.placements}, which cannot be made rows; shard it by rows or "
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
                self._rows[place] = by_rows(tensor).to_local().detach().contiguous().clone()

    def end(self, *, changed: bool) -> None:
        """After a round, on all ranks: bring them back.

        Args:
            changed: Whether weights were written.
        """
        self._expected.forget()
        rows, self._rows = self._rows, {}
        for place in sorted(rows) if changed else ():
            tensor = self._whole(place)
            assert tensor is not None
            put_rows(tensor, rows[place])

    # -- LocalModel ----------------------------------------------------------------------------

    @property
    def exact(self) -> bool:
        """Whether all weights are float32 on the CPU."""
        return all(one.parameter.dtype == torch.float32 for one in self.parameters)

    def expect(self, upcoming: Sequence[Intervals]) -> None:
        """Let what will be read next come from its device meanwhile, one after the other."""
        self._expected.forget()
        if self.device.type != "cpu":
            self._expected.expect(upcoming)

    def _parts_on_device(self, intervals: Intervals) -> list[Tensor] | None:
        parts = [self._part(stretch) for stretch in self._stretches.of(intervals)]
        found = [part for part in parts if part is not None]
        whole = len(found) == len(parts) and {part.device for part in found} == {self.device}
        return found if whole else None

    def parts(self, intervals: Intervals) -> list[Tensor]:
        """The parts of the parameters that some intervals consist of, where they are and in their dtypes."""
        found = [self._part(stretch) for stretch in self._stretches.of(intervals)]
        return [part for part in found if part is not None]

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
        stretches = self._stretches.of(intervals)
        if (arrived := self._expected.take(intervals)) is not None:
            return _joined(arrived, stretches, out)
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
            elif _direct(own.device, target):
                target.copy_(own)
            else:
                sources, targets = crossing.setdefault(own.device, ([], []))
                sources.append(own)
                targets.append(target)
        for device, (sources, targets) in crossing.items():
            self.copies_of(device).read(sources, targets)
        return out

    def views(self, intervals: Intervals) -> list[tuple[int, Tensor]] | None:
        """The parameters' own memory; None unless they are contiguous float32 on the CPU."""
        found: list[tuple[int, Tensor]] = []
        for stretch in self._stretches.of(intervals):
            whole = self._rows.get(stretch.parameter)
            whole = self._whole(stretch.parameter) if whole is None else whole
            local = None if whole is None else local_part(whole)
            if local is None or local.dtype != torch.float32 or local.device.type != "cpu" or not local.is_contiguous():
                return None
            found.append((stretch.offset, local.view(-1)[stretch.place : stretch.place + stretch.size]))
        return found

    def sample(self, interval: Intervals, distance: int) -> Tensor:
        """The weights at equal distances in one parameter, on its device."""
        (stretch,) = self._stretches.of(interval)
        count = -(-stretch.size // distance)
        if stretch.parameter not in self._rows and self.parameters[stretch.parameter].rows() is None:
            whole = self._whole(stretch.parameter)  # its columns are as good a sample as its rows
            own = None if whole is None else local_part(whole).reshape(-1)
        else:
            own = self._part(stretch)
        if own is None:
            return torch.zeros(count, dtype=torch.float32)
        found = torch.zeros(count, device=own.device, dtype=torch.float32)
        values = own[::distance][:count]
        found[: values.numel()] = values
        return found

    @torch.no_grad()
    def write(self, intervals: Intervals, values: Tensor) -> None:
        """Copy values into the parameters."""
        self._expected.forget()
        for device, (targets, sources) in self._pairs(intervals, values).items():
            if _direct(device, values):
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source) if target.data_ptr() != source.data_ptr() else None
            else:
                self.copies_of(device).store(targets, sources)
        self._put_back()

    @torch.no_grad()
    def add(self, intervals: Intervals, values: Tensor) -> None:
        """Add values to the parameters."""
        self._expected.forget()
        for device, (targets, sources) in self._pairs(intervals, values).items():
            if _direct(device, values):
                for target, source in zip(targets, sources, strict=True):
                    target += source.to(device)
            else:
                self.copies_of(device).add(targets, sources)
        self._put_back()

    def _pairs(self, intervals: Intervals, values: Tensor) -> dict[torch.device, tuple[list[Tensor], list[Tensor]]]:
        """Parts of the parameters and the values that belong to them, by device."""
        found: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        for stretch in self._stretches.of(intervals):
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
        self._expected.forget()
        entries = segment.entries
        if entries is None:
            here = segment.intervals & self.available
            decoded = torch.zeros(here.numel, device=segment.payload.body.device, dtype=torch.float32)
            segment.into(decoded, mode, here, share=share)
            self.add(here, decoded)
            return
        stretches = self._stretches.of(segment.intervals)
        parts = [(stretch, own) for stretch in stretches if (own := self._part(stretch)) is not None]
        if all(own.dtype == torch.float32 and own.device == segment.payload.body.device for _, own in parts):
            self._written += parts
            entries.write([(stretch.offset, own) for stretch, own in parts], mode, share)
            self._put_back()
            return
        indices, values = entries.indices(), entries.values()
        if share != 1:
            values.mul_(share)
        if mode == fixed.SUBTRACT:
            values.neg_()
        bounds = self._stretches.entries(stretches, indices, segment.payload.numel)
        for stretch, (first, last) in zip(stretches, bounds, strict=True):
            own = self._part(stretch)
            if own is None or last == first:
                continue
            self._written.append((stretch, own))
            places = indices[first:last]
            if _direct(own.device, places):
                own_places = (places - stretch.offset).to(own.device)
                own.index_add_(0, own_places, values[first:last].to(own.device, own.dtype))
            else:
                self.copies_of(own.device).add_entries(own, places - stretch.offset, values[first:last])
        self._put_back()

    def round_(self, values: Tensor, intervals: Intervals) -> Tensor:
        """Round values as the parameters would."""
        for stretch in self._stretches.of(intervals):
            dtype = self.parameters[stretch.parameter].parameter.dtype
            if dtype != torch.float32:
                own = values[stretch.offset : stretch.offset + stretch.size]
                own.copy_(own.to(dtype))
        return values

    # -- where elements lie --------------------------------------------------------------------

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


def _direct(parameter: torch.device, values: Tensor) -> bool:
    """Whether values are copied as they are: on one device, or to or from parameters that were moved to the host."""
    return parameter == values.device or parameter.type == "cpu"


def _joined(parts: Sequence[Tensor], stretches: Sequence[Stretch], out: Tensor) -> Tensor:
    """Parts that have come from a device, as one tensor."""
    if len(parts) == 1 and parts[0].dtype == torch.float32:
        return parts[0]
    for stretch, part in zip(stretches, parts, strict=True):
        out[stretch.offset : stretch.offset + stretch.size].copy_(part)
    return out[: sum(part.numel() for part in parts)]
