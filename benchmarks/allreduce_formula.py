"""How long an allreduce takes by formula: what a rank computes as measured, the network as the simulator's LAN has it.

A ring has 2(n-1) steps of one n-th of the vector, recursive doubling log2 n steps of all of it. Codec and network come
one after the other; nothing is congested.
"""

from __future__ import annotations

import math

from allreduce_ranks import vector_bytes
from field_sheet import Row

from weightgrad.sim.lan import Lan

RING, DOUBLING = "fp32, ring", "fp32, recursive doubling"
DEALT = "fp32, dealt as codecs are"  # every rank gets its chunk from all, and gives its mean to all: no codec, its way
DELAY = 2e-5  # seconds one way between two machines of a rack


def seconds(row: Row, gbit_s: float, delay: float = DELAY) -> float:
    """One allreduce: codec or additions as measured, network as the simulator's LAN has it."""
    return network_seconds(row, Lan(gbit_s * 1e9, delay)) + compute_seconds(row)


def network_seconds(row: Row, lan: Lan) -> float:
    """Until everything has been through every card."""
    workers, nbytes = row["workers"], 4 * row["side"] ** 2
    if row["codec"] == DOUBLING:  # every round everybody sends everything
        return float(_rounds(workers) * (nbytes * 8 / lan.bandwidth_bit_s + lan.delay_seconds))
    return lan.allreduce(workers, vector_bytes(row, workers) if "sent_bytes" in row else nbytes)


def formula_delays(row: Row) -> int:
    """How many of them it counts, one after the other."""
    return round(network_seconds(row, Lan(math.inf, 1.0)))


def compute_seconds(row: Row) -> float:
    """Of one rank, on a core of its own."""
    workers = row["workers"]
    if row["codec"] == DOUBLING:
        return float(_rounds(workers) * row["add"])
    return float(row["seconds"] if "sent_bytes" in row else (workers - 1) / workers * row["add"])


def _rounds(workers: int) -> int:
    return math.ceil(math.log2(workers))
