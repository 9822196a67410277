"""The final model on disk, as Hugging Face reads it: safetensors files, and an index if there are several.

    model.safetensors                                          a small model
    model-00001-of-00003.safetensors, ..., model.safetensors.index.json
    master.safetensors, or master-...                          the global model, where the model above is quantized

`model` is what the strategy is judged by: the global model, or quantized weights, and the buffers of the module beside
them, so that `load_state_dict` finds everything. The metadata `order` lists the tensors of a file as the module has
them, `buffers` those that are buffers, and `weights` is "global_model" or "quantized".

Every tensor is whole in one file. Process 0 of the server writes the files, one at a time, and is sent the tensors that
other processes serve; it never has more than one file of the model in memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from weightgrad.core.layout import Layout, Slot
from weightgrad.core.local_model import gather
from weightgrad.core.server.shard import ServerShard
from weightgrad.quantized.safetensors_file import save_file
from weightgrad.runtime.checkpoints.durable_files import cannot_write
from weightgrad.runtime.checkpoints.final_state import FinalState, values_of
from weightgrad.runtime.server.group import ServerGroup
from weightgrad.wire.intervals import Intervals

FILE_BYTES = 1 << 30
"""A file is closed when its tensors have so many bytes."""


def write_final_model(directory: Path, shard: ServerShard, group: ServerGroup, state: FinalState | None = None) -> None:
    """Write this process's tensors; called in every process of the server.

    Args:
        directory: where; made if it is not there.
        shard: what this process serves.
        group: the processes of the server.
        state: what the sites add, in process 0.

    Raises:
        CheckpointError: a file could not be written.
    """
    files = file_plan(shard.layout)
    served = group.gather_spans(list(shard.served.spans))
    owners = [Intervals.of((start, stop) for start, stop in spans) for spans in served]
    writer = _ModelWriter(directory, files, state or FinalState())
    for number, slots in enumerate(files):
        tensors: dict[str, Tensor] = {}
        for slot in slots:
            tensor = _collect(slot, shard, group, owners)
            if tensor is not None:
                tensors[slot.name] = tensor
        if group.number == 0:
            writer.write(number, tensors)
    if group.number == 0 and len(files) > 1:
        writer.write_index(4 * shard.layout.numel)


def write_whole_model(directory: Path, layout: Layout, global_model: Tensor, state: FinalState) -> None:
    """Write a model that is one flat vector in this process.

    Args:
        directory: where; made if it is not there.
        layout: where the tensors lie in the vector.
        global_model: the vector.
        state: quantized weights and buffers.

    Raises:
        CheckpointError: a file could not be written.
    """
    files = file_plan(layout)
    writer = _ModelWriter(directory, files, state)
    for number, slots in enumerate(files):
        writer.write(number, {slot.name: slot.of(global_model).clone() for slot in slots})
    if len(files) > 1:
        writer.write_index(4 * layout.numel)


class _ModelWriter:
    """Writes the files of a model, and of its master weights where the model is quantized."""

    def __init__(self, directory: Path, files: Sequence[Sequence[Slot]], state: FinalState) -> None:
        self._directory, self._files, self._state = directory, files, state

    @property
    def _stems(self) -> tuple[str, ...]:
        return ("model",) if self._state.quantized is None else ("master", "model")

    def _buffers(self, number: int) -> Mapping[str, Tensor]:
        """Buffers are in the last file."""
        return self._state.buffers if number == len(self._files) - 1 else {}

    def write(self, number: int, tensors: dict[str, Tensor]) -> None:
        """Write a file with these tensors of the global model."""
        for stem in self._stems:
            buffers, weights = self._buffers(number), "global_model"
            if (whole := self._state.weights) is not None:
                tensors |= {name: values_of(whole[name]).clone() for name in tensors if name in whole}
            if stem == "model" and self._state.quantized is not None:
                weights = "quantized"
                own = self._state.quantized
                tensors |= {name: values_of(own[name]).clone() for name in tensors if name in own}
            metadata = {
                "format": "pt",
                "weights": weights,
                "order": json.dumps([*tensors, *buffers]),
                "buffers": json.dumps(list(buffers)),
            }
            _save(self._directory / _name(stem, number, len(self._files)), {**tensors, **buffers}, metadata)

    def write_index(self, weight_bytes: int) -> None:
        """Write which tensor is in which file."""
        count = len(self._files)
        size = weight_bytes + sum(buffer.nbytes for buffer in self._state.buffers.values())
        for stem in self._stems:
            names = {
                name: _name(stem, number, count)
                for number, slots in enumerate(self._files)
                for name in (*(slot.name for slot in slots), *self._buffers(number))
            }
            index = {"metadata": {"total_size": size}, "weight_map": names}
            _write_index(self._directory / f"{stem}.safetensors.index.json", index)


def file_plan(layout: Layout) -> list[list[Slot]]:
    """Which tensors are in which file."""
    files: list[list[Slot]] = [[]]
    size = 0
    for slot in layout.slots:
        if files[-1] and size + 4 * slot.numel > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(slot)
        size += 4 * slot.numel
    return files


def _name(stem: str, number: int, count: int) -> str:
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors"


def _collect(slot: Slot, shard: ServerShard, group: ServerGroup, owners: Sequence[Intervals]) -> Tensor | None:
    """A whole tensor, in the process that writes its file; None elsewhere."""
    whole = Intervals(((slot.start, slot.stop),) if slot.numel else ())
    own = whole & shard.served
    mine = (
        gather(shard.global_model.vector, shard.served, own, torch.empty(own.numel, dtype=torch.float32))
        if own
        else torch.empty(0, dtype=torch.float32)
    )
    if group.size == 1:
        return mine.view(slot.shape).clone()
    if group.number != 0:
        if own:
            group.send_tensor(0, mine.contiguous())
        return None
    found = torch.empty(slot.numel, dtype=torch.float32)
    for process, served in enumerate(owners):
        part = whole & served
        if part:
            values = mine if process == 0 else group.receive_tensor(process, part.numel)
            for run in whole.runs(part):
                found[run.mine : run.mine + run.count] = values[run.theirs : run.theirs + run.count]
    return found.view(slot.shape)


def _write_index(target: Path, index: dict[str, Any]) -> None:
    text = json.dumps(index, indent=1, sort_keys=True) + "\n"
    try:
        target.write_text(text)
    except OSError as error:
        raise cannot_write(target, error, len(text)) from error


def _save(target: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, target, metadata)
    except (OSError, SafetensorError) as error:
        raise cannot_write(target, error, sum(tensor.nbytes for tensor in tensors.values())) from error
