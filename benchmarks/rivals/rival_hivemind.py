"""hivemind's Optimizer (Ryabinin, Gusev and others, 2020): local updates, and parameters averaged in the background.

Averaging at every step is not what it is for: finding a group takes longer than a step here. With local updates it
averages every `every` steps of both, in the background, by the delta rule, as 16-bit floats.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rivals.rival import PORT, Rival, Worker


class _Hivemind(Rival):
    def __init__(self, worker: Worker, dht: Any, optimizer: Any) -> None:
        self._worker, self._dht, self._optimizer = worker, dht, optimizer

    def step(self) -> None:
        """Take a local step; hivemind averages in the background."""
        self._optimizer.step()

    def close(self) -> None:
        """Go on without gradients until the other worker has done its steps too.

        Peers count samples, not steps, and a peer that is alone would search for a group until it times out.
        """
        others = [Path(f"worker-{rank}.json") for rank in range(len(self._worker.addresses))]
        while not all(path.exists() for path in others):
            time.sleep(float(self._worker.recipe.compute.seconds_per_step))
            self._optimizer.step()
        self._optimizer.shutdown()
        self._dht.shutdown()


def make(worker: Worker, name: str) -> Rival:
    """A swarm of two; the second finds the first by the address that it leaves in the run's directory."""
    import hivemind

    del name
    own, note = worker.addresses[worker.rank], Path("first-peer")
    if worker.rank:
        while not note.exists():
            time.sleep(0.05)
    peers = [note.read_text()] if worker.rank else []
    dht = hivemind.DHT(host_maddrs=[f"/ip4/{own}/tcp/{PORT}"], initial_peers=peers, start=True)
    if not worker.rank:
        note.with_suffix(".part").write_text(str(dht.get_visible_maddrs()[0]))
        note.with_suffix(".part").rename(note)
    share = worker.recipe.training.batch // len(worker.addresses)
    seconds = worker.number("matchmaking", 0.5)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="rivals",
        batch_size_per_step=share,
        target_batch_size=int(worker.number("every", 20)) * worker.recipe.training.batch,
        optimizer=worker.optimizer,
        use_local_updates=True,
        delay_state_averaging=True,
        matchmaking_time=seconds,
        averaging_timeout=10.0,
        state_averaging_compression=hivemind.compression.Float16Compression(),
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.2, "max_refresh_period": 0.5},
        averager_opts={"request_timeout": min(0.5, seconds) / 2},
        verbose=True,
    )
    return _Hivemind(worker, dht, optimizer)
