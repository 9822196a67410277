"""What a site adds to the file of the final model, and what the server makes of it.

The global server knows neither buffers (running statistics of batch norm) nor the curvature by which a site quantizes
weights. So a site that leaves sends the server a file, its final state: the persistent buffers of its module and, where
the strategy is judged by quantized weights, the global model as the site quantizes it. The server keeps these files
beside the final model until it writes that one. Where only the sites can step with shared gradients, they send their
weights in it, too:

    buffers     those that travel with rounds, as they were last; of others as `core/shared_buffers.py` combines them
    weights     quantized by the first site, in the order of the run, that has seen the last version of the global model

A file that is damaged, or does not fit the model, is left out, and the log says so.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from weightgrad.codecs import Payload, decode
from weightgrad.core.layout import Layout
from weightgrad.core.shared_buffers import combined
from weightgrad.errors import CheckpointError, ModelFileError, ProtocolError
from weightgrad.quantized.packed_tensor import WEIGHTGRAD, PackedTensor
from weightgrad.quantized.quantized_file import QuantizedFile, to_tensors
from weightgrad.runtime.checkpoints.plain_file import open_plain
from weightgrad.runtime.model.named_parameter import plain_name
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.wire.messages import FinalPart

log = logging.getLogger("weightgrad.serve")

_PART_BYTES = 1 << 18
_MOST_BUFFER_BYTES = 1 << 30
_BUFFER, _WEIGHT = "buffer.", "weight."


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of a module that its `state_dict` has, by their names in a plain module."""
    kept = module.state_dict(keep_vars=True).keys()
    return {plain_name(name): buffer for name, buffer in module.named_buffers() if name in kept}


def all_buffers(module: nn.Module, group: SiteGroup, *, stages: bool) -> dict[str, Tensor]:
    """The persistent buffers of a site's module by their names in a plain module; called on every rank.

    Args:
        module: This rank's module.
        group: The ranks of the site.
        stages: Whether every rank has a part of the model, so that the buffers of all ranks are put together; otherwise
            they are this rank's.
    """
    own = persistent_buffers(module)
    found = {name: buffer.detach().to("cpu", copy=True).contiguous() for name, buffer in own.items()}
    if not stages:
        return found
    blobs = group.exchange(torch.frombuffer(bytearray(save(found)), dtype=torch.uint8))
    return {name: buffer for blob in blobs for name, buffer in load(blob.numpy().tobytes()).items()}


