"""Every version that two ends, or a writer and a later reader, must agree on.

A version changes when the meaning of bytes changes, so that an old reader refuses what it would misread.
"""

from __future__ import annotations

FRAME_VERSION = 1
"""The layout of a frame: one encoded tensor. `docs/wire-format.md`, "Frame"."""

MESSAGE_VERSION = 2
"""The layout of a message between a site and the global server. `docs/wire-format.md`, "Messages"."""

STREAM_VERSION = 2
"""The records that carry messages in chunks over one stream of a transport. `runtime/transport/records.py`."""

TRANSPORT_VERSION = "5"
"""The calls and metadata of the gRPC transport. `runtime/transport/grpc_settings.py`."""

HANDSHAKE_VERSION = 4
"""The JSON admission request and reply. `runtime/admission_messages.py`."""

INPUT_LOG_VERSION = 1
"""The files of the log of inputs. `runtime/checkpoints/input_log.py`."""
