"""The digest adds up over any partition, is equal on every backend, and shows every small change."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightgrad import kernels
from weightgrad.kernels import digest, noise, threads
from weightgrad.kernels.digest import BLOCK

needs_native = pytest.mark.skipif(
    kernels.status().backend != "native", reason=f"no native library here: {kernels.status().reason}"
)
BACKENDS = kernels.BACKENDS if kernels.status().backend == "native" else ("reference",)
MASK32, MASK64 = 2**32 - 1, 2**64 - 1
FIRSTS = st.one_of(
    st.integers(0, 100),
    st.integers(BLOCK - 50, BLOCK + 50),
    st.integers(2**32 - 100, 2**32 + 100),
    st.integers(2**40 - 100, 2**40 + 100),
    st.integers(0, 2**40),
)
WORDS = st.lists(st.integers(0, MASK32), max_size=70)


def floats(words: list[int]) -> Tensor:
    """Floats with these bits."""
    return torch.tensor([noise.signed32(word) for word in words], dtype=torch.int32).view(torch.float32)


def normal(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 0.02


def term(index: int, word: int) -> int:
    """h as the module's docstring has it, in integers of any size."""
    z = (noise.mix(index // BLOCK) | 1) + index % BLOCK * digest.STEP & MASK64
    t = (word ^ z >> 32) * digest.FACTOR
    q = ((t & MASK32) ^ t >> 32) * (z & MASK32) + ((t & MASK32) << 32) & MASK64
    return digest.SPREAD * (q ^ q >> 32) & MASK64


def on_all_backends(x: Tensor, first: int = 0) -> int:
    found = {}
    for backend in BACKENDS:
        with kernels.use(backend):
            found[backend] = digest.digest(x, first)
    assert len(set(found.values())) == 1, found
    return found["reference"]


@pytest.mark.parametrize("first", [0, 1, BLOCK - 7, 2**32 - 5, 2**40])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 15, 16, 17, 31, 33, 1000, 4096, BLOCK - 1, BLOCK + 9, 2 * BLOCK + 33])
def test_backends_agree(n: int, first: int) -> None:
    on_all_backends(normal(n), first)


@given(words=WORDS, first=FIRSTS, skipped=st.integers(0, 9))
def test_is_the_sum_of_its_terms(words: list[int], first: int, skipped: int) -> None:
    """At any address: `skipped` elements before the interval move it off every boundary."""
    x = floats([1] * skipped + words)[skipped:]
    assert on_all_backends(x, first) == sum(term(first + i, word) for i, word in enumerate(words)) & MASK64


@given(data=st.data(), n=st.integers(0, 3000), first=FIRSTS)
@settings(max_examples=50)
def test_parts_in_any_order_add_up(data: st.DataObject, n: int, first: int) -> None:
    x = normal(n)
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, n), max_size=6))), n]
    parts = data.draw(st.permutations(list(itertools.pairwise(cuts))))
    for backend in BACKENDS:
        with kernels.use(backend):
            found = [digest.digest(x[start:stop], first + start) for start, stop in parts]
            assert digest.combine(*found) == digest.digest(x, first)


def test_golden() -> None:
    """Ranks of different versions compare digests: a new function needs a new version of what carries them."""
    x = torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf"), 1e-41])
    assert digest.text(on_all_backends(x)) == "56d28e982412985a"
    assert digest.text(on_all_backends(x, 2**40 - 3)) == "0c3cbc0d0d296420"
    assert digest.text(on_all_backends(torch.arange(BLOCK + 1000.0), BLOCK // 2)) == "83228311d07ebf10"


def test_threads_do_not_show() -> None:
    x = normal(threads.LARGE + 4097)
    try:
        found = set()
        for count in (1, 2, 3):
            kernels.set_threads(count)
            found.add(digest.digest(x, 12345))
        assert len(found) == 1
    finally:
        kernels.set_threads(None)


def test_empty_and_text() -> None:
    assert digest.digest(torch.empty(0), 5) == 0
    assert digest.combine() == 0
    assert digest.combine(MASK64, 2) == 1
    assert digest.text(0xABC) == "0000000000000abc"


@pytest.mark.parametrize("x", [torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2), torch.zeros(8)[::2]])
def test_refuses_what_it_cannot_read(x: Tensor) -> None:
    with pytest.raises(ValueError, match="flat contiguous float32"):
        digest.digest(x)
    with pytest.raises(ValueError, match="first must be at least 0"):
        digest.digest(torch.zeros(1), -1)


# -- what must change it ----------------------------------------------------------------------


@given(words=WORDS.filter(bool), first=FIRSTS, data=st.data())
def test_a_changed_element_always_shows(words: list[int], first: int, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(words) - 1))
    other = list(words)
    other[place] = data.draw(st.integers(0, MASK32).filter(lambda word: word != words[place]))
    assert digest.digest(floats(words), first) != digest.digest(floats(other), first)


