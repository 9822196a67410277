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
from typing import ClassVar, NamedTuple, TypeAlias

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


class Benchmark(NamedTuple):
    """A spec that `weightgrad bench codecs` measures, and the least speed it must reach.

    Attributes:
        spec: The codec with its arguments.
        encode: Least encoding speed of the native kernels on one thread, as a ratio to torch's `copy_`; None for none.
        decode: The same for decoding.
    """

    spec: str
    encode: float | None = None
    decode: float | None = None


class Codec(ABC):
    """A way to turn a tensor into few bytes. Concrete codecs are frozen dataclasses.

    Attributes:
        spec_name: The codec's name in a spec; the decorator `codec` sets it.
        encode_gb_s: Encoding speed on one thread in GB/s of float32, from which `cost` takes virtual time.
        decode_gb_s: Decoding speed in the same unit.
        benchmarks: What `weightgrad bench codecs` measures of this codec.
    """

    spec_name: ClassVar[str]
    encode_gb_s: ClassVar[float]
    decode_gb_s: ClassVar[float]
    benchmarks: ClassVar[tuple[Benchmark, ...]] = ()

    @property
    def unbiased(self) -> bool:
        """Whether the decoded tensor is the original on average over keys."""
        return False

    @property
    def carries_error(self) -> bool:
        """Whether the codec keeps its own error feedback, so that ef(...) around it would count the error twice."""
        return False

    def init(self, like: Tensor) -> State:
        """Make a fresh state.

        Args:
            like: A tensor of the shape and on the device of those to be encoded.

        Returns:
            The state for the first call of `encode`.
        """
        del like
        return {}

    @abstractmethod
    def encode(self, x: Tensor, state: State, key: int, *, out: Tensor | None = None) -> tuple[Payload, State]:
        """Encode a tensor.

        Args:
            x: The tensor; float32, float16, bfloat16 or float64.
            state: What `init` or the last call returned. It is consumed: its tensors are changed in place.
            key: Picks the noise of stochastic rounding and the samples that a codec takes.
            out: A uint8 buffer for the body, to be used again by the caller. A codec whose body has a size that
                depends on the values uses it when it is large enough.

        Returns:
            The payload, and the state for the next call.

        Raises:
            EncodeError: The tensor has a NaN or Inf (NonFiniteError), or values or a dtype that the codec cannot
                encode; the state is then as before, up to rounding.
            StateError: The state is not of this codec and shape.
        """

    def encode_feedback(
        self, x: Tensor, residual: Tensor, state: State, key: int, *, out: Tensor | None = None
    ) -> tuple[Payload, State]:
        """Encode x + residual and leave in the residual what the payload does not say.

        Args:
            x: The tensor.
            residual: Flat float32; on NonFiniteError it is as before, up to rounding.
            state: As for `encode`.
            key: As for `encode`.
            out: As for `encode`.

        Returns:
            The payload, and the state for the next call.
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

    def encode_residual(
        self, residual: Tensor, state: State, key: int, *, out: Tensor | None = None
    ) -> tuple[Payload, State]:
        """Encode a residual that has the update already; leave in it what the payload does not say.

        Args:
            residual: Contiguous float32 in the shape of the tensor.
            state: As for `encode`.
            key: As for `encode`.
            out: As for `encode`.

        Returns:
            The payload, and the state for the next call: those of `encode_feedback` with a tensor of zeros.
        """
        return self.encode_feedback(torch.zeros_like(residual), residual.view(-1), state, key, out=out)

    def __str__(self) -> str:
        return f"{self.spec_name}({', '.join(self._arguments())})"

    def _arguments(self) -> list[str]:
        """The arguments as text: the first field always, because it is the main one, the others where not default."""
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
        """Put a codec behind this stage, or at the end of the chain if there are stages behind it already."""
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
    """View a tensor as one contiguous float32 vector; it is copied only where it must be.

    Raises:
        EncodeError: Its dtype is no float, or it has too many elements.
        NonFiniteError: A float64 element is NaN, Inf or too large for float32.
    """
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
    """Add `flat` to the residual; where that makes a NaN or Inf, undo it and raise NonFiniteError."""
    done = select.scan(flat, residual, None, 0.0, select.Thresholds(math.inf, -math.inf), 0).done
    if done < flat.numel():
        residual[:done] -= flat[:done]
        raise not_finite(flat)


def not_finite(flat: Tensor) -> NonFiniteError:
    """Make the error for a tensor in which a kernel met a NaN or Inf; it names the element."""
    try:
        require_finite(flat)
    except NonFiniteError as error:
        return error
    return NonFiniteError("the sum of the tensor and its residual, or a norm of it, is too large for float32")


def body_room(out: Tensor | None, nbytes: int, device: torch.device) -> Tensor:
    """Take the first `nbytes` of the caller's buffer, or a new one where there is none."""
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
    """Join the sections of a body whose size is not known beforehand; in `out` if they fit."""
    size = sum(part.numel() for part in parts)
    if out is None or out.numel() < size:
        return torch.cat(parts)
    room = body_room(out, size, parts[0].device)
    torch.cat(parts, out=room)
    return room


def state_tensor(state: State, name: str, shape: tuple[int, ...], codec: Codec, like: Tensor | None = None) -> Tensor:
    """Take a tensor from a state and check it, because kernels work on its memory.

    Args:
        state: The state that was given to `encode`.
        name: Which tensor of it.
        shape: The shape it must have.
        codec: For the message.
        like: A tensor on the device it must be on, or None.

    Raises:
        StateError: It is missing, or of another shape, dtype, layout or device.
    """
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
    """Check a field that has a short list of values; raise SpecError if it has another."""
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise SpecError(f"{owner}: {field}={value!r} is not allowed; choose one of {', '.join(map(repr, allowed))}")


def between(owner: str, field: str, value: object, low: float, high: float, *, whole: bool = False) -> None:
    """Check that a field is a number from `low` to `high`; raise SpecError if it is not."""
    good = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not good or not low <= value <= high:  # type: ignore[operator]
        kind = "a whole number" if whole else "a number"
        raise SpecError(f"{owner}: {field}={value!r} is not allowed; it must be {kind} from {low:g} to {high:g}")
