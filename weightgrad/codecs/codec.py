"""What every codec is: a frozen value that turns tensors into payloads.

`encode(x, state, key)` is pure but for one thing: the state given to it is consumed. Its
buffers are updated in place and returned in the new state (a residual is as large as the
model; copying it would cost more than the codec). Decoding never needs the sender:
`weightgrad.codecs.decode(payload)`.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from weightgrad.codecs.payload import Payload
from weightgrad.errors import EncodeError, NonFiniteError, SpecError, StateError
from weightgrad.kernels import MAX_ELEMENTS, select
from weightgrad.kernels.fixed import INFINITY_BITS
from weightgrad.kernels.moments import largest_bits

State: TypeAlias = dict[str, Tensor]
"""Named tensors, nothing else, so that a checkpoint can hold it. Empty for most codecs."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Codec(ABC):
    """A way to turn a tensor into few bytes. Concrete codecs are frozen dataclasses."""

    spec_name: ClassVar[str]

    @property
    def unbiased(self) -> bool:
        """Whether the decoded tensor is the original on average over keys."""
        return False

    @property
    def carries_error(self) -> bool:
        """Whether it keeps its own error feedback, so that ef(...) around it would count it twice."""
        return False

    def init(self, like: Tensor) -> State:
        """A fresh state for tensors of this shape and device."""
        del like
        return {}

    @abstractmethod
    def encode(self, x: Tensor, state: State, key: int, *, out: Tensor | None = None) -> tuple[Payload, State]:
        """Encode a tensor. `out` is an optional uint8 buffer for the body, to be reused by the caller.

        A codec whose body has a size that depends on the values uses it when it is large enough.
        """

    def encode_feedback(
        self, x: Tensor, residual: Tensor, state: State, key: int, *, out: Tensor | None = None
    ) -> tuple[Payload, State]:
        """Encode x + residual and leave in `residual` (flat float32) what the payload does not say.

        On NonFiniteError the residual is as before, up to rounding.
        """
        from weightgrad.codecs.registry import decode_into

        flat = flat32(x)
        advance(residual, flat)
        try:
            payload, state = self.encode(residual.view(x.shape), state, key, out=out)
        except EncodeError:
            residual -= flat
            raise
        decode_into(payload, residual, -1)
        return dataclasses.replace(payload, dtype=x.dtype), state

    def __str__(self) -> str:
        return f"{self.spec_name}({', '.join(self._arguments())})"

    def _arguments(self) -> list[str]:
        """The first field always, as it names the codec's main dial; the others when not default."""
        shown = []
        for place, field in enumerate(dataclasses.fields(self)):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Codec):
                continue
            required = field.default is dataclasses.MISSING
            if isinstance(value, float):
                value = float(value)  # a NumPy float is one too, but its repr is no spec
            if required:
                shown.append(repr(value))
            elif value != field.default or (place == 0 and not isinstance(value, bool)):
                shown.append(f"{field.name}={value!r}")
        return shown


class Stage(Codec):
    """A codec that hands what it makes to the next one: `topk(0.01) > qsgd(bits=4)`."""

    then: Codec

    def __gt__(self, other: Codec) -> Codec:
        """The codec behind this stage; at the end of the chain if there are stages already."""
        if not isinstance(other, Codec):
            return NotImplemented
        last = self.then > other if isinstance(self.then, Stage) else other
        return dataclasses.replace(self, then=last)  # type: ignore[type-var]

    def __bool__(self) -> bool:
        # Python reads `a > b > c` as `(a > b) and (b > c)`, which would drop a silently.
        raise TypeError("write chains of more than two codecs as a > (b > c), or with codecs.parse")

    def __str__(self) -> str:
        from weightgrad.codecs.floats import Fp32

        own = f"{self.spec_name}({', '.join(self._arguments())})"
        return own if self.then == Fp32() else f"{own} > {self.then}"


def flat32(x: Tensor) -> Tensor:
    """The elements in order as one contiguous float32 vector; no copy when they are that already."""
    if x.dtype not in FLOATS:
        wanted = ", ".join(str(d).removeprefix("torch.") for d in FLOATS)
        raise EncodeError(f"cannot encode a tensor of dtype {x.dtype}; convert it to one of {wanted}")
    if x.numel() > MAX_ELEMENTS:
        raise EncodeError(f"a tensor of {x.numel()} elements is too large; split it below {MAX_ELEMENTS}")
    flat = x.detach().to(torch.float32).contiguous().view(-1)
    if x.dtype == torch.float64 and flat.numel() and not bool(torch.isfinite(flat).all()):
        require_finite(x.detach().reshape(-1))
        raise NonFiniteError("a float64 element is too large for float32; scale the tensor down")
    return flat


