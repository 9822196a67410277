"""What every codec promises, asked of every codec in the registry."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from weightgrad import codecs, errors, kernels, wire
from weightgrad.codecs.payload import Payload

# At least one spec a codec; `test_every_codec_is_in_the_suite` sees to that.
SPECS = [
    "fp32()",
    "fp16()",
    "bf16()",
    "qsgd(bits=4)",
    "qsgd(bits=2, bucket=64, norm='l2')",
    "qsgd(bits=3, rounding='nearest')",
    "qsgd(bits=8, bucket=4294967296)",
    "elias(bits=2)",
    "elias(bits=4, bucket=32, norm='max')",
    "terngrad()",
    "terngrad(clip=0.0)",
    "terngrad(scaler='shared')",
    "onebit()",
    "onebit(feedback=False)",
    "adaptive(pi=8)",
    "adaptive(pi=8, feedback=False)",
    "powersgd(rank=2)",
    "powersgd(rank=2, feedback=False)",
    "sign()",
    "sign(scale='one')",
    "codebook(bits=4)",
    "codebook(bits=1)",
    "topk(0.1)",
    "topk(0.1, exact=False)",
    "threshold(0.5)",
    "threshold(0.0)",
    "dgc(fraction=0.05)",
    "dgc(fraction=0.01) > fp16()",
    "dgc(fraction=0.01, momentum=0.5, clip=1.0, warmup=8) > qsgd(bits=8)",
    "clip(2.5)",
    "clip(2.5) > qsgd(bits=4)",
    "clip(2.5) > onebit()",
    "ef(fp16())",
    "ef(sign())",
    "ef(terngrad())",
    "ef(qsgd(bits=2))",
    "ef(elias())",
    "ef(codebook())",
    "ef(onebit(feedback=False))",
    "ef(adaptive(pi=8, feedback=False))",
    "ef(powersgd(2, feedback=False))",
    "ef(topk(0.1, exact=False))",
    "ef(threshold(0.5))",
    "ef(clip(2.5) > terngrad())",
    "ef(topk(0.01) > qsgd(bits=4, bucket=512))",
    "topk(0.2) > (clip(2.5) > elias())",
    "warmup(8, sign())",
    "warmup(0, onebit())",
    "ef(warmup(0, qsgd(bits=4)))",
    "lossaware()",
    "lossaware(exact=True)",
    "lossaware(bits=1)",
    "lossaware(bits=4)",
    "lossaware(bits=5, per='row')",
    "lossaware(bits=1, per='row')",
    "lossaware(per='row')",
]
# Another key gives other bytes.
STOCHASTIC = {
    "qsgd(bits=4)",
    "qsgd(bits=2, bucket=64, norm='l2')",
    "qsgd(bits=8, bucket=4294967296)",
    "elias(bits=2)",
    "elias(bits=4, bucket=32, norm='max')",
    "terngrad()",
    "terngrad(clip=0.0)",
    "terngrad(scaler='shared')",
    "dgc(fraction=0.01, momentum=0.5, clip=1.0, warmup=8) > qsgd(bits=8)",
    "clip(2.5) > qsgd(bits=4)",
    "ef(terngrad())",
    "ef(qsgd(bits=2))",
    "ef(elias())",
    "ef(clip(2.5) > terngrad())",
    "ef(topk(0.01) > qsgd(bits=4, bucket=512))",
    "topk(0.2) > (clip(2.5) > elias())",
    "ef(warmup(0, qsgd(bits=4)))",
}
# The body lands in the caller's buffer.
FILLS_OUT = {
    "fp32()",
    "fp16()",
    "bf16()",
    "qsgd(bits=4)",
    "qsgd(bits=2, bucket=64, norm='l2')",
    "qsgd(bits=3, rounding='nearest')",
    "qsgd(bits=8, bucket=4294967296)",
    "terngrad()",
    "terngrad(clip=0.0)",
    "terngrad(scaler='shared')",
    "onebit()",
    "onebit(feedback=False)",
    "sign()",
    "sign(scale='one')",
    "codebook(bits=4)",
    "codebook(bits=1)",
    "clip(2.5)",
    "clip(2.5) > qsgd(bits=4)",
    "clip(2.5) > onebit()",
    "ef(fp16())",
    "ef(sign())",
    "ef(terngrad())",
    "ef(qsgd(bits=2))",
    "ef(codebook())",
    "ef(onebit(feedback=False))",
    "ef(clip(2.5) > terngrad())",
    "warmup(8, sign())",
    "warmup(0, onebit())",
    "ef(warmup(0, qsgd(bits=4)))",
}
# More than 2**24 elements, one encode and decode each. Left out: one scale a row (fifty passes over
# all rows) and codes of 5 bits, which take seconds at this size.
LARGE = [
    "fp32()",
    "fp16()",
    "bf16()",
    "qsgd(bits=4)",
    "elias(bits=2)",
    "terngrad()",
    "onebit()",
    "adaptive(pi=8)",
    "powersgd(rank=2, feedback=False)",
    "sign()",
    "codebook(bits=4)",
    "topk(0.1)",
    "topk(0.1, exact=False)",
    "threshold(0.5)",
    "dgc(fraction=0.05)",
    "clip(2.5) > qsgd(bits=4)",
    "ef(topk(0.01) > qsgd(bits=4, bucket=512))",
    "lossaware()",
    "lossaware(bits=1)",
    "lossaware(bits=4)",
]
KEY = 0x5EED
BACKENDS = kernels.BACKENDS if kernels.status().backend == "native" else ("reference",)

every_spec = pytest.mark.parametrize("spec", SPECS)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def subnormals() -> Tensor:
    return randn(37, 5) * 1e-41


def mixed_sizes() -> Tensor:
    x = randn(61, 83) * torch.exp(2 * randn(61, 83, seed=1))
    x.view(-1)[::17] = 0.0
    x.view(-1)[5::23] = -0.0
    x.view(-1)[7::29] = 1e-41
    return x


CASES: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.empty(0),
    "no columns": lambda: torch.empty(3, 0),
    "no rows": lambda: torch.empty(0, 4, 2),
    "0-d": lambda: torch.tensor(-0.375),
    "one element": lambda: torch.tensor([0.75]),
    "one of four dimensions": lambda: torch.full((1, 1, 1, 1), -2.0),
    "zeros": lambda: torch.zeros(100),
    "negative zeros": lambda: torch.full((9, 7), -0.0),
    "a vector of 33": lambda: randn(33),
    "a vector of 1025": lambda: randn(1025),
    "a vector of 4999": lambda: randn(4999),
    "one column": lambda: randn(77, 1),
    "one row": lambda: randn(1, 77),
    "a matrix": lambda: randn(31, 129),
    "filters": lambda: randn(16, 5, 3, 3),
    "mixed sizes": mixed_sizes,
    "transposed": lambda: randn(17, 43).t(),
    "a strided slice": lambda: randn(40, 60)[::3, 1::2],
    "a permuted view": lambda: randn(4, 6, 5, 3).permute(2, 0, 3, 1),
    "expanded": lambda: randn(1, 19).expand(12, 19),
    "bfloat16": lambda: randn(23, 29).to(torch.bfloat16),
    "float16": lambda: randn(23, 29).to(torch.float16),
    "float64": lambda: randn(23, 29).to(torch.float64),
    "subnormals": subnormals,
    "the smallest": lambda: torch.full((40,), 1e-45),
    "constant": lambda: torch.full((100, 10), 0.1),
    "constant and negative": lambda: torch.full((3001,), -1.0 / 3.0),
    "huge": lambda: torch.full((20, 30), 3e38),
    "huge of both signs": lambda: 3e38 * torch.sign(randn(20, 30)),
    "one huge": lambda: torch.cat((randn(500), torch.tensor([-3e38]))),
    "needs a gradient": lambda: randn(50).requires_grad_(),
}
# Finite, but perhaps not in the format: a codec may refuse these, with an EncodeError.
MAY_REFUSE = {"huge", "huge of both signs", "one huge"}


def bits(x: Tensor) -> bytes:
    """The bytes of a tensor's elements in order."""
    return x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def image(payload: Payload) -> tuple[object, ...]:
    return payload.codec, payload.dtype, payload.shape, payload.params, bits(payload.body)


