"""torchft's DiLoCo (Douillard et al., 2023): local steps, pseudo-gradients averaged by Gloo, an outer Nesterov step.

The lighthouse runs beside the first worker. Both start from the same weights, so the first exchange of them is off,
as torchft's documentation says.
"""

from __future__ import annotations

import datetime
import importlib
import os
from typing import Any

import torch
import torch.distributed as dist
from rivals.rival import PORT, Rival, Worker, interface

_TIMEOUT = datetime.timedelta(seconds=120)


class _DiLoCo(Rival):
    def __init__(self, worker: Worker, manager: Any, diloco: Any, servers: list[Any]) -> None:
        self._worker, self._manager, self._diloco, self._servers = worker, manager, diloco, servers
        diloco.__enter__()

    def step(self) -> None:
        """Step the optimizer, which has the hooks of DiLoCo."""
        self._worker.optimizer.step()

    def close(self) -> None:
        """Shut the manager down. The servers end with the process."""
        self._manager.shutdown(wait=False)


def _torchft(module: str, name: str) -> Any:
    """An attribute of torchft, which is not installed where types are checked."""
    return getattr(importlib.import_module(f"torchft.{module}"), name)


def make(worker: Worker, name: str) -> Rival:
    """Make DiLoCo as in the examples of torchft."""
    del name
    os.environ["GLOO_SOCKET_IFNAME"] = interface()
    own = worker.addresses[worker.rank]
    lighthouse = None
    if worker.rank == 0:
        bind = f"0.0.0.0:{PORT + 1}"
        server = _torchft("coordination", "LighthouseServer")
        lighthouse = server(bind=bind, min_replicas=len(worker.addresses), join_timeout_ms=100)
    store = dist.TCPStore(own, PORT, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    state: dict[str, Any] = {"module": worker.module, "optimizer": worker.optimizer}
    manager = _torchft("manager", "Manager")(
        pg=_torchft("process_group", "ProcessGroupGloo")(timeout=_TIMEOUT),
        load_state_dict=lambda found: [one.load_state_dict(found[key]) for key, one in state.items()],
        state_dict=lambda: {key: one.state_dict() for key, one in state.items()},
        min_replica_size=len(worker.addresses),
        use_async_quorum=False,
        timeout=_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=PORT,
        lighthouse_addr=f"http://{worker.addresses[0]}:{PORT + 1}",
        replica_id=f"site-{worker.rank}",
        hostname=own,
        init_sync=False,
    )
    outer = torch.optim.SGD(
        worker.module.parameters(),
        lr=worker.number("outer_rate", 0.7),
        momentum=worker.number("outer_momentum", 0.5),
        nesterov=True,
    )
    delay = int(worker.number("delay", 0))
    diloco = _torchft("local_sgd", "DiLoCo")(
        manager,
        [worker.module],
        worker.optimizer,
        outer,
        sync_every=int(worker.number("every", 20)),
        use_bucketization=bool(worker.number("buckets", 0)),
        fragment_sync_delay=delay,
        fragment_update_alpha=worker.number("mix", 0.5 if delay else 0.0),
    )
    return _DiLoCo(worker, manager, diloco, [store, lighthouse])