def require_finite(flat: Tensor) -> None:
    """Raise NonFiniteError naming the first element that is NaN or Inf."""
    if flat.dtype == torch.float32 and largest_bits(flat) < INFINITY_BITS:
        return
    bad = (~torch.isfinite(flat)).nonzero()
    if bad.numel():
        place = int(bad[0])
        raise NonFiniteError(
            f"element {place} of {flat.numel()} is {float(flat[place])} ({bad.numel()} such in all); "
            "encode only finite tensors: skip this step, or find where it came from"
        )


def advance(residual: Tensor, flat: Tensor) -> None:
    """residual += flat, unless that would make a NaN or Inf: then NonFiniteError, and it is as before."""
    done = select.scan(flat, residual, None, 0.0, select.Thresholds(math.inf, -math.inf), 0).done
    if done < flat.numel():
        residual[:done] -= flat[:done]
        raise not_finite(flat)


def not_finite(flat: Tensor) -> NonFiniteError:
    """The error for a tensor in which a kernel met a NaN or Inf; names the element."""
    try:
        require_finite(flat)
    except NonFiniteError as error:
        return error
    return NonFiniteError("the sum of the tensor and its residual, or a norm of it, is too large for float32")


def body_room(out: Tensor | None, nbytes: int, device: torch.device) -> Tensor:
    """The first `nbytes` of the caller's buffer, or a new one."""
    if out is None:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    if out.dtype != torch.uint8 or out.dim() != 1 or not out.is_contiguous() or out.device != device:
        raise EncodeError("out must be a contiguous 1-D uint8 tensor on the tensor's device")
    if out.storage_offset() % 8:
        raise EncodeError("out must start at a multiple of 8 bytes in its storage; do not slice it unevenly")
    if out.numel() < nbytes:
        raise EncodeError(f"out has {out.numel()} bytes and this tensor may take {nbytes}")
    return out[:nbytes]


def joined(parts: list[Tensor], out: Tensor | None) -> Tensor:
    """The parts of a body whose size is not known beforehand, one after the other; in `out` if they fit."""
    size = sum(part.numel() for part in parts)
    if out is None or out.numel() < size:
        return torch.cat(parts)
    room = body_room(out, size, parts[0].device)
    torch.cat(parts, out=room)
    return room


def state_tensor(state: State, name: str, shape: tuple[int, ...], codec: Codec, like: Tensor | None = None) -> Tensor:
    """A tensor of the state, checked: kernels work on its memory. `like` is on the device it must be on."""
    tensor = state.get(name)
    dtype = torch.int64 if name == "step" else torch.float32
    wanted = f"contiguous {dtype} of shape {list(shape)}" + (f" on {like.device}" if like is not None else "")
    found = "nothing"
    if tensor is not None:
        found = f"{tensor.dtype} of shape {list(tensor.shape)}, stride {tensor.stride()}, on {tensor.device}"
        fits = tuple(tensor.shape) == shape and tensor.dtype == dtype and tensor.is_contiguous()
        if fits and (like is None or tensor.device == like.device):
            return tensor
    raise StateError(
        f"{codec}: state[{name!r}] should be {wanted}, found {found}; "
        "make the state with codec.init(tensor) and pass the one the last encode returned"
    )


def choose(owner: str, field: str, value: object, allowed: tuple[object, ...]) -> None:
    """Validate a field that has a short list of values."""
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise SpecError(f"{owner}: {field}={value!r} is not allowed; choose one of {', '.join(map(repr, allowed))}")


def between(owner: str, field: str, value: object, low: float, high: float, *, whole: bool = False) -> None:
    """Validate a number in low..high."""
    good = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not good or not low <= value <= high:  # type: ignore[operator]
        kind = "a whole number" if whole else "a number"
        raise SpecError(f"{owner}: {field}={value!r} is not allowed; it must be {kind} from {low:g} to {high:g}")