def encode(codec: codecs.Codec, x: Tensor, key: int = KEY) -> tuple[Payload, codecs.State]:
    return codec.encode(x, codec.init(x), key)


def assert_state_is_sound(state: codecs.State) -> None:
    for name, tensor in state.items():
        # A threshold of infinity is how adaptive says that nothing was sent yet.
        if name.removeprefix("inner.") != "thresholds":
            assert bool(torch.isfinite(tensor).all()), name
        assert not bool(torch.isnan(tensor).any()), name


def names_in(codec: codecs.Codec) -> Iterator[str]:
    yield codec.spec_name
    for field in ("then", "inner"):
        inside = getattr(codec, field, None)
        if isinstance(inside, codecs.Codec):
            yield from names_in(inside)


def test_every_codec_is_in_the_suite() -> None:
    tested = {name for spec in SPECS for name in names_in(codecs.parse(spec))}
    assert tested == set(codecs.available())


def test_every_format_is_written_by_the_suite() -> None:
    x = randn(20, 30)
    written = {encode(codecs.parse(spec), x)[0].codec for spec in SPECS}
    assert written == {entry.name for entry in codecs.formats()}


def test_the_lists_name_specs_of_the_suite() -> None:
    assert set(SPECS) >= STOCHASTIC | FILLS_OUT | set(LARGE)
    assert len(SPECS) == len(set(SPECS))


