"""Who serves what inside a site, where gradients meet at a local server.

`exchange = "server"`: worker 0 is the local server. It receives every worker's gradient, keeps the master weights and
their optimizer, and answers with weights. `exchange = "sharded"`: every worker is the local server of some tensors.
Either way whoever serves a tensor also speaks with the global server for it, so that what was combined inside the site
need not be moved once more.

Tensors are served whole: codecs have one scale for a tensor, and an optimizer may look at all of it. So the largest
tensor bounds how evenly the work can be divided.
"""

from __future__ import annotations

from collections.abc import Sequence

from weightgrad.core import pieces
from weightgrad.core.layout import Layout
from weightgrad.core.strategies import Strategy
from weightgrad.wire.intervals import Intervals


def serving(layout: Layout, strategy: Strategy, workers: int) -> tuple[Intervals, ...] | None:
    """What each worker of a site serves.

    Args:
        layout: where the tensors lie in the index space.
        strategy: the strategy, adapted to the site (`Strategy.inside`, `Strategy.averaged`).
        workers: workers of the site.

    Returns:
        For each worker some whole tensors; None where there is no local server, because gradients meet in an allreduce
        or the worker is alone.
    """
    if workers < 2 or strategy.exchange == "allreduce":
        return None
    if strategy.exchange == "server":
        return (Intervals.whole(layout.numel), *[Intervals(())] * (workers - 1))
    return tuple(pieces.divide(layout, workers, whole_tensors=True))


def owners(layout: Layout, served: Sequence[Intervals] | None) -> tuple[int, ...] | None:
    """The worker that serves each tensor; None where there is no local server."""
    if served is None:
        return None
    found = []
    for slot in layout.slots:
        whole = Intervals(((slot.start, slot.stop),) if slot.numel else ())
        found.append(next((rank for rank, own in enumerate(served) if whole and (own & whole) == whole), 0))
    return tuple(found)
