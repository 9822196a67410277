"""Buffers of modules, such as the running statistics of batch norm, that the sites of a run have in common.

Buffers ride on pushes, exact and not at every push; the server keeps the last ones of each site, and a result carries
their mean, weighted by samples:

    floating-point      the mean, computed in float64, so that the mean of equal values is that value
    integers            the largest, as of the counter of batches

A buffer that has a NaN or an Inf at some site counts there as not sent. With three sites or more, so does one whose
norm is far beyond that of the others', or that has negative values where theirs, such as variances, have none; and a
buffer that only a minority has is left out. No site weighs more than `MOST_WEIGHT` times the median one, and of three
or more none weighs more than all others together.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from weightgrad.core.agreed_numbers import MOST_WEIGHT
from weightgrad.core.vector_checks import with_prefix, without_prefix
from weightgrad.wire import snapshot_bytes

BUFFER = "buffer."
"""Begins the names of buffers among the scalars of a download."""

MOST_BYTES = 3 << 18
"""So many bytes of buffers ride on a push at most: a control message has 1 MB."""


_COUNTS = (torch.int64, torch.int32, torch.int16)
_MOST_NORM = 100.0  # times the norm of the others' buffer
_MOST_POSITIVE = 10.0  # the same, where no value of theirs is negative: a variance; means are now and then near zero


class SharedBuffers:
    """The buffers of all sites at the global server. Memory: those of each site, and their mean."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[int, dict[str, Tensor]]] = {}  # by site: its samples, and its buffers
        self.mean: dict[str, Tensor] = {}
        """Of the sites that counted when `combine` was last called."""

    def take(self, site: str, samples: int, buffers: Mapping[str, Tensor]) -> None:
        """Keep what a site has sent; more than MOST_BYTES are left out."""
        if snapshot_bytes.nbytes(buffers) <= MOST_BYTES:
            good = {name: one for name, one in buffers.items() if finite(one)}
            self._of[site] = max(samples, 1), good

    def combine(self, sites: Iterable[str]) -> dict[str, Tensor]:
        """Combine the buffers of these sites; they are `mean` from then on."""
        self.mean = combined([self._of[site] for site in sorted(sites) if site in self._of])
        return self.mean

    def state(self) -> dict[str, Tensor]:
        """What must survive, as named tensors."""
        found = with_prefix("mean.", self.mean)
        for site, (samples, buffers) in self._of.items():
            found[f"samples.{site}"] = torch.tensor(samples)
            found |= with_prefix(f"of.{len(site)}.{site}.", buffers)
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self.mean = without_prefix("mean.", state)
        self._of = {
            site: (int(samples), without_prefix(f"of.{len(site)}.{site}.", state))
            for site, samples in without_prefix("samples.", state).items()
        }


def finite(buffer: Tensor) -> bool:
    """Whether it has neither NaN nor Inf."""
    if buffer.is_floating_point() and buffer.element_size() == 1:
        buffer = buffer.float()  # torch has no such test for eight bits
    return not (buffer.is_floating_point() or buffer.is_complex()) or bool(torch.isfinite(buffer).all())


def _most_common(buffers: Sequence[Tensor]) -> Tensor:
    """The buffer that most of these are equal to; of equals the first."""
    counts = [sum(torch.equal(one, other) for other in buffers) for one in buffers]
    return buffers[counts.index(max(counts))]


def _in_line(alike: Sequence[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    """Without buffers that are far from the others', and with weights that are not far larger."""
    most = int(MOST_WEIGHT) * max(1, statistics.median_low([samples for samples, _ in alike]))
    weights = [min(max(0, samples), most) for samples, _ in alike]
    if len(alike) < 3:
        return [(weight, buffer) for weight, (_, buffer) in zip(weights, alike, strict=True)]
    norms = [float(buffer.double().norm()) for _, buffer in alike]
    positive = [bool((buffer >= 0).all()) for _, buffer in alike]
    found = []
    for place, (_, buffer) in enumerate(alike):
        others = [at for at in range(len(alike)) if at != place]
        usual = statistics.median_high([norms[at] for at in others])
        theirs = all(positive[at] for at in others)
        if norms[place] > (_MOST_POSITIVE if theirs else _MOST_NORM) * usual or (theirs and not positive[place]):
            continue
        found.append((min(weights[place], sum(weights[at] for at in others)), buffer))
    return found


def combined(sites: Sequence[tuple[int, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """Combine the buffers of several sites, each with its samples.

    Of sites whose buffers of one name differ in shape or type, those count that most sites have, and of equals those
    that are like the first site's. Of buffers that are neither numbers nor integers, such as masks, it is the one that
    most sites have, bit for bit, and of equals the first site's. One that is not finite counts as not sent, unless most
    are so, as masks of attention may be.
    """
    made: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for _, buffers in sites for name in buffers):
        sent = [(samples, buffers[name]) for samples, buffers in sites if name in buffers]
        good = [(samples, one) for samples, one in sent if finite(one)]
        plain = 2 * len(good) >= len(sent)  # otherwise it is not finite on purpose, as a mask of attention
        named = good if plain else sent
        (kind, _), *_ = Counter((one.shape, one.dtype) for _, one in named).most_common(1)  # of equals, the first
        alike = [(samples, one) for samples, one in named if (one.shape, one.dtype) == kind]
        if len(sites) > 2 and 2 * len(alike) <= len(sites):
            continue
        first = alike[0][1]
        if not plain or not (first.is_floating_point() or first.dtype in _COUNTS):
            made[name] = _most_common([buffer for _, buffer in alike])
            continue
        alike = _in_line(alike)
        total = sum(samples for samples, _ in alike)
        if first.is_floating_point() and total:
            mean = torch.zeros(first.shape, dtype=torch.float64)
            for samples, buffer in alike:
                mean += buffer.double() * (samples / total)
            made[name] = mean.to(first.dtype)
        elif first.dtype in _COUNTS:
            made[name] = torch.stack([buffer for _, buffer in alike]).amax(0)
        else:
            made[name] = first
    return made