@every_spec
def test_its_name_stands_for_it(spec: str) -> None:
    codec = codecs.parse(spec)
    again = codecs.parse(str(codec))
    assert again == codec
    assert hash(again) == hash(codec)
    assert str(again) == str(codec)


@pytest.mark.parametrize("case", CASES)
@every_spec
def test_round_trip(spec: str, case: str) -> None:
    """One encode of one tensor, and all that must hold for the payload."""
    codec, x = codecs.parse(spec), CASES[case]()
    before = bits(x)
    try:
        payload, state = encode(codec, x)
    except errors.EncodeError:
        assert case in MAY_REFUSE
        assert bits(x) == before
        return
    assert bits(x) == before
    assert_state_is_sound(state)
    assert payload.dtype == x.dtype
    assert payload.shape == tuple(x.shape)
    assert payload.body.dtype == torch.uint8
    assert payload.body.dim() == 1
    assert payload.body.is_contiguous()
    decoded = codecs.decode(payload)
    assert decoded.dtype == x.dtype
    assert decoded.shape == x.shape
    assert not decoded.requires_grad
    assert bool(torch.isfinite(decoded).all())
    if case in {"zeros", "negative zeros"} and spec != "sign(scale='one')":
        assert not bool(decoded.any())
    assert image(encode(codec, CASES[case]())[0]) == image(payload)

    received = wire.parse(wire.to_bytes(payload))
    assert image(received) == image(payload)
    assert bits(codecs.decode(received)) == bits(decoded)


@every_spec
def test_points_the_way_of_the_tensor(spec: str) -> None:
    x = randn(64, 4) @ randn(4, 48, seed=1) + 0.5 * randn(64, 48, seed=2)
    decoded = codecs.decode(encode(codecs.parse(spec), x)[0])
    cosine = torch.nn.functional.cosine_similarity(decoded.view(-1), x.view(-1), dim=0)
    assert float(cosine) > (0.15 if "l2" in spec or "elias" in spec or "0.01" in spec else 0.35)


@every_spec
def test_backends_agree(spec: str) -> None:
    """Bytes, floats and states, over three steps; sizes with tails of every kind."""
    codec = codecs.parse(spec)
    for shape in [(4999,), (61, 83), (9, 3, 5, 5)]:
        results = {}
        for backend in BACKENDS:
            with kernels.use(backend):
                seen: list[object] = []
                state = codec.init(torch.empty(shape))
                for step in range(3):
                    x = randn(*shape, seed=step) * torch.exp(2 * randn(*shape, seed=9 + step))
                    x.view(-1)[::13] = 0.0
                    x.view(-1)[1::19] = -0.0
                    payload, state = codec.encode(x, state, KEY + step)
                    seen += [image(payload), bits(codecs.decode(payload))]
                    seen += [(name, bits(tensor)) for name, tensor in sorted(state.items())]
                results[backend] = seen
        for backend in BACKENDS[1:]:
            for place, (ours, theirs) in enumerate(zip(results[BACKENDS[0]], results[backend], strict=True)):
                assert ours == theirs, f"{backend} differs from {BACKENDS[0]} for {shape} at {place}"


@every_spec
def test_another_key_gives_other_bytes_if_it_is_stochastic(spec: str) -> None:
    codec, x = codecs.parse(spec), randn(50, 60)
    seen = {bits(encode(codec, x, key)[0].body) for key in (0, 1, 2**63, 2**64 - 1)}
    assert len(seen) == (4 if spec in STOCHASTIC else 1)


