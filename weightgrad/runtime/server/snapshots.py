"""The state of the coordinator's process on its disk: what a snapshot has, and how a server goes on from one."""

from __future__ import annotations

import logging
from pathlib import Path

from weightgrad.runtime.admission_messages import ServedBy
from weightgrad.runtime.checkpoints.input_log import LogRecord
from weightgrad.runtime.server.admission import Admission
from weightgrad.runtime.server.inputs import ServerInputs
from weightgrad.runtime.server.process import ServerProcess
from weightgrad.runtime.server.replay import load, replay
from weightgrad.runtime.server.run_identity import RunIdentity
from weightgrad.runtime.telemetry import Telemetry

log = logging.getLogger("weightgrad.serve")


class ServerSnapshots:
    """Writes snapshots of a server, and restores it from the newest.

    Args:
        identity: what makes it the same run.
        admission: what is trained, and who serves it.
        process: this process, which is process 0.
        inputs: what takes the inputs of the log once more.
        telemetry: has the time, which goes on.
        state: the directory, for errors.
    """

    def __init__(
        self,
        identity: RunIdentity,
        admission: Admission,
        process: ServerProcess,
        inputs: ServerInputs,
        telemetry: Telemetry,
        state: Path | None,
    ) -> None:
        self._identity, self._admission, self._process = identity, admission, process
        self._inputs, self._telemetry, self._state = inputs, telemetry, state

    def write_if_due(self) -> None:
        """Write a snapshot beside the work if the log has grown long, and no round is being closed."""
        storage, rounds = self._process.storage, self._inputs.rounds
        if storage is not None and storage.due and rounds is not None and not rounds.closing:
            self.write(wait=False)

    def write(self, *, wait: bool) -> None:
        """Write a snapshot.

        Args:
            wait: whether to return only when it is on the disk.

        Raises:
            CheckpointError: it, or the one before, could not be written.
        """
        rounds, admission = self._inputs.rounds, self._admission
        assert rounds is not None
        coordinator = rounds.coordinator
        facts = {
            **self._identity.facts(admission.layout.numel if admission.layout is not None else 0),
            "first_digest": coordinator.first_digest,
            "first_norm": coordinator.first_norm,
            "optimizer": admission.optimizer,
            "servers": [[one.address, [list(span) for span in one.spans]] for one in admission.servers],
            "codec_bytes_s": coordinator.controller.codec_bytes_s if coordinator.controller is not None else None,
            "time": self._telemetry.now,
        }
        rounds.record_pending(self._telemetry.now)
        self._process.snapshot(coordinator.state(), facts, wait=wait, keep=rounds.pending)

    def restore(self) -> None:
        """Become what the disk says; nothing changes where the server has never had a state.

        Raises:
            CheckpointError: the state is damaged, or of another run.
        """
        if (found := load(self._process)) is None:
            return
        own = self._process.restore(found)
        assert self._process.serving is not None
        admission, layout = self._admission, self._process.serving.shard.layout
        admission.layout = layout
        self._identity.check(found.facts, layout.numel, self._state)
        admission.optimizer = found.facts["optimizer"]
        admission.initialized = True
        admission.servers = [
            ServedBy(address, [(start, stop) for start, stop in spans]) for address, spans in found.facts["servers"]
        ]
        rounds = self._inputs.make_rounds(layout.numel)
        coordinator = rounds.coordinator
        coordinator.first_digest, coordinator.first_norm = found.facts["first_digest"], found.facts["first_norm"]
        if coordinator.controller is not None and found.facts["codec_bytes_s"] is not None:
            coordinator.controller.codec_bytes_s = found.facts["codec_bytes_s"]
        coordinator.load(own)
        self._telemetry.continue_from(float(found.facts["time"]))
        coordinator.read_log()
        replay(self._process, self._replay)
        coordinator.forget_connections()
        log.info("continuing from global model version %d, step %d", coordinator.version, coordinator.step)
        self._telemetry.write_missing_rounds(rounds.replayed)
        rounds.replayed.clear()

    def _replay(self, position: int, record: LogRecord) -> None:
        self._telemetry.continue_from(record.time)
        self._inputs.replay(position, record)
