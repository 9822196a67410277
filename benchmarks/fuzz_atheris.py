"""Coverage-guided fuzzing of every parser that reads a stranger's bytes, with atheris (libFuzzer for Python).

    pip install atheris
    python benchmarks/fuzz_atheris.py --target message --seconds 600
    python benchmarks/fuzz_atheris.py --target message --seconds 600 --keep

It begins from good inputs and from the kept corpus (tests/wire/corpus, hexadecimal text), and ends with 1 if something
else than an error of ours escapes; the input is printed. `--keep` adds what reached new code to the corpus. Frames have
checksums, which the mutator makes hold again, or they would hide the rest of the parser. Without atheris,
`benchmarks/fuzz_messages.py` does the same blindly.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

MOST_BYTES = 1024  # of an input
MOST_KEPT = 150  # inputs of a target
PARSERS = [
    "weightgrad.wire",
    "weightgrad.codecs",
    "weightgrad.runtime.transport",
    "weightgrad.runtime.admission_messages",
]


def fuzz(target: str, options: list[str]) -> None:
    """The fuzzer; libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=PARSERS):
        from tests.wire.fuzz_targets import TARGETS
        from tests.wire.message_damage import reseal

    def mutate(data: bytes, size: int, seed: int) -> bytes:
        made = bytearray(atheris.Mutate(data, size))
        if seed % 4 and target in ("message", "frame"):
            reseal(made)
        return bytes(made[:size])

    atheris.Setup([sys.argv[0], *options], TARGETS[target], custom_mutator=mutate)
    atheris.Fuzz()


def run(target: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A process with the fuzzer in it."""
    command = [sys.executable, __file__, "--target", target, "--inside", *options]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def main() -> None:
    """Write the corpus to files, fuzz, and say how it ended."""
    parser = argparse.ArgumentParser(description="Coverage-guided fuzzing with atheris.")
    parser.add_argument("--target", choices=["message", "frame", "record", "admission"], required=True)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--keep", action="store_true", help="add what reached new code to the corpus")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given, options = parser.parse_known_args()
    if given.inside:
        fuzz(given.target, options)
        return
    from tests.wire.fuzz_targets import CORPUS, kept, samples
    from weightgrad.machine import measured_on

    with tempfile.TemporaryDirectory() as folder:
        work, crashes = Path(folder) / "work", Path(folder) / "crashes"
        work.mkdir()
        crashes.mkdir()
        for number, data in enumerate([*samples(given.target), *kept(given.target)]):
            (work / f"{number:05d}").write_bytes(data)
        prefix = f"-artifact_prefix={crashes}/"
        done = run(given.target, str(work), f"-max_total_time={given.seconds}", f"-max_len={MOST_BYTES}", prefix)
        found = [path.read_bytes().hex() for path in crashes.iterdir()]
        ran = re.findall(r"#(\d+)\s+(?:DONE|NEW|REDUCE|pulse).*?cov: (\d+)", done.stdout)
        if done.returncode or found or not ran:
            print(done.stdout[-4000:])
            print("\n".join(found))
            sys.exit(1)
        count, edges = ran[-1]
        print(
            f"{given.target}: {int(count):,} inputs in {given.seconds} s, {edges} edges, none escaped; {measured_on()}"
        )
        if given.keep:  # libFuzzer has added what reached new code
            grown = {path.read_bytes() for path in work.iterdir()} - {b"", *samples(given.target)}
            chosen = sorted(grown, key=lambda data: (len(data), data))[:MOST_KEPT]
            CORPUS.mkdir(exist_ok=True)
            (CORPUS / f"{given.target}.hex").write_text("".join(f"{data.hex()}\n" for data in chosen))
            print(f"  {len(chosen)} of {len(grown)} inputs kept")


if __name__ == "__main__":
    main()
