"""The first global model of a run: which site sends it, and how all server processes begin to serve it.

The first site that is admitted sends its weights, each rank to the processes that serve what it holds. When all
processes have all of their elements, they write them to their disks, and only then does the coordinator begin. What
sites say before that waits.
"""

from __future__ import annotations

import math
import time

from weightgrad.core import pieces
from weightgrad.core.optimizers.spec import OptimizerSpec
from weightgrad.runtime.admission_messages import ServedBy
from weightgrad.runtime.run_config import RunConfig
from weightgrad.runtime.server.admission import Admission
from weightgrad.runtime.server.group import ServerGroup
from weightgrad.runtime.server.orders import Begin, Initialized, Start, to_bytes
from weightgrad.runtime.server.process import ServerProcess
from weightgrad.wire.messages import Join, Waiting


class FirstModel:
    """What is known of the first global model before there is one.

    Args:
        run_config: what is trained.
        admission: who sends it, and which layout it has.
        process: this process, which is process 0.
        group: all processes.
    """

    def __init__(self, run_config: RunConfig, admission: Admission, process: ServerProcess, group: ServerGroup) -> None:
        self._run_config, self._admission, self._process, self._group = run_config, admission, process, group
        self._parts: dict[int, Initialized] = {}
        self._started: set[int] = set()
        self._joins: dict[str, Join] = {}
        self._heard_at = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since anything of it came."""
        return time.monotonic() - self._heard_at

    def heard(self) -> None:
        """Something of it has come."""
        self._heard_at = time.monotonic()

    def waiting(self) -> Waiting | None:
        """For whom all others wait; None if nobody is to send it yet, or it is here."""
        sender = self._admission.initializer
        if sender is None or self.is_here:
            return None
        return Waiting(round=0, seconds=int(self.silent_s), missing={sender: 0})

    def expect(self) -> None:
        """A site was admitted that will send the first weights."""
        admission = self._admission
        assert admission.layout is not None
        assert admission.initializer is not None
        strategy = self._run_config.strategy_for(admission.layout.numel, admission.optimizer)
        shared = strategy.shares == "gradients" and admission.optimizer is not None
        spec = OptimizerSpec.parse(admission.optimizer, build=False) if shared and admission.optimizer else None
        whole_tensors = strategy.whole_tensors or (spec is not None and spec.needs_whole_tensors)
        served = pieces.divide(admission.layout, self._group.size, whole_tensors=whole_tensors)
        admission.servers = [
            ServedBy(one.address, list(own.spans)) for one, own in zip(admission.servers, served, strict=True)
        ]
        self._parts, self._started = {}, set()
        self.heard()
        layout = [(slot.name, list(slot.shape)) for slot in admission.layout.slots]
        for process, own in enumerate(served):
            begin = Begin(
                layout=layout,
                served=list(own.spans),
                optimizer=admission.optimizer,
                sender=admission.initializer,
            )
            if process:
                self._group.send(process, to_bytes(begin))
            else:
                self._process.prepare(begin)

    def arrived(self, note: Initialized) -> None:
        """A process has all of its elements; when all have, the others are told to write them to their disks."""
        self._parts[note.process] = note
        if self.is_here:
            for process in range(1, self._group.size):
                self._group.send(process, to_bytes(Start()))

    def started(self, process: int) -> None:
        """Another process has its elements on its disk."""
        self._started.add(process)

    @property
    def is_here(self) -> bool:
        """Whether all processes have all of their elements."""
        return len(self._parts) == self._group.size

    @property
    def complete(self) -> bool:
        """Whether, besides, all other processes have them on their disks."""
        return self.is_here and len(self._started) == self._group.size - 1

    @property
    def digest(self) -> int:
        """The digest of the whole model."""
        return sum(part.digest for part in self._parts.values()) % 2**64

    @property
    def norm(self) -> float:
        """The norm of the whole model."""
        return math.sqrt(sum(part.squares for part in self._parts.values()))

    def join(self, join: Join) -> None:
        """A site asks to join before there is a model."""
        self._joins[join.site] = join

    def take_joins(self) -> list[Join]:
        """The sites that asked to join, and are to be answered now."""
        joins, self._joins = self._joins, {}
        return list(joins.values())