@every_spec
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_and_inf_are_refused_and_leave_a_usable_state(spec: str, backend: str) -> None:
    codec, shape = codecs.parse(spec), (61, 83)
    last = math.prod(shape) - 1
    with kernels.use(backend):
        state = codec.init(torch.empty(shape))
        _, state = codec.encode(randn(*shape), state, KEY)
        for bad in (math.nan, math.inf, -math.inf):
            for place in (0, 2500, last):
                x = randn(*shape, seed=1)
                x.view(-1)[place] = bad
                before = bits(x)
                with pytest.raises(errors.NonFiniteError, match=rf"element {place} of {last + 1} is {bad}"):
                    codec.encode(x, state, KEY)
                assert bits(x) == before
                assert_state_is_sound(state)
        payload, state = codec.encode(randn(*shape, seed=2), state, KEY)
        assert_state_is_sound(state)
        assert bool(torch.isfinite(codecs.decode(payload)).all())


@every_spec
def test_nan_is_refused_in_every_dtype(spec: str) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        x = randn(40).to(dtype)
        x[13] = math.nan
        with pytest.raises(errors.NonFiniteError, match="element 13"):
            encode(codecs.parse(spec), x)


@every_spec
def test_a_float64_beyond_float32_is_refused(spec: str) -> None:
    x = torch.tensor([1.0, 1e300], dtype=torch.float64)
    with pytest.raises(errors.NonFiniteError, match="too large for float32"):
        encode(codecs.parse(spec), x)


@every_spec
def test_other_dtypes_are_refused(spec: str) -> None:
    codec = codecs.parse(spec)
    for dtype in (torch.int64, torch.uint8, torch.bool, torch.complex64):
        with pytest.raises(errors.EncodeError, match="convert it to one of float32, float16"):
            codec.encode(torch.ones(20, dtype=dtype), codec.init(torch.ones(20)), KEY)


STATEFUL = [spec for spec in SPECS if codecs.parse(spec).init(torch.zeros(6, 10))]
stateful = pytest.mark.parametrize("spec", STATEFUL)


@stateful
def test_a_missing_state_is_refused(spec: str) -> None:
    codec, x = codecs.parse(spec), randn(6, 10)
    full = codec.init(x)
    for name in full:
        part = {key: value for key, value in codec.init(x).items() if key != name}
        with pytest.raises(errors.StateError, match=r"make the state with codec.init"):
            codec.encode(x, part, KEY)


@stateful
def test_the_state_of_another_tensor_is_refused(spec: str) -> None:
    codec, x = codecs.parse(spec), randn(6, 10)
    other = codec.init(torch.zeros(7, 11))
    if all(tensor.dim() == 0 for tensor in other.values()):
        codec.encode(x, other, KEY)  # nothing in it depends on the shape
        return
    with pytest.raises(errors.StateError, match="should be contiguous"):
        codec.encode(x, other, KEY)


@stateful
def test_a_state_of_another_dtype_is_refused(spec: str) -> None:
    """A kernel would read it as something else, or write behind its end."""
    codec, x = codecs.parse(spec), randn(6, 10)
    for name in codec.init(x):
        state = codec.init(x)
        state[name] = state[name].double()
        with pytest.raises(errors.StateError):
            codec.encode(x, state, KEY)


@stateful
def test_a_strided_state_is_refused(spec: str) -> None:
    codec, x = codecs.parse(spec), randn(6, 10)
    for name, tensor in codec.init(x).items():
        if tensor.dim() == 0 or tensor.numel() < 2:
            continue
        state = codec.init(x)
        state[name] = torch.stack((tensor, tensor), dim=-1)[..., 0]
        with pytest.raises(errors.StateError):
            codec.encode(x, state, KEY)


@stateful
def test_a_refused_state_is_not_spoiled(spec: str) -> None:
    """What is missing is noticed before anything is added to the rest."""
    codec, x = codecs.parse(spec), randn(6, 10)
    for name in codec.init(x):
        state = codec.init(x)
        del state[name]
        before = {key: bits(value) for key, value in state.items()}
        with pytest.raises(errors.StateError):
            codec.encode(x, state, KEY)
        assert {key: bits(value) for key, value in state.items()} == before


