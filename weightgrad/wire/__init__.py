"""Payloads as bytes: what goes over a link, into a file, or to a reader in another language.

    data = wire.to_bytes(payload)
    payload = wire.parse(data)          # or any subclass of FrameError, never anything else

`frame` holds the format of a frame, `messages` and `message_bytes` those of messages, `versions` every version number,
and `docs/wire-format.md` the specification.
"""

from __future__ import annotations

from weightgrad.wire.frame import (
    Limits,
    frame_bytes,
    frame_size,
    frames,
    parse,
    parse_prefix,
    to_buffers,
    to_bytes,
)

__all__ = [
    "Limits",
    "frame_bytes",
    "frame_size",
    "frames",
    "parse",
    "parse_prefix",
    "to_buffers",
    "to_bytes",
]
