"""The other processes of the global server, as process 0 knows them: which have come up, and where sites reach them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weightgrad.errors import CheckpointError, StrategyError
from weightgrad.runtime.admission_messages import ServedBy
from weightgrad.runtime.server.group import ServerGroup
from weightgrad.runtime.server.orders import Ready, Resume, to_bytes
from weightgrad.runtime.server.rounds import ServerRounds


class WorkerProcesses:
    """What the other processes have said when they came up.

    Args:
        group: all processes.
        advertise: the addresses at which sites reach the processes; None: this server's host, and their ports.
    """

    def __init__(self, group: ServerGroup, advertise: Sequence[str] | None) -> None:
        self._group, self._advertise = group, advertise
        self._ready: dict[int, Ready] = {}

    @property
    def all_ready(self) -> bool:
        """Whether all have come up."""
        return len(self._ready) == self._group.size - 1

    def ready(self, note: Ready, rounds: ServerRounds | None) -> None:
        """Another process has come up; its disk must fit this one's.

        Args:
            note: what it says.
            rounds: the rounds of this process; None before there is a global model.

        Raises:
            CheckpointError: it has a global model of another time.
        """
        lowest, highest = -1, 0  # without rounds: this process ended before the first global model was on its disk
        if rounds is not None:
            lowest = rounds.coordinator.version
            highest = lowest + 1 if rounds.closing else lowest
        if not lowest <= note.version <= highest:
            raise CheckpointError(
                f"server process {note.process} has global model version {note.version}, the coordinator {lowest} "
                "(-1 is none); start all processes with the states that they wrote together, or all with empty ones"
            )
        self._ready[note.process] = note

    def resume(self, rounds: ServerRounds | None, introduce: Callable[[int], None]) -> None:
        """Go on together, from the version that this process has.

        Args:
            rounds: the rounds of this process; None before there is a global model.
            introduce: tells a process who may take part.
        """
        version = rounds.coordinator.version if rounds is not None else -1
        for process in sorted(self._ready):
            introduce(process)
            self._group.send(process, to_bytes(Resume(version=version)))
        if rounds is not None:
            rounds.close_again({process: note.version for process, note in self._ready.items()})

    def located(self, known: Sequence[ServedBy]) -> list[ServedBy]:
        """Where sites reach each process; what it serves stays.

        Args:
            known: the processes as they were known before.

        Raises:
            StrategyError: the operator has given more or fewer addresses than there are processes.
        """
        ports = [0, *(self._ready[number].port for number in sorted(self._ready))]
        addresses = self._advertise or tuple("" if not port else f":{port}" for port in ports)
        if len(addresses) != self._group.size:
            raise StrategyError(
                f"--advertise has {len(addresses)} addresses and the server {self._group.size} processes; "
                "give one HOST:PORT for each, in the order of their ranks"
            )
        spans = [one.spans for one in known] if len(known) == self._group.size else [[] for _ in addresses]
        return [ServedBy(address, own) for address, own in zip(addresses, spans, strict=True)]
