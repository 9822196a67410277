"""Twenty thousand damaged messages: each is refused with an error of its own, or is exactly what a writer makes."""

from __future__ import annotations

import random
from collections import Counter

import torch

from weightgrad import errors
from weightgrad.kernels import fixed
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_bytes import pack, unpack
from weightgrad.wire.message_sizes import nbytes
from weightgrad.wire.messages import Message, ModelPart, PushPart, ResultPart

from .message_damage import MUTATIONS, reseal
from .message_samples import LIMITS, seeds

MUTANTS = 20_000


def use(message: Message, held: Intervals) -> None:
    """What a receiver does with it: decode every segment, into a vector of everything and into one of what it holds."""
    if not isinstance(message, PushPart | ResultPart | ModelPart):
        return
    relayed = message.relayed if isinstance(message, ResultPart) else ()
    for segments in (message.segments, *(push.segments or () for push in relayed)):
        for segment in segments:
            segment.into(torch.zeros(LIMITS.max_elements), fixed.ADD)
            segment.into(torch.zeros(held.numel), fixed.SUBTRACT, held)


def test_no_mutant_escapes() -> None:
    rng = random.Random(4)
    whole = list(seeds())
    held = Intervals(((1, 6), (9, 10), (25, 70)))
    outcomes: Counter[str] = Counter()
    for _ in range(MUTANTS):
        data = bytearray(rng.choice(whole))
        for _ in range(rng.randint(1, 3)):
            rng.choice(MUTATIONS)(rng, data)
        if rng.random() < 0.6:
            reseal(data)
        try:
            message = unpack(data if rng.random() < 0.5 else bytes(data), LIMITS)
        except (errors.FrameError, errors.ProtocolError) as error:
            outcomes[type(error).__name__] += 1
            continue
        # One way to write a message: what is accepted is what a writer makes of it.
        assert pack(message) == data
        assert nbytes(message) == len(data)
        outcomes["Message"] += 1
        try:
            use(message, held)
        except errors.DecodeError:
            outcomes["DecodeError"] += 1
    # The fuzz is only worth something if it comes to every check, and past the last one.
    reached = {error.__name__ for error in errors.FrameError.__subclasses__()}
    reached |= {"ProtocolError", "DecodeError", "Message"}
    assert {name for name in reached if outcomes[name] < 10} == set(), outcomes
