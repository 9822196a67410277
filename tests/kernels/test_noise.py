"""The noise is uniform, and keys and indices do not echo in each other."""

from __future__ import annotations

import torch

from weightgrad.kernels import noise

CPU = torch.device("cpu")


def test_chunks_agree() -> None:
    whole = noise.noise16(77, 0, 4096, CPU)
    parts = torch.cat([noise.noise16(77, start, 512, CPU) for start in range(0, 4096, 512)])
    assert torch.equal(whole, parts)


def test_uniform_in_sixteen_bits() -> None:
    x = noise.noise16(noise.mix(1), 0, 1 << 20, CPU)
    assert int(x.min()) >= 0
    assert int(x.max()) <= 65535
    counts = torch.bincount(x >> 8, minlength=256).double()
    chi_square = float(((counts - 4096) ** 2 / 4096).sum())
    assert chi_square < 255 + 6 * (2 * 255) ** 0.5


def test_neighbouring_keys_and_elements_are_uncorrelated() -> None:
    def centred(key: int) -> torch.Tensor:
        return (noise.noise16(noise.mix(key), 0, 1 << 18, CPU).double() - 32767.5) / 18918.6

    one, two = centred(1), centred(2)
    limit = 5 / (1 << 18) ** 0.5
    assert abs(float((one * two).mean())) < limit
    for lag in (1, 2, 7, 8, 9, 16):
        assert abs(float((one[lag:] * one[:-lag]).mean())) < limit


def test_derive_tells_combinations_apart() -> None:
    keys = {noise.derive(seed, a, b) for seed in range(5) for a in range(20) for b in range(20)}
    assert len(keys) == 5 * 20 * 20
    assert noise.derive(1, 2, 3) != noise.derive(1, 3, 2)
    assert noise.derive(-1, -2) == noise.derive(2**64 - 1, 2**64 - 2)