@every_spec
def test_out_is_filled_or_left_alone(spec: str) -> None:
    codec = codecs.parse(spec)
    for shape in [(1,), (33,), (500, 3), (31, 40)]:
        x = randn(*shape)
        plain, _ = encode(codec, x)
        room = torch.full((plain.body.numel() + 64,), 0xFF, dtype=torch.uint8)
        for _ in range(2):  # the second time over the bytes of the first
            payload, _ = codec.encode(x, codec.init(x), KEY, out=room)
            assert image(payload) == image(plain)
            assert (payload.body.data_ptr() == room.data_ptr()) == (not re.search("lossaware|powersgd", spec))


@pytest.mark.parametrize("spec", sorted(FILLS_OUT))
def test_an_out_that_cannot_serve_is_refused(spec: str) -> None:
    codec, x = codecs.parse(spec), randn(31, 40)
    size = encode(codec, x)[0].body.numel()
    for room in (
        torch.empty(size - 1, dtype=torch.uint8),
        torch.empty(size, dtype=torch.int8),
        torch.empty(2 * size, dtype=torch.uint8)[::2],
        torch.empty(1, size, dtype=torch.uint8),
    ):
        with pytest.raises(errors.EncodeError, match="out"):
            codec.encode(x, codec.init(x), KEY, out=room)


@pytest.mark.parametrize("spec", sorted(FILLS_OUT))
def test_an_out_at_an_odd_place_is_filled_or_refused(spec: str) -> None:
    """Part of a larger buffer, as a caller that packs several payloads would pass."""
    codec, x = codecs.parse(spec), randn(31, 40)
    plain, _ = encode(codec, x)
    for offset in (1, 2, 4):
        room = torch.zeros(plain.body.numel() + 8, dtype=torch.uint8)[offset:]
        try:
            payload, _ = codec.encode(x, codec.init(x), KEY, out=room)
        except errors.EncodeError:
            continue
        assert image(payload) == image(plain)


@every_spec
@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_into_and_onto(spec: str, backend: str) -> None:
    x = randn(31, 41)
    payload, _ = encode(codecs.parse(spec), x)
    with kernels.use(backend):
        decoded = codecs.decode(payload)
        out = torch.full((31, 41), math.nan)
        assert codecs.decode(payload, out=out) is out
        assert torch.equal(out, decoded)
        total = randn(31, 41, seed=1)
        expected = total + decoded
        assert codecs.decode_add(payload, total) is total
        assert torch.equal(total, expected)


@every_spec
def test_decode_refuses_what_it_cannot_fill(spec: str) -> None:
    payload, _ = encode(codecs.parse(spec), randn(6, 10))
    wrong = [torch.empty(10, 6), torch.empty(60), torch.empty(6, 10, dtype=torch.float64), torch.empty(10, 6).t()]
    for out in wrong:
        with pytest.raises(errors.DecodeError, match="out"):
            codecs.decode(payload, out=out)
        with pytest.raises(errors.DecodeError, match="out"):
            codecs.decode_add(payload, out)


@every_spec
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_body_at_any_address_decodes(spec: str, backend: str) -> None:
    payload, _ = encode(codecs.parse(spec), randn(31, 41))
    expected = bits(codecs.decode(payload))
    for offset in (1, 2, 3, 5):
        body = torch.cat((torch.zeros(offset, dtype=torch.uint8), payload.body))[offset:]
        moved = Payload(payload.codec, payload.dtype, payload.shape, payload.params, body)
        with kernels.use(backend):
            assert bits(codecs.decode(moved)) == expected


@pytest.fixture(scope="module")
def large() -> Tensor:
    """Twenty million elements, of rank one and noise."""
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 5000, generator=noise).mul_(0.5)
    return x.add_(torch.sign(randn(4000, 1)) * torch.sign(randn(1, 5000, seed=1)))


@pytest.mark.parametrize("spec", LARGE)
def test_more_than_sixteen_million_elements(spec: str, large: Tensor) -> None:
    """Places above 2**24, which a float32 cannot count, are decoded as well as the others."""
    assert large.numel() > 2**24
    decoded = codecs.decode(encode(codecs.parse(spec), large)[0])
    for part in (slice(0, 2**20), slice(2**24, None)):
        ours, theirs = decoded.view(-1)[part], large.view(-1)[part]
        cosine = float(torch.dot(ours, theirs) / (ours.norm() * theirs.norm()))
        assert cosine > (0.15 if "0.01" in spec or "elias" in spec else 0.3)
