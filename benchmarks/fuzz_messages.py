"""Damages messages at random: each must be refused with an error of its own, or be exactly what a writer makes.

    python benchmarks/fuzz_messages.py --mutants 1000000 --seed 7

The tests do the same with 20,000 (`tests/wire/test_message_fuzz.py`), whose mutations and samples this takes. The exit
code is 1 if one escapes.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.wire.message_damage import MUTATIONS, reseal
from tests.wire.message_samples import LIMITS, seeds
from tests.wire.test_message_fuzz import use
from weightgrad import errors
from weightgrad.machine import measured_on
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_bytes import pack, unpack


def main() -> None:
    """Damage, parse, and print how it ended."""
    parser = argparse.ArgumentParser(description="Damaged messages; none may escape.")
    parser.add_argument("--mutants", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rng, whole, began = random.Random(given.seed), list(seeds()), time.monotonic()
    held, outcomes = Intervals(((1, 6), (9, 10), (25, 70))), Counter[str]()
    for number in range(given.mutants):
        data = bytearray(rng.choice(whole))
        for _ in range(rng.randint(1, 3)):
            rng.choice(MUTATIONS)(rng, data)
        if rng.random() < 0.6:
            reseal(data)
        try:
            message = unpack(bytes(data), LIMITS)
            if pack(message) != data:
                sys.exit(f"mutant {number} of seed {given.seed} is read as another message: {data.hex()}")
            outcomes["Message"] += 1
            use(message, held)
        except errors.WeightGradError as error:
            outcomes[type(error).__name__] += 1
    seconds = time.monotonic() - began
    print(f"{given.mutants:,} mutants of seed {given.seed} in {seconds:.0f} s, none escaped; {measured_on()}")
    for name, count in outcomes.most_common():
        print(f"  {name:20} {count:,}")


if __name__ == "__main__":
    main()