@given(words=st.lists(st.integers(0, MASK32), min_size=2, max_size=70), first=FIRSTS, data=st.data())
def test_a_swap_shows(words: list[int], first: int, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(words))))
    other = [words[i] for i in order]
    same = digest.digest(floats(words), first) == digest.digest(floats(other), first)
    assert same == (words == other)


def test_zeros_and_nans_show() -> None:
    variants = [0x00000000, 0x80000000, 0x7FC00000, 0x7FC00001, 0xFFC00000, 0x7F800000]
    assert len({digest.digest(floats([word])) for word in variants}) == len(variants)


def test_shifts_and_lengths_of_constants_show() -> None:
    found = set()
    for value in (0.0, -0.0, 1.0, 0.02):
        for n in range(1, 400):
            found |= {digest.digest(torch.full((n,), value), first) for first in (0, 1, 2)}
    assert len(found) == 4 * 399 * 3
    x = normal(5000)
    assert digest.digest(x[1:]) != digest.digest(x[:-1])
    assert digest.digest(x.roll(1)) != digest.digest(x)


def test_equal_and_opposite_changes_show() -> None:
    x = torch.ones(2000)
    step = torch.zeros(2000)
    step[::2], step[1::2] = 0.25, -0.25
    found = {digest.digest(x)}
    for n in range(2, 2000, 2):
        found.add(digest.digest(torch.cat((x[:n] + step[:n], x[n:]))))
    assert len(found) == 1000


# -- how it is spread -------------------------------------------------------------------------


def assert_uniform(found: list[int]) -> None:
    """No value twice; every bit set half of the time; the lowest and the highest byte uniform."""
    values = np.array(found, dtype=np.uint64)
    assert len(np.unique(values)) == len(values)
    for bit in range(64):
        ones = int((values >> np.uint64(bit) & np.uint64(1)).sum())
        assert abs(ones - len(values) / 2) < 3 * len(values) ** 0.5, f"bit {bit}"
    for shift in (0, 56):
        counts = np.bincount((values >> np.uint64(shift) & np.uint64(255)).astype(np.int64), minlength=256)
        expected = len(values) / 256
        assert ((counts - expected) ** 2 / expected).sum() < 255 + 6 * (2 * 255) ** 0.5, f"byte at {shift}"


def changes(x: Tensor, changed: Sequence[tuple[tuple[int, int], ...]]) -> list[int]:
    """Return by how much the digest moves when the bits of some elements, pairs of (place, mask), are flipped."""
    words = x.numpy().view(np.uint32)
    before, found = digest.digest(x), []
    for one in changed:
        for place, mask in one:
            words[place] ^= mask
        found.append(digest.digest(x) - before & MASK64)
        for place, mask in one:
            words[place] ^= mask
    assert digest.digest(x) == before
    return found


DATA = {"zeros": torch.zeros(3200), "ones": torch.ones(3200), "normal": normal(3200)}


@needs_native
@pytest.mark.parametrize("name", DATA)
def test_single_bits(name: str) -> None:
    x = DATA[name].clone()
    assert_uniform(changes(x, [((place, 1 << bit),) for place in range(3200) for bit in range(32)]))


@needs_native
@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("bit", [0, 22, 31])
def test_one_bit_of_two_elements(name: str, bit: int) -> None:
    """Every pair of 450 neighbours: what a multilinear digest with linear keys would cancel."""
    x = DATA[name][:450].clone()
    mask = 1 << bit
    pairs = [((i, mask), (j, mask)) for i in range(450) for j in range(i)]
    assert len(pairs) > 100_000
    found = changes(x, pairs)
    assert len(set(found)) == len(found)
    assert 0 not in found


@needs_native
def test_swaps_are_spread() -> None:
    x = normal(450)
    words = x.numpy().view(np.uint32).tolist()
    pairs = [(i, j) for i in range(450) for j in range(i) if words[i] != words[j]]
    assert len(pairs) > 100_000
    assert_uniform(changes(x, [((i, words[i] ^ words[j]), (j, words[i] ^ words[j])) for i, j in pairs]))


@needs_native
@pytest.mark.parametrize("name", DATA)
def test_prefixes_are_spread(name: str) -> None:
    x, total, found = DATA[name].repeat(32), 0, []
    for i, one in enumerate(x.split(1)):
        total = digest.combine(total, digest.digest(one, i))
        found.append(total)
    assert_uniform(found)
    assert digest.digest(x) == total