@dataclass(frozen=True, kw_only=True)
class SiteFinalState:
    """The final state of one site.

    Attributes:
        version: The version of the global model that was quantized.
        samples: How much the site's buffers weigh.
        buffers: Buffers by name.
        quantized: Quantized weights by name; those that stay exact are not among them.
    """

    version: int
    samples: int
    buffers: Mapping[str, Tensor]
    quantized: Mapping[str, PackedTensor | Tensor]

    @staticmethod
    def of(
        layout: Layout,
        payloads: Sequence[Payload] | None,
        buffers: Mapping[str, Tensor],
        *,
        version: int,
        samples: int,
    ) -> SiteFinalState:
        """The final state of a site with these buffers, which has encoded its weights as these payloads."""
        found: dict[str, PackedTensor | Tensor] = {}
        for slot, payload in zip(layout.slots, payloads, strict=True) if payloads is not None else ():
            if payload.codec != "fp32":
                packed = PackedTensor.of(_WEIGHT + slot.name, payload, WEIGHTGRAD)
                found[slot.name] = decode(payload) if packed is None else packed
        return SiteFinalState(version=version, samples=samples, buffers=buffers, quantized=found)

    def parts(self, site: str) -> list[FinalPart]:
        """The final state as messages."""
        packed = [one for one in self.quantized.values() if isinstance(one, PackedTensor)]
        whole = {_WEIGHT + name: one for name, one in self.quantized.items() if isinstance(one, Tensor)}
        whole |= {_BUFFER + name: buffer for name, buffer in self.buffers.items()}
        order = [*(one.name for one in packed), *whole]
        facts = {"version": str(self.version), "samples": str(self.samples), "order": json.dumps(order)}
        data = save(*to_tensors(packed=packed, halves={}, kept=whole, facts=facts))
        count = -(-len(data) // _PART_BYTES)
        return [
            FinalPart(site=site, place=place, parts=count, data=data[place * _PART_BYTES : (place + 1) * _PART_BYTES])
            for place in range(count)
        ]

    @staticmethod
    def read(path: Path, layout: Layout) -> SiteFinalState:
        """Read a final state that a site has sent.

        Raises:
            ModelFileError: It is damaged, or does not fit the model.
        """
        file = QuantizedFile(path)
        shapes = {slot.name: slot.shape for slot in layout.slots}
        buffers: dict[str, Tensor] = {}
        quantized: dict[str, PackedTensor | Tensor] = {}
        found: dict[str, PackedTensor | Tensor] = {**{one.name: one for one in file.packed}, **file.whole}
        for name, one in found.items():
            if name.startswith(_BUFFER) and name.removeprefix(_BUFFER) not in shapes and isinstance(one, Tensor):
                buffers[name.removeprefix(_BUFFER)] = one
                continue
            tensor, own = values_of(one), name.removeprefix(_WEIGHT)
            good = name.startswith(_WEIGHT) and tensor.dtype == torch.float32 and shapes.get(own) == tuple(tensor.shape)
            if not good or not bool(torch.isfinite(tensor).all()):
                raise ModelFileError(f"{path}: {name[:80]} is no tensor of this model, or is not finite")
            quantized[own] = one  # and not its values: all of them together would be the whole model
        return SiteFinalState(
            version=file.number("version"), samples=file.number("samples"), buffers=buffers, quantized=quantized
        )


def values_of(one: PackedTensor | Tensor) -> Tensor:
    """The values of a tensor that may be packed."""
    return one.decode() if isinstance(one, PackedTensor) else one


@dataclass(frozen=True, kw_only=True)
class FinalState:
    """What all sites together add to the final model.

    Attributes:
        buffers: Buffers by name.
        quantized: Quantized weights by name; None: the weights are those of the global model.
        weights: The global model by name, where only the sites have it; None: the server has it.
    """

    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    weights: Mapping[str, PackedTensor | Tensor] | None = None
    quantized: Mapping[str, PackedTensor | Tensor] | None = None


class FinalStates:
    """The final states that the sites of a run have sent, as files beside the final model.

    Args:
        directory: Where the final model will be; None keeps nothing.
        sites: The names of the sites in the order of the run; one that is added comes after them.
    """

    def __init__(self, directory: Path | None, sites: Sequence[str]) -> None:
        self._directory, self.sites = directory, tuple(sites)
        self._next: dict[str, int] = {}

    def _path(self, site: str) -> Path:
        assert self._directory is not None
        return self._directory / f"final-state-{self.sites.index(site)}.safetensors"

    def take(self, part: FinalPart, numel: int) -> None:
        """Keep a part. What a site has sent before is replaced when all parts are here.

        Args:
            part: The part.
            numel: The elements of the model, which bound what is kept.

        Raises:
            ProtocolError: The parts are out of order, or too many.
        """
        if self._directory is None:
            return
        if part.place and part.site not in self._next:
            return  # its first parts could not be kept, or it has begun before this server came
        if part.place and part.place != self._next[part.site]:  # part 0 begins anew
            raise ProtocolError(
                f"{part.site} sent part {part.place} of its final state, wanted {self._next.get(part.site, 0)}"
            )
        target = self._path(part.site)
        partial = target.with_suffix(".part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            how = os.O_TRUNC if part.place == 0 else os.O_APPEND
            with open(open_plain(partial, os.O_WRONLY | os.O_CREAT | how), "ab") as file:
                file.write(part.data)
                size = file.tell()
        except (OSError, CheckpointError) as error:
            log.error("the final state of %s cannot be kept: %s", part.site, error)
            self._next.pop(part.site, None)
            return
        if size > 4 * numel + _MOST_BUFFER_BYTES:
            partial.unlink(missing_ok=True)
            raise ProtocolError(f"{part.site} sends a final state larger than its model and 1 GiB of buffers")
        self._next[part.site] = part.place + 1
        if part.place + 1 == part.parts:
            partial.replace(target)

    def collect(
        self,
        layout: Layout,
        version: int,
        *,
        wanted: bool,
        elsewhere: bool = False,
        shared: Mapping[str, Tensor] | None = None,
    ) -> FinalState:
        """Put together what the sites have sent, and remove their files.

        Args:
            layout: Where the tensors of the model lie.
            version: The version of the final global model.
            wanted: Whether the strategy is judged by quantized weights.
            elsewhere: Whether only the sites have the global model.
            shared: Buffers that have travelled with rounds.
        """
        if self._directory is None:
            return FinalState()
        found: list[SiteFinalState] = []
        for site in self.sites:
            path = self._path(site)
            path.with_suffix(".part").unlink(missing_ok=True)
            if not path.is_file():
                continue
            try:
                found.append(SiteFinalState.read(path, layout))
            except ModelFileError as error:
                log.error("the final state of %s is left out: %s", site, error)
            path.unlink()
        quantized = next((one.quantized for one in found if one.quantized and one.version == version), None)
        if wanted and quantized is None:
            log.warning("no site has quantized version %d: the final model has the weights of full precision", version)
        buffers = combined([(one.samples, one.buffers) for one in found])
        for name, last in (shared or {}).items():
            if name in buffers and buffers[name].shape == last.shape:
                buffers[name] = last.to(buffers[name].dtype)
        known = [one for one in found if one.quantized and one.version <= version]  # of no version that is to come
        newest = max(known, key=lambda one: one.version, default=None)
        if elsewhere and newest is None:
            log.error("no site has sent the final model, and this server does not have it: the file has the first one")
        elif elsewhere and newest is not None and newest.version < version:
            log.warning("the final model is of version %d; that of version %d nobody sent", newest.version, version)
        weights = newest.quantized if elsewhere and newest is not None else None
        return FinalState(buffers=buffers, quantized=quantized if wanted else None, weights=weights)
