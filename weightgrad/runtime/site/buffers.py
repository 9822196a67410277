"""The buffers of a site's module between sites: the running statistics of batch norm, counters, moving averages.

In training mode batch norm does not read its statistics, so weights do not depend on them; evaluation does, and without
an exchange the same weights are as good as the statistics of the site that evaluates. So buffers ride on pushes, and a
result that carries the mean of all sites replaces them.

A result may come some passes after the push that it contains. A running statistic r moves by r <- (1 - m) r + m x in
each pass, and a pass more or less only scales what was sent: after n passes (1 - m)^n of it is left. So

    r <- r + (1 - m)^n (mean - sent)

is what the site would have had if it had gone on from the mean: a variance stays positive. Other buffers are replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weightgrad.core.shared_buffers import MOST_BYTES, finite
from weightgrad.runtime.checkpoints.final_state import all_buffers, persistent_buffers
from weightgrad.runtime.model.sharded_tensor import is_sharded
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.units import show_bytes
from weightgrad.wire import snapshot_bytes

log = logging.getLogger("weightgrad")


@dataclass(frozen=True)
class _Sent:
    """What rode on a push, and the batches that each module with running statistics had seen."""

    round: int
    buffers: Mapping[str, Tensor]
    batches: Mapping[nn.Module, int]


class SiteBuffers:
    """The buffers of one rank's module that all sites have in common.

    Args:
        module: The user's module.
        group: The ranks of the site.
        averages: Whether the ranks average floating-point buffers.
        stages: Whether every rank has a part of the model.
        shared: Whether buffers travel between sites.
    """

    def __init__(self, module: nn.Module, group: SiteGroup, *, averages: bool, stages: bool, shared: bool) -> None:
        self._module, self._group, self._stages = module, group, stages
        self._averages = averages and group.size > 1
        self._sent: _Sent | None = None
        self._new = True  # whether nothing has been sent yet: then there is nothing of this site in what comes
        self._given = False  # whether they came from the server since `average` was last called
        found = self._values() if shared else {}
        self.nbytes = snapshot_bytes.nbytes(found) if found else 0
        """The bytes that ride on a push; 0 if none do."""
        if self.nbytes > MOST_BYTES:
            if group.first:
                log.warning(
                    "%s of buffers are too much to travel with rounds, which take %s: they stay at each site until it "
                    "leaves",
                    show_bytes(self.nbytes),
                    show_bytes(MOST_BYTES),
                )
            self.nbytes = 0

    def _values(self) -> dict[str, Tensor]:
        """Copies of what travels, of all ranks if they have parts of the model; called on every rank."""
        found = all_buffers(self._module, self._group, stages=self._stages)
        return {name: _travelling(one) for name, one in found.items() if _travels(one)}

    def average(self) -> None:
        """Average floating-point buffers over the ranks, unless the server's mean has just come; on every rank."""
        given, self._given = self._given, False
        for buffer in self._module.buffers() if self._averages and not given else ():
            if buffer.is_floating_point():
                buffer.copy_(self._group.mean(buffer.float().flatten()).view(buffer.shape))

    def gather(self, round_: int) -> Mapping[str, Tensor]:
        """What rides on the push of a round; called on every rank."""
        self._given = False
        self.average()
        batches = {one: int(one.num_batches_tracked) for one in _norms(self._module)}  # type: ignore[arg-type]
        self._new = False
        self._sent = _Sent(round_, self._values(), batches)
        return self._sent.buffers

    @property
    def sent_round(self) -> int:
        """The round of the last push on which buffers rode; -1 if none has."""
        return -1 if self._sent is None else self._sent.round

    @torch.no_grad()
    def take(self, mean: Mapping[str, Tensor], through: int | None) -> None:
        """Take the buffers of all sites.

        Args:
            mean: The buffers.
            through: The last round whose push of this site is in them; None if they come with a whole global model.
        """
        sent, waits = self._sent, through is not None and not self._new
        if not self.nbytes or (waits and (sent is None or sent.round > (through or 0))):
            return  # the next result has them, and what this site has sent since
        self._sent, self._given = None, True
        left = {} if sent is None or through is None else _left(sent)
        variances = {id(one.running_var) for one in self._module.modules() if hasattr(one, "running_var")}
        for name, buffer in persistent_buffers(self._module).items():
            new, old = mean.get(name), None if sent is None else sent.buffers.get(name)
            if new is None or new.shape != buffer.shape or not _travels(buffer):
                continue
            if id(buffer) in variances and bool((new < 0).any()):
                continue  # another site has sent what no variance is: evaluation would be NaN
            if not buffer.is_floating_point():
                buffer.copy_(torch.maximum(buffer, new.to(buffer.device, buffer.dtype)))
            elif old is None or id(buffer) not in left or torch.equal(_travelling(buffer), old):
                buffer.copy_(new)
            else:
                buffer += (left[id(buffer)] * (new - old)).to(buffer.device, buffer.dtype)


def _travels(buffer: Tensor) -> bool:
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int16, torch.int32, torch.int64)
    return not is_sharded(buffer) and buffer.dtype in kinds and finite(buffer)


def _travelling(buffer: Tensor) -> Tensor:
    """A copy in a type that travels."""
    if buffer.is_floating_point():
        return buffer.detach().to("cpu", torch.float64 if buffer.dtype == torch.float64 else torch.float32, copy=True)
    return buffer.detach().to("cpu", torch.int64, copy=True)


def _norms(module: nn.Module) -> list[nn.Module]:
    """The modules with running statistics that count the batches that they have seen."""
    return [
        one
        for one in module.modules()
        if isinstance(getattr(one, "num_batches_tracked", None), Tensor) and hasattr(one, "momentum")
    ]


def _left(sent: _Sent) -> dict[int, float]:
    """How much of what was sent is left in a running statistic, by the identity of its buffer."""
    found: dict[int, float] = {}
    for norm, before in sent.batches.items():
        now, momentum = int(norm.num_batches_tracked), norm.momentum  # type: ignore[arg-type]
        passes = max(0, now - before)  # a counter that another site has made huge may overflow
        share = min(1.0, before / max(now, 1)) if momentum is None else (1 - float(momentum)) ** passes  # type: ignore[arg-type]
        for name in ("running_mean", "running_var"):
            found[id(getattr(norm, name, None))] = share
    return found
