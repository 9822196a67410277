"""What a fuzzer feeds with bytes: every parser that reads what a stranger has sent. Only errors of its own may escape.

`benchmarks/fuzz_atheris.py` looks for new inputs with them; the inputs it found worth keeping are in `corpus/`, one in
each line, in hexadecimal digits, and `test_corpus.py` runs them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torch

from weightgrad import codecs, wire
from weightgrad.codecs.registry import decode_into
from weightgrad.core.layout import Layout
from weightgrad.errors import FrameError, ProtocolError, WeightGradError
from weightgrad.kernels import fixed
from weightgrad.runtime import admission_messages
from weightgrad.runtime.transport import records
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.message_bytes import pack, unpack

from .message_samples import LIMITS, payload, seeds
from .test_message_fuzz import use

CORPUS = Path(__file__).parent / "corpus"
_HELD = Intervals(((1, 6), (9, 10), (25, 70)))
_FRAME_LIMITS = wire.Limits(max_elements=1024, max_body_bytes=4096)


def message(data: bytes) -> None:
    """A message between site and server: it is exactly what a writer makes of what was read."""
    try:
        found = unpack(data, LIMITS)
    except (FrameError, ProtocolError):
        return
    assert pack(found) == data
    with suppress(WeightGradError):
        use(found, _HELD)


def frame(data: bytes) -> None:
    """A frame, and decoding what is in it."""
    with suppress(WeightGradError):
        found = wire.parse(data, limits=_FRAME_LIMITS)
        assert wire.to_bytes(found) == data
        decode_into(found, torch.zeros(found.numel), fixed.ADD)


def record(data: bytes) -> None:
    """A record of a stream: a chunk of a message, acknowledgements, a greeting."""
    try:
        found = records.parse(data)
    except ProtocolError:
        return
    if not isinstance(found, records.Goodbye):  # its text is read leniently
        assert records.to_bytes(found) == data


def admitted(data: bytes) -> None:
    """What a site or a rank says first."""
    with suppress(ProtocolError):
        found = admission_messages.parse_request(data)
        Layout.of_shapes((name, tuple(shape)) for name, shape in found.layout)
    with suppress(ProtocolError):
        admission_messages.parse_rank_request(data)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "message": message,
    "frame": frame,
    "record": record,
    "admission": admitted,
}


def samples(target: str) -> Iterator[bytes]:
    """Good inputs, from which a fuzzer begins."""
    if target == "message":
        yield from seeds()
    elif target == "frame":
        specs = [spec for spec in ("fp32", "bf16", "qsgd(bits=4)", "terngrad", "topk(0.1)", "sign()") if _known(spec)]
        yield from (wire.to_bytes(payload(spec, (5, 8))) for spec in specs)
    elif target == "record":
        yield records.to_bytes(records.Hello(5, 6))
        yield records.to_bytes(records.Ack(3, ((1, 2), (2, 0))))
        yield records.to_bytes(records.Goodbye("done"))
        yield records.to_bytes(records.Chunk(1, 2, 9, memoryview(b"values")))
    else:
        yield admission_messages.AdmissionRequest("east", [("weight", [2, 3])], -1, optimizer={"kind": "sgd"}).pack()
        yield admission_messages.RankRequest("east", 1).pack()


def _known(spec: str) -> bool:
    with suppress(WeightGradError):
        return codecs.parse(spec) is not None
    return False


def kept(target: str) -> list[bytes]:
    """The inputs that were kept."""
    path = CORPUS / f"{target}.hex"
    return [bytes.fromhex(line) for line in path.read_text().splitlines()] if path.exists() else []
