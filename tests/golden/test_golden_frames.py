"""Golden frames: the bytes of every wire format, and the floats they decode to, never change unseen.

`frames.json` holds small tensors, what is done with them and the frame that came of it. A frame is
compared byte for byte on every backend. PowerSGD's is not, only what it decodes to: its factors
come from BLAS and LAPACK, which round differently from machine to machine, while decoding does not
use them. After a change of the format that is meant: `python tests/golden/rewrite.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from weightgrad import codecs, kernels, wire

FRAMES = Path(__file__).parent / "frames.json"
BACKENDS = kernels.BACKENDS if kernels.status().backend == "native" else ("reference",)
BLAS_DECIDES = {"lowrank"}


@dataclass(frozen=True)
class Case:
    """One golden frame: the payload of the last of these steps."""

    name: str
    spec: str
    key: int
    dtype: torch.dtype
    steps: tuple[Tensor, ...]
    frame: bytes
    decoded: bytes  # as little-endian float32


def read(document: dict[str, Any]) -> list[Case]:
    tensors = {
        name: torch.tensor([float(v) for v in entry["values"].split()]).view([int(n) for n in entry["shape"].split()])
        for name, entry in document["tensors"].items()
    }
    return [
        Case(
            name=case["name"],
            spec=case["spec"],
            key=case["key"],
            dtype=getattr(torch, case["dtype"]),
            steps=tuple(tensors[step].to(getattr(torch, case["dtype"])) for step in case["steps"].split()),
            frame=bytes.fromhex(case.get("frame", "")),
            decoded=bytes.fromhex(case.get("decoded", "")),
        )
        for case in document["cases"]
    ]


def encoded(case: Case) -> bytes:
    """The frame of the last step; each step has its own key."""
    codec = codecs.parse(case.spec)
    state = codec.init(case.steps[0])
    for number, x in enumerate(case.steps):
        payload, state = codec.encode(x, state, case.key + number)
    return wire.to_bytes(payload)


def decoded(frame: bytes) -> bytes:
    payload = wire.parse(frame)
    out = codecs.decode(payload, out=torch.empty(payload.shape))
    return out.numpy().astype("<f4").tobytes()


CASES = read(json.loads(FRAMES.read_text(encoding="utf-8")))
every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def test_every_format_has_a_golden_frame() -> None:
    assert {wire.parse(case.frame).codec for case in CASES} == {entry.name for entry in codecs.formats()}


@every_case
@pytest.mark.parametrize("backend", BACKENDS)
def test_encoding_gives_the_same_bytes(case: Case, backend: str) -> None:
    with kernels.use(backend):
        frame = encoded(case)
    if wire.parse(case.frame).codec in BLAS_DECIDES:
        ours, theirs = (codecs.decode(wire.parse(each)) for each in (frame, case.frame))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert len(frame) == len(case.frame)
    else:
        assert frame.hex() == case.frame.hex()


@every_case
@pytest.mark.parametrize("backend", BACKENDS)
def test_decoding_gives_the_same_floats(case: Case, backend: str) -> None:
    with kernels.use(backend):
        assert decoded(case.frame).hex() == case.decoded.hex()


@every_case
def test_a_frame_says_what_it_came_from(case: Case) -> None:
    payload = wire.parse(case.frame)
    assert payload.shape == tuple(case.steps[0].shape)
    assert payload.dtype == case.dtype
