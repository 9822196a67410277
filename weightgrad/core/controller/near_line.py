"""What `auto` does where there is no distance between the sites and the server: on one machine, or in one building.

Sparse and late exchange pays for a line that is thin or long. Where the round trip of every line is a millisecond or
two, nothing has to be paid for, and a run that is over in seconds would only lose: what a sparse push leaves behind
comes too late for it. So everything is exchanged, after every step, and the sites wait for it:

    everything as float32 where that is little, else in 8 bits;
    after every step for the first PATIENCE_S seconds of waiting, however short the steps are;
    then after so many steps that waiting takes at most half of the time.

The round trip is that of the TCP connection, which a tunnel (`ssh -L`) ends on the site's own machine. So after those
PATIENCE_S the rounds must bear it out: a line is not near if even the fastest of its last rounds took FAR_S longer than
its bytes explain. Not before, since on a busy machine rounds take long as well, and a short run must not pay for that.

A near line may be thin all the same. Large models are tried on it with a part first, each time at most eight times as
large as what it has carried, and a line that needs longer for the whole of it than a step does is no near line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from weightgrad.core.controller.measurements import Measurements
from weightgrad.units import show_seconds
from weightgrad.wire.sync_schedule import SyncSchedule

NEAR_S = 2e-3
"""A shorter round trip is no distance."""
FAR_S = 30e-3
"""A line whose rounds all take longer, beside the time of their bytes, has a distance, whatever its round trip is."""
PATIENCE_S = 20.0
"""So long a run may wait in all before its rounds get fewer."""

EXACT, EIGHT_BITS = "fp32", "ef(qsgd(bits=8))"
_FAR_ROUNDS = 3  # so many tell: one may have been disturbed
_LITTLE = 4 << 20  # bytes of push and result that no near line notices
_TELLING = 1 << 20  # bytes of a round that tell how thin a line is, whatever it is to carry
_FIRST = 8 << 20  # bytes that a line is tried with
_MORE = 8.0  # times what it has carried is what it is tried with next
_SHORT_S = 1.0  # a longer round is worth hiding, however short the run


class NearSchedule(NamedTuple):
    """What to exchange on near lines.

    Attributes:
        every: steps between two rounds, whose results are waited for.
        density: the fraction of entries; below 1 the line is only tried.
        codec: of everything, where the density is 1.
        why: the reason.
    """

    every: int
    density: float
    codec: str
    why: str


def is_near(measured: Measurements, sites: Sequence[str]) -> bool:
    """Whether the lines of all of these sites are known to have no distance."""
    return bool(sites) and all(
        0 < measured.trips.get(name, 0.0) < NEAR_S and not _is_far(measured, name) for name in sites
    )


def _is_far(measured: Measurements, site: str) -> bool:
    """Whether the rounds of a line have shown a distance, after as much waiting as a short run may cost."""
    link = measured.links.get(site)
    if link is None or len(link.rounds) < _FAR_ROUNDS or measured.waited.get(site, 0.0) < PATIENCE_S:
        return False
    return min(seconds - link.slope * nbytes for nbytes, seconds in link.rounds) > FAR_S


def near_schedule(
    measured: Measurements,
    sites: list[str],
    numel: int,
    now: SyncSchedule,
    *,
    at_most: int,
    codec_bytes_s: float,
) -> NearSchedule | None:
    """Choose what near lines carry.

    Args:
        measured: what the sites have measured.
        sites: those that rounds wait for.
        numel: the elements of the model.
        now: the schedule in force.
        at_most: the most steps between two rounds.
        codec_bytes_s: the speed of the codecs.

    Returns:
        The choice; None where a line is not near, or too thin to carry everything.
    """
    if not is_near(measured, sites) or not all(name in measured.steps for name in sites):
        return None
    links = [measured.links[name] for name in sites if name in measured.links]
    carried = max((nbytes for link in links for nbytes, _ in link.rounds), default=0.0)
    little = 8 * numel <= _LITTLE
    telling = carried >= min(_TELLING, numel / 4)  # an eighth of everything in 8 bits, or what tells how thin a line is
    slope = max((link.slope for link in links), default=0.0) if telling else 0.0
    exact = little or 0 < slope < 1 / codec_bytes_s
    nbytes = 8 * numel if exact else 2 * numel
    step = measured.step(sites)
    if slope * nbytes > max(step, _SHORT_S):
        return None
    if nbytes > (tried := max(_FIRST, _MORE * carried)):
        return NearSchedule(1, min(0.5, tried / (2 * numel)), "", "a near line is tried with a part of the model")
    seconds = max((link.line()[0] for link in links), default=0.0) + slope * nbytes
    needed = 1 if seconds <= step else math.ceil(seconds / step) if step > 0 else at_most + 1
    waited = max(measured.waited.get(name, 0.0) for name in sites)
    patient = waited + seconds <= PATIENCE_S and seconds <= _SHORT_S
    if needed > at_most and not patient:
        return None
    every = 1 if patient else 1 << (needed - 1).bit_length()
    codec = EXACT if exact else EIGHT_BITS
    if not patient and now.up == codec and not now.overlap and needed <= now.every <= 4 * needed:
        every = now.every  # a few steps more or less are noise
    reason = f"a round takes {show_seconds(seconds)}, a step {show_seconds(step)}"
    why = f"no distance: the round trip of every line is below {show_seconds(NEAR_S)}; {reason}"
    why = f"{why}, and {show_seconds(waited)} were waited so far"
    return NearSchedule(min(every, at_most), 1.0, codec, why)
