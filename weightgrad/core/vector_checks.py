"""Checks of flat vectors, payloads and checkpoint tensors, and the names of checkpoint tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weightgrad.codecs import Payload
from weightgrad.core.layout import Layout
from weightgrad.errors import ProtocolError, StateError, StrategyError


def require_flat(layout: Layout, flat: Tensor, what: str) -> None:
    """Check that a tensor is one contiguous float32 vector with an element for each element of the layout.

    Args:
        layout: the model's layout.
        flat: the tensor.
        what: what the tensor is, for the error.

    Raises:
        StrategyError: it is not.
    """
    good = flat.dtype == torch.float32 and tuple(flat.shape) == (layout.numel,) and flat.is_contiguous()
    if not good:
        found = f"{flat.dtype} of shape {list(flat.shape)}, stride {flat.stride()}"
        raise StrategyError(
            f"{what} must be one contiguous torch.float32 vector of {layout.numel} elements, got {found}; "
            "make it with layout.gather(module)"
        )


def require_payloads(layout: Layout, payloads: Sequence[Payload]) -> None:
    """Check that there is one payload for each slot, in order and of its shape.

    Raises:
        ProtocolError: the payloads do not fit the layout.
    """
    if len(payloads) != len(layout.slots):
        raise ProtocolError(f"{len(payloads)} payloads for {len(layout.slots)} slots; send one a slot, in order")
    for slot, payload in zip(layout.slots, payloads, strict=True):
        if payload.shape != slot.shape:
            raise ProtocolError(
                f"the payload for {slot.name} has shape {list(payload.shape)}, wanted {list(slot.shape)}; "
                "both ends must use the same model"
            )


def restored(owner: str, present: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy the tensors of a checkpoint to the devices of the present ones.

    Args:
        owner: whose tensors they are, for errors.
        present: the tensors to replace.
        saved: the tensors of the checkpoint.

    Returns:
        The copies, by name.

    Raises:
        StateError: names, shapes or dtypes differ from the present ones.
    """
    missing, extra = sorted(present.keys() - saved.keys()), sorted(saved.keys() - present.keys())
    if missing or extra:
        raise StateError(
            f"{owner}: a checkpoint that lacks {missing[:3]} and has unknown {extra[:3]}; "
            "it was saved by another model, codec or optimizer"
        )
    for name, now in present.items():
        if saved[name].shape != now.shape or saved[name].dtype != now.dtype:
            raise StateError(
                f"{owner}: {name} should be {now.dtype} of shape {list(now.shape)}, "
                f"found {saved[name].dtype} of shape {list(saved[name].shape)}; it was saved by another model or codec"
            )
    return {name: saved[name].detach().to(now.device, copy=True).contiguous() for name, now in present.items()}


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under longer names, to join the state of one part with that of others."""
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names start with the prefix, without it: the state of one part."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
