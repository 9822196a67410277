"""The processes of a global server: a torchrun job, in which process 0 gives orders and all others obey.

    torchrun --nproc-per-node 2 -m weightgrad serve recipe.yaml ...

torch.distributed (Gloo) carries orders and notes. A process that ends takes the others with it: their receiving threads
fail, the processes end, and torchrun starts all of them again from what is on their disks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from weightgrad.errors import LinkError
from weightgrad.runtime.process_group import init_process_group, wait_for_gloo_threads

_FOREVER = timedelta(days=3650)  # orders may be far apart
_CLOSE_S = 30.0  # that a process waits for the others at the end
_ORDER, _NOTE, _VALUES = 0, 1, 2  # tags: each kind has its own

Receive = Callable[[int, bytes], None]
"""Called from a thread of the group, with the process that sent it."""


class ServerGroup:
    """This process among those of the global server; alone if it was not started by torchrun.

    Attributes:
        number: this process.
        size: how many there are.
    """

    def __init__(self) -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.number = int(os.environ.get("RANK", "0")) if self.size > 1 else 0
        if self.size > 1 and not dist.is_initialized():
            init_process_group("gloo", _FOREVER)
        self._sending = threading.Lock()
        self._listeners: list[threading.Thread] = []

    @property
    def spans_machines(self) -> bool:
        """Whether torchrun has started the processes on more than one machine."""
        return self.size > int(os.environ.get("LOCAL_WORLD_SIZE", self.size))

    def start(self, receive: Receive, failed: Callable[[str], None]) -> None:
        """Let messages flow.

        Args:
            receive: takes each message.
            failed: called once if another process has ended.
        """
        for other in self._others:
            name = f"process-{other}"
            thread = threading.Thread(target=self._listen, args=(other, receive, failed), name=name, daemon=True)
            thread.start()
            self._listeners.append(thread)

    @property
    def _others(self) -> Sequence[int]:
        """The processes that this one hears from."""
        return range(1, self.size) if self.number == 0 else [0] if self.size > 1 else []

    def _listen(self, other: int, receive: Receive, failed: Callable[[str], None]) -> None:
        tag = _NOTE if self.number == 0 else _ORDER
        try:
            while True:
                size = torch.empty(1, dtype=torch.int64)
                dist.recv(size, src=other, tag=tag)
                if not size:
                    return  # it has nothing more to say
                data = torch.empty(int(size), dtype=torch.uint8)
                dist.recv(data, src=other, tag=tag)
                receive(other, bytes(data.numpy()))
        except RuntimeError as error:
            failed(f"server process {other} has ended: {str(error).splitlines()[0]}")

    def send(self, to: int, data: bytes) -> None:
        """Send a message to another process.

        Raises:
            LinkError: the process has ended.
        """
        tag = _ORDER if self.number == 0 else _NOTE
        try:
            with self._sending:
                dist.send(torch.tensor([len(data)]), dst=to, tag=tag)
                if data:
                    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), dst=to, tag=tag)
        except RuntimeError as error:
            raise LinkError(f"server process {to} has ended: {str(error).splitlines()[0]}") from error

    def close(self) -> None:
        """Part from the other processes at the end of a run; called in all of them."""
        if not self._listeners:
            return
        for other in self._others:
            self.send(other, b"")
        for thread in self._listeners:
            thread.join(_CLOSE_S)
        dist.destroy_process_group()
        wait_for_gloo_threads()

    def send_tensor(self, to: int, tensor: torch.Tensor) -> None:
        """Send values to another process, which must expect them."""
        dist.send(tensor, dst=to, tag=_VALUES)

    def receive_tensor(self, source: int, numel: int) -> torch.Tensor:
        """Receive so many float32 values from another process."""
        found = torch.empty(numel, dtype=torch.float32)
        dist.recv(found, src=source, tag=_VALUES)
        return found

    def gather_spans(self, spans: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """What every process serves, in all of them."""
        if self.size == 1:
            return [spans]
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.size)]
        dist.all_gather_object(found, spans)
        return found
