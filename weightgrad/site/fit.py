"""Whether flat vectors, payloads and saved states fit the layout they are used with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weightgrad.codecs import Payload
from weightgrad.errors import ProtocolError, StateError, StrategyError
from weightgrad.site.layout import Layout


def require_flat(layout: Layout, flat: Tensor, what: str) -> None:
    """Raise unless this is one contiguous float32 vector with an element for each of the layout."""
    good = flat.dtype == torch.float32 and tuple(flat.shape) == (layout.numel,) and flat.is_contiguous()
    if not good:
        found = f"{flat.dtype} of shape {list(flat.shape)}, stride {flat.stride()}"
        raise StrategyError(
            f"{what} must be one contiguous torch.float32 vector of {layout.numel} elements, got {found}; "
            "make it with layout.gather(module)"
        )


def require_payloads(layout: Layout, payloads: Sequence[Payload]) -> None:
    """Raise unless there is one payload a slot, in order and of its shape."""
    if len(payloads) != len(layout.slots):
        raise ProtocolError(f"{len(payloads)} payloads for {len(layout.slots)} slots; send one a slot, in order")
    for slot, payload in zip(layout.slots, payloads, strict=True):
        if payload.shape != slot.shape:
            raise ProtocolError(
                f"the payload for {slot.name} has shape {list(payload.shape)}, expected {list(slot.shape)}; "
                "both ends must use the same model"
            )


def restored(owner: str, present: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the saved tensors, on the devices of the present ones, whose names and shapes they must have."""
    missing, extra = sorted(present.keys() - saved.keys()), sorted(saved.keys() - present.keys())
    if missing or extra:
        raise StateError(
            f"{owner}: a saved state without {missing[:3]} and with unknown {extra[:3]}; "
            "it was saved by another model, codec or optimizer"
        )
    for name, now in present.items():
        if saved[name].shape != now.shape or saved[name].dtype != now.dtype:
            raise StateError(
                f"{owner}: {name} should be {now.dtype} of shape {list(now.shape)}, "
                f"got {saved[name].dtype} of shape {list(saved[name].shape)}; it was saved by another model or codec"
            )
    return {name: saved[name].detach().to(now.device, copy=True).contiguous() for name, now in present.items()}
