"""The streams of random keys: every use of randomness has a name here, so that no two uses share a key by accident.

A key is derived from the seed of the run by a chain of numbers, `derive(seed, stream, ...)`. The first number of a
chain is the stream; what follows (the site, the worker, the step) separates the draws within it. Each enumeration
below lists the streams under one parent key. Two chains that start from the same seed must differ in their stream or
in their length.

The numbers are part of what makes a run reproducible: another number gives other bits, so they never change.
"""

from __future__ import annotations

from enum import IntEnum


class RunStream(IntEnum):
    """Streams under the seed of a run."""

    SITE_STATE = 10
    """`derive(seed, SITE_STATE, site)`: the codec of a site's pushes."""
    LOCAL_STEP = 11
    """`derive(seed, LOCAL_STEP, site)`: parent of the streams of `SiteStream`."""
    GLOBAL_SERVER = 20
    """`derive(seed, GLOBAL_SERVER)`: the codec of round results, and parent of the streams of `ServerStream`."""
    EVALUATION = 30
    """`derive(seed, EVALUATION, version)`: quantizing the global model to evaluate it and to hand it over."""
    FAULT_SCHEDULE = 40
    """`derive(seed, FAULT_SCHEDULE)`: which faults happen when, in the chaos tests."""
    CONDITIONS = 41
    """`derive(seed, CONDITIONS)`: slow links and workers, in the chaos tests."""
    ROUND_DEADLINE = 42
    """`derive(seed, ROUND_DEADLINE)`: the deadline `t_global` of a round, in the chaos tests."""


class SiteStream(IntEnum):
    """Streams under the key of a site's local step."""

    WEIGHTS = 1
    """`derive(key, WEIGHTS)`: the weights that the local server releases to the workers."""
    GRADIENTS = 2
    """`derive(key, GRADIENTS, worker)`: the gradients that a worker encodes."""
    ALLREDUCE = 3
    """`derive(key, ALLREDUCE, worker)`: a worker's chunks in the quantized allreduce."""


class ServerStream(IntEnum):
    """Streams under the key of the global server, whose small numbers are those of its rounds."""

    DOWNLOADS = 1 << 32
    """`derive(key, DOWNLOADS)`: encoded global models for sites that join late."""


class TrainingStream(IntEnum):
    """Streams under the seed of a recipe, for its model and data."""

    MODEL = 1
    """`derive(seed, MODEL)`: the first weights."""
    BATCHES = 2
    """`derive(seed, BATCHES, site, worker)`: the order in which a worker sees its samples."""
    AUGMENTATION = 3
    """`derive(seed, AUGMENTATION)`: crops and flips."""


class ShardStream(IntEnum):
    """Streams under the seed of a recipe, for dealing the data to sites and workers."""

    SHUFFLE = 0
    """`derive(seed, SHUFFLE)`: the order of all samples, when shards are alike."""
    CLASS_ORDER = 1
    """`derive(seed, CLASS_ORDER, label)`: the order of the samples of one class."""
    CLASS_SHARES = 2
    """`derive(seed, CLASS_SHARES, label)`: how much of a class each site gets."""
    WORKERS = 3
    """`derive(seed, WORKERS, site)`: the order in which a site deals its samples to its workers."""


class ComputeStream(IntEnum):
    """Streams under the seed of a simulation, for how long a worker computes."""

    JITTER = 1
    """`derive(seed, JITTER, site, worker, step)`: the length of a step."""
    STRAGGLER = 2
    """`derive(seed, STRAGGLER, rule, site, worker, step)`: whether a step is one of the slow ones."""
    ANGLE = 3
    """`derive(key, ANGLE)`: the second uniform number that a normal one is made of."""
