"""A payload, for people."""

from __future__ import annotations

from weightgrad.codecs import Payload, decode
from weightgrad.codecs.registry import format_named
from weightgrad.wire import frame_bytes


def describe(payload: Payload, values: int) -> dict[str, object]:
    """What a frame holds, by name."""
    size = frame_bytes(payload)
    n = payload.numel
    view: dict[str, object] = {
        "format": f"{payload.codec} (id {format_named(payload.codec).wire_id})",
        "parameters": format_named(payload.codec).describe(payload.params),
        "dtype": str(payload.dtype).removeprefix("torch."),
        "shape": list(payload.shape),
        "elements": n,
        "frame_bytes": size,
        "body_bytes": payload.body.numel(),
        "bits_each": round(8 * size / n, 3) if n else None,
        "times_fp32": round(4 * n / size, 2) if n else None,
    }
    if values:
        flat = decode(payload).reshape(-1)
        view["values"] = [round(v, 6) for v in flat[:values].tolist()]
        view["norm"] = round(float(flat.double().norm()), 6) if n else 0.0
    return view
