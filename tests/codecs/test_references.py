"""Each algorithm against a slow, plain version of it, written from the papers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from weightgrad import codecs, errors
from weightgrad.codecs.payload import Payload
from weightgrad.kernels import noise

KEY = 77


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def once(spec: str, x: Tensor, key: int = KEY) -> Tensor:
    codec = codecs.parse(spec)
    return codecs.decode(codec.encode(x, codec.init(x), key)[0])


def body_floats(payload: Payload, count: int) -> Tensor:
    """The floats that a body starts with."""
    return payload.body[: 4 * count].clone().view(torch.float32)


# Floats.


def test_floats_are_rounded_to_nearest() -> None:
    x = torch.cat((randn(1000) * torch.exp(3 * randn(1000, seed=1)), torch.tensor([65504.0, 6e-8, -0.0])))
    assert torch.equal(once("fp32", x), x)
    assert torch.equal(once("fp16", x), x.half().float())
    assert torch.equal(once("bf16", x), x.bfloat16().float())


def test_float16_ends_at_65504() -> None:
    with pytest.raises(errors.RangeError, match=r"element 1 is 70000\.0, too large for fp16; use bf16 or fp32"):
        once("fp16", torch.tensor([1.0, 70000.0]))
    with pytest.raises(errors.RangeError, match="too large for bf16"):
        once("bf16", torch.tensor([3.4e38]))


# QSGD.


def qsgd_reference(x: Tensor, bits: int, bucket: int, norm: str, u: Tensor) -> tuple[list[float], list[float]]:
    """(level + distance to the next place where floor jumps, scale) of each element, in doubles."""
    top = 2 ** (bits - 1) - 1
    places, scales = [], []
    for start in range(0, x.numel(), bucket):
        part = [float(v) for v in x.view(-1)[start : start + bucket]]
        size = max(abs(v) for v in part) if norm == "max" else math.sqrt(sum(v * v for v in part))
        places += [top * v / size + float(u[start + i]) for i, v in enumerate(part)]
        scales += [size / top] * len(part)
    return places, scales


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_qsgd(bits: int, norm: str, rounding: str) -> None:
    x, bucket = randn(1000), 96
    stochastic = rounding == "stochastic"
    u = noise.noise16(noise.mix(KEY), 0, 1000, x.device) / 65536.0 if stochastic else torch.full((1000,), 0.5)
    places, scales = qsgd_reference(x, bits, bucket, norm, u)
    codec = codecs.Qsgd(bits=bits, bucket=bucket, norm=norm, rounding=rounding)
    decoded = codecs.decode(codec.encode(x, {}, KEY)[0])
    near = 0
    for value, place, scale in zip(decoded.tolist(), places, scales, strict=True):
        if abs(place - round(place)) < 2.0**-15:  # a level is kept in sixteen bits: these may go either way
            near += 1
            assert value / scale == pytest.approx(round(place), abs=1.001)
        else:
            assert value == pytest.approx(math.floor(place) * scale, rel=1e-6, abs=1e-12)
    # The largest of each bucket lies on the top level exactly.
    assert near < (40 if norm == "max" else 20)


def test_qsgd_decodes_within_one_level() -> None:
    x = randn(5000)
    for bits in (2, 3, 4, 8):
        codec = codecs.Qsgd(bits=bits, bucket=512)
        level = torch.cat([x[i : i + 512].abs().max().expand(512) for i in range(0, 5000, 512)])[:5000]
        level = level / (2 ** (bits - 1) - 1)
        decoded = codecs.decode(codec.encode(x, {}, KEY)[0])
        assert bool(((decoded - x).abs() <= level * 1.0001).all())
        nearest = codecs.Qsgd(bits=bits, bucket=512, rounding="nearest")
        decoded = codecs.decode(nearest.encode(x, {}, KEY)[0])
        assert bool(((decoded - x).abs() <= level * 0.5001).all())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bucket", [32, 512, 16384])
def test_elias_has_the_values_of_qsgd(bits: int, norm: str, bucket: int) -> None:
    x = randn(20_001) * torch.exp(randn(20_001, seed=1))
    plain = codecs.Qsgd(bits=bits, bucket=bucket, norm=norm).encode(x, {}, KEY)[0]
    coded = codecs.Elias(bits=bits, bucket=bucket, norm=norm).encode(x, {}, KEY)[0]
    assert torch.equal(codecs.decode(coded), codecs.decode(plain))
    if norm == "l2" and bits == 2 and bucket >= 512:
        assert coded.nbytes < plain.nbytes


# TernGrad.


@pytest.mark.parametrize("clip", [0.0, 1.0, 2.5, 100.0])
def test_terngrad(clip: float) -> None:
    x = randn(3000) + 0.1
    sigma = float(x.double().std(correction=0))
    largest = float(x.abs().max())
    scale = largest if clip == 0 else min(clip * sigma, largest)
    codec = codecs.TernGrad(clip=clip)
    assert codec.measure(x) == pytest.approx(scale, rel=1e-6)
    payload, _ = codec.encode(x, {}, KEY)
    assert float(body_floats(payload, 1)) == pytest.approx(scale, rel=1e-6)
    decoded = codecs.decode(payload)
    u = noise.noise16(noise.mix(KEY), 0, 3000, x.device) / 65536.0
    place = (x.double() / scale).clamp(-1, 1) + u
    sure = (place - place.round()).abs() > 2.0**-15
    assert int((~sure).sum()) < 10
    torch.testing.assert_close(decoded[sure], (place.floor() * scale).float()[sure])
    beyond = x.abs() > scale * 1.0001
    torch.testing.assert_close(decoded[beyond], torch.sign(x[beyond]) * scale)


def test_terngrad_workers_share_the_largest_scaler() -> None:
    tensors = [randn(500, seed=seed) * (1 + seed) for seed in range(4)]
    codec = codecs.TernGrad(scaler="shared")
    state = codec.share(tensors)
    expected = max(codec.measure(x) for x in tensors)
    assert float(state["scale"]) == expected
    total = torch.zeros(500)
    for x in tensors:
        payload, state = codec.encode(x, state, KEY)
        assert float(body_floats(payload, 1)) == expected
        codecs.decode_add(payload, total)
    levels = (total / expected).round()
    torch.testing.assert_close(total, levels * expected)
    assert float(levels.abs().max()) <= 4
    # Unset, it is the tensor's own.
    alone, _ = codec.encode(tensors[0], codec.init(tensors[0]), KEY)
    assert float(body_floats(alone, 1)) == codec.measure(tensors[0])


# One-bit SGD.


def columns_of(x: Tensor) -> list[list[int]]:
    """Flat indices of the elements that share means: the columns of out x rest, or tiles of a vector."""
    if x.dim() >= 2 and x.numel() > x.shape[0]:
        rows, cols = x.shape[0], x.numel() // x.shape[0]
        return [[row * cols + col for row in range(rows)] for col in range(cols)]
    return [list(range(i, min(x.numel(), i + 32768))) for i in range(0, x.numel(), 32768)]


def onebit_reference(value: Tensor) -> Tensor:
    flat, out = value.reshape(-1).double(), torch.empty(value.numel(), dtype=torch.float64)
    for column in columns_of(value):
        for negative in (False, True):
            members = [i for i in column if bool(torch.signbit(flat[i])) == negative]
            if members:
                out[members] = flat[members].mean()
    return out.view(value.shape)


@pytest.mark.parametrize("shape", [(50, 7), (3, 40), (8, 3, 3, 3), (200,), (65, 1), (1, 9)])
def test_onebit(shape: tuple[int, ...]) -> None:
    codec = codecs.OneBit()
    error = torch.zeros(shape, dtype=torch.float64)
    state = codec.init(error)
    for step in range(4):
        x = randn(*shape, seed=step)
        x.view(-1)[step] = 0.0
        value = x + error
        expected = onebit_reference(value)
        payload, state = codec.encode(x, state, KEY)
        torch.testing.assert_close(codecs.decode(payload).double(), expected, rtol=1e-5, atol=1e-5)
        error = value - expected
        torch.testing.assert_close(codec.error(x, state).double(), error, rtol=1e-5, atol=1e-5)


def test_onebit_has_a_pair_of_means_a_tile() -> None:
    x = randn(70_000)
    decoded = once("onebit(feedback=False)", x)
    torch.testing.assert_close(decoded.double(), onebit_reference_fast(x), rtol=1e-5, atol=1e-5)
    tall = randn(33_000, 2)
    payload, _ = codecs.OneBit(feedback=False).encode(tall, {}, KEY)
    assert payload.body.numel() == 8 * 2 * 2 + 66_000 // 8
    decoded = codecs.decode(payload)
    for rows in (slice(0, 32768), slice(32768, None)):
        for col in range(2):
            part = tall[rows, col].contiguous()
            torch.testing.assert_close(decoded[rows, col].double(), onebit_reference_fast(part), rtol=1e-4, atol=1e-4)


def onebit_reference_fast(x: Tensor) -> Tensor:
    """For a vector."""
    out = torch.empty(x.numel(), dtype=torch.float64)
    for start in range(0, x.numel(), 32768):
        part = x[start : start + 32768].double()
        up, down = part[part >= 0].mean(), part[part < 0].mean()
        out[start : start + 32768] = torch.where(part >= 0, up, down)
    return out


# Adaptive quantization.


def adaptive_reference(value: Tensor, kept: Tensor) -> Tensor:
    """Each kept entry as the mean of its column's kept entries of its sign."""
    flat, out = value.reshape(-1).double(), torch.zeros(value.numel(), dtype=torch.float64)
    chosen = set(kept.view(-1).nonzero().view(-1).tolist())
    for column in columns_of(value):
        for negative in (False, True):
            members = [i for i in column if i in chosen and bool(torch.signbit(flat[i])) == negative]
            if members:
                out[members] = flat[members].mean()
    return out.view(value.shape)


def largest_of_each_sign(value: Tensor, pi: float) -> Tensor:
    """Which entries are among the 1/pi largest of their sign over the whole matrix."""
    kept = torch.zeros(value.numel(), dtype=torch.bool)
    flat = value.reshape(-1)
    for part in (flat > 0, flat < 0):
        places = part.nonzero().view(-1)
        k = max(1, round(places.numel() / pi))
        kept[places[flat[places].abs().topk(k).indices]] = True
    return kept.view(value.shape)


@pytest.mark.parametrize("pi", [2, 8, 64])
@pytest.mark.parametrize("shape", [(50, 31), (8, 3, 5, 5), (2000,)])
def test_adaptive(pi: int, shape: tuple[int, ...]) -> None:
    codec = codecs.Adaptive(pi=pi)
    error = torch.zeros(shape, dtype=torch.float64)
    state = codec.init(error)
    for step in range(5):
        x = randn(*shape, seed=step)
        value = (x + error).float()
        payload, state = codec.encode(x, state, KEY)
        decoded = codecs.decode(payload)
        kept = decoded != 0
        if step == 0:  # later, the thresholds come from a sample of what is nearly the value
            assert torch.equal(kept, largest_of_each_sign(value, pi))
        for sign in (1, -1):
            inside, outside = (sign * value)[kept], (sign * value)[~kept]
            assert float(inside[inside > 0].min()) > float(outside.max()) - 1e-5
        expected = adaptive_reference(value, kept)
        torch.testing.assert_close(decoded.double(), expected, rtol=1e-5, atol=1e-5)
        error = value.double() - expected
        torch.testing.assert_close(codec.error(x, state).double(), error, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pi", [8, 64, 1000])
def test_adaptive_keeps_one_in_pi(pi: int) -> None:
    codec, shape = codecs.Adaptive(pi=pi), (500, 600)
    state = codec.init(torch.empty(shape))
    for step in range(6):
        x = randn(*shape, seed=step)
        payload, state = codec.encode(x, state, step)
        fraction = float((codecs.decode(payload) != 0).double().mean())
        assert 0.6 / pi < fraction < 1.6 / pi


def test_adaptive_costs_two_bytes_an_entry() -> None:
    """The wire is 1/(2*pi) of float32, and the column headers: two bytes, and eight where there are any."""
    x = randn(1000, 300)
    payload, _ = codecs.Adaptive(pi=16, feedback=False).encode(x, {}, KEY)
    entries = int((codecs.decode(payload) != 0).sum())
    assert payload.body.numel() == 2 * entries + 300 * 2 + 300 * 8


def test_adaptive_tiles_tall_columns() -> None:
    x = randn(40_000, 2)
    decoded = once("adaptive(pi=4, feedback=False)", x)
    assert float((decoded != 0).double().mean()) == pytest.approx(0.25, rel=0.05)
    for rows in (slice(0, 32768), slice(32768, None)):
        for col in range(2):
            ours, theirs = decoded[rows, col], x[rows, col]
            for part in (ours > 0, ours < 0):
                torch.testing.assert_close(ours[part], theirs[part].mean().expand(int(part.sum())))


# Top-k, thresholds, DGC.


def topk_set(x: Tensor, k: int) -> Tensor:
    kept = torch.zeros(x.numel(), dtype=torch.bool)
    kept[x.reshape(-1).abs().topk(k).indices] = True
    return kept.view(x.shape)


@pytest.mark.parametrize("n", [1, 2, 100, 5003, 65_536, 65_537, 300_001])
@pytest.mark.parametrize("fraction", [1e-9, 0.001, 0.01, 0.3, 1.0])
def test_topk_is_exact(n: int, fraction: float) -> None:
    x = randn(n)
    k = min(n, max(1, round(fraction * n)))
    decoded = once(f"topk({fraction})", x)
    assert torch.equal(decoded, torch.where(topk_set(x, k), x, torch.zeros(())))


@pytest.mark.parametrize("key", range(4))
@pytest.mark.parametrize("shape", ["sorted", "one block", "nearly all zero", "heavy tails", "few values", "two scales"])
def test_topk_is_exact_where_a_sample_misleads(shape: str, key: int) -> None:
    n, k = 200_000, 2000
    x = randn(n, seed=key)
    if shape == "sorted":
        x = x.sort().values
    elif shape == "one block":
        x[120_000:122_500] *= 1000
    elif shape == "nearly all zero":
        x = torch.where(torch.arange(n) % 997 == key, x, torch.zeros(()))
    elif shape == "heavy tails":
        x = torch.exp(8 * x) * torch.sign(randn(n, seed=9))
    elif shape == "few values":
        x = x.round()
    else:
        x[: n // 2] *= 1e-30
    decoded = once(f"topk({k / n})", x, key)
    size = x.abs()
    limit = size.topk(k).values[-1]
    assert torch.equal(decoded[size > limit], x[size > limit])
    assert not bool(decoded[size < limit].any())
    # Of equals, the first ones.
    quota = k - int((size > limit).sum())
    equal = (size == limit).nonzero().view(-1)
    assert torch.equal(decoded[equal[:quota]], x[equal[:quota]])
    assert not bool(decoded[equal[quota:]].any())


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.1])
def test_topk_by_a_threshold_stays_within_ten_percent(fraction: float, feedback: bool) -> None:
    codec = codecs.parse(f"ef(topk({fraction}, exact=False))" if feedback else f"topk({fraction}, exact=False)")
    n = 30_000
    state = codec.init(torch.empty(n))
    base, k = randn(n), round(fraction * n)
    for step in range(30):
        # The scale drifts by half a percent a step, and once by a factor of three.
        x = (base + randn(n, seed=step)) * 1.005**step * (3 if step > 20 else 1)
        payload, state = codec.encode(x, state, step)
        sent = int((codecs.decode(payload) != 0).sum())
        assert abs(sent - k) <= max(1, 0.1 * k)


@pytest.mark.parametrize("value", [0.0, 1e-3, 0.5, 2.5, 1e6])
def test_threshold(value: float) -> None:
    x = randn(61, 83)
    x[3, 4], x[5, 6] = value, -value
    decoded = once(f"threshold({value})", x)
    assert torch.equal(decoded, torch.where(x.abs() >= value, x, torch.zeros(())))


def test_values_of_a_sparse_payload_go_through_their_codec() -> None:
    x = randn(5000)
    kept = topk_set(x, 50)
    values = x[kept]
    inner = codecs.Qsgd(bits=4, bucket=32)
    expected, _ = inner.encode(values, {}, noise.derive(KEY, 1))
    decoded = once("topk(0.01) > qsgd(bits=4, bucket=32)", x)
    assert torch.equal(decoded[kept], codecs.decode(expected))
    assert not bool(decoded[~kept].any())


def test_pack_entries_takes_any_choice() -> None:
    x = randn(300, 7)
    places = torch.tensor([0, 1, 2, 700, 2098, 2099])
    payload, inner = codecs.pack_entries(places, x.view(-1)[places], x, codecs.Fp32(), KEY)
    assert inner.shape == (6,)
    decoded = codecs.decode(payload).view(-1)
    assert torch.equal(decoded.nonzero().view(-1), places)
    assert torch.equal(decoded[places], x.view(-1)[places])


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("values", ["fp32()", "fp16()", "qsgd(bits=4)"])
def test_dgc(momentum: float, values: str) -> None:
    n, fraction = 5003, 0.01
    codec = codecs.parse(f"dgc({fraction}, momentum={momentum}) > {values}")
    u, v = torch.zeros(n), torch.zeros(n)
    state = codec.init(u)
    for step in range(6):
        g = randn(n, seed=step)
        u = momentum * u + g
        v = v + u
        sent = topk_set(v, 50)
        payload, state = codec.encode(g, state, step)
        decoded = codecs.decode(payload)
        assert not bool(decoded[~sent].any())
        if values == "fp32()":
            torch.testing.assert_close(decoded[sent], v[sent], rtol=1e-6, atol=1e-6)
        # Masked: the velocity forgets what was sent, the accumulator keeps what its codec lost.
        u = torch.where(sent, torch.zeros(()), u)
        v = torch.where(sent, v - decoded, v)
        torch.testing.assert_close(state["velocity"], u, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(state["residual"], v, rtol=1e-6, atol=1e-6)
        assert int(state["step"]) == step + 1


def test_dgc_warms_up_as_in_the_paper() -> None:
    codec = codecs.Dgc(fraction=0.001, warmup=8)
    expected = [0.25, 0.063, 0.0158, 0.004, 0.001]
    fractions = [codec.fraction_at(step) for step in (0, 2, 4, 6, 8)]
    assert fractions == pytest.approx(expected, rel=0.01)
    assert [codec.fraction_at(step) for step in (1, 3, 5, 7, 100)] == pytest.approx(expected, rel=0.01)
    state = codec.init(torch.empty(20_000))
    for step in range(10):
        payload, state = codec.encode(randn(20_000, seed=step), state, step)
        sent = int((codecs.decode(payload) != 0).sum())
        assert sent == round(20_000 * codec.fraction_at(step))
    assert codecs.Dgc(fraction=0.3, warmup=8).fraction_at(0) == 0.3
    assert codecs.Dgc(fraction=0.001).fraction_at(0) == 0.001


def test_dgc_clips_the_norm_of_the_gradient() -> None:
    g = randn(1000) * 5
    for clip in (0.5, 1e9):
        codec = codecs.Dgc(fraction=1.0, clip=clip)
        payload, _ = codec.encode(g, codec.init(g), KEY)
        expected = g * min(1.0, clip / float(g.double().norm()))
        torch.testing.assert_close(codecs.decode(payload), expected)


# PowerSGD.


def orthonormal(columns: Tensor) -> Tensor:
    """Gram-Schmidt, twice for safety."""
    q = columns.clone()
    for j in range(q.shape[1]):
        for _ in range(2):
            for i in range(j):
                q[:, j] -= (q[:, i] @ q[:, j]) * q[:, i]
            q[:, j] /= q[:, j].norm()
    return q


@pytest.mark.parametrize("shape", [(40, 30), (20, 4, 3, 3)])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_powersgd(shape: tuple[int, ...], rank: int) -> None:
    codec = codecs.PowerSgd(rank=rank)
    rows = shape[0]
    error = torch.zeros(rows, math.prod(shape) // rows, dtype=torch.float64)
    state = codec.init(torch.empty(shape))
    q = state["q"].double()
    for step in range(5):
        x = randn(*shape, seed=step)
        matrix = x.view(rows, -1).double() + error
        p = orthonormal(matrix @ q)
        q = matrix.t() @ p
        payload, state = codec.encode(x, state, KEY)
        decoded = codecs.decode(payload).view(rows, -1).double()
        torch.testing.assert_close(decoded, p @ q.t(), rtol=1e-3, atol=1e-3)
        error = matrix - p @ q.t()
        torch.testing.assert_close(state["residual"].view(rows, -1).double(), error, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_powersgd_is_exact_for_matrices_of_its_rank(rank: int) -> None:
    x = randn(60, rank) @ randn(rank, 50, seed=1)
    decoded = once(f"powersgd({rank}, feedback=False)", x)
    torch.testing.assert_close(decoded, x, rtol=1e-4, atol=1e-4)


def test_powersgd_comes_to_the_best_approximation() -> None:
    """Warm start: on one matrix the factors turn towards its largest singular vectors."""
    x = randn(40, 30) @ torch.diag(0.7 ** torch.arange(30.0)) @ randn(30, 30, seed=1)
    u, s, v = torch.linalg.svd(x)
    best = float((x - (u[:, :2] * s[:2]) @ v[:2]).norm())
    codec = codecs.PowerSgd(rank=2, feedback=False)
    state = codec.init(x)
    for step in range(30):
        payload, state = codec.encode(x, state, step)
    assert float((x - codecs.decode(payload)).norm()) <= best * 1.001


@pytest.mark.parametrize("shape", [(500,), (4, 3), (500, 1), (1, 500), ()])
def test_powersgd_sends_what_would_not_shrink_as_it_is(shape: tuple[int, ...]) -> None:
    x = randn(*shape)
    assert torch.equal(once("powersgd(3)", x), x)


# Signs.


def test_sign() -> None:
    x = torch.tensor([[0.5, -2.0, 0.0], [-0.0, 1.5, -1e-30]])
    signs = torch.tensor([[1.0, -1.0, 1.0], [-1.0, 1.0, -1.0]])
    torch.testing.assert_close(once("sign", x), signs * float(x.abs().mean()))
    assert torch.equal(once("sign(scale='one')", x), signs)


def test_majority_vote() -> None:
    voters = [randn(7, 9, seed=seed) for seed in range(6)]
    payloads = [codecs.Sign().encode(x * 10**i, {}, KEY)[0] for i, x in enumerate(voters)]
    for count in (1, 2, 3, 6):
        expected = torch.stack([torch.sign(x) for x in voters[:count]]).sum(0).sign()
        vote = codecs.majority_vote(payloads[:count])
        assert torch.equal(vote, expected)
        assert vote.shape == (7, 9)
    assert bool((codecs.majority_vote(payloads[:2]) == 0).any())


def test_majority_vote_takes_the_signs_of_any_scale() -> None:
    """lossaware(bits=1, per='row') writes signs too, with a scale a row."""
    x = randn(7, 9)
    payload, _ = codecs.LossAware(bits=1, per="row").encode(x, {}, KEY)
    assert torch.equal(codecs.majority_vote([payload]), torch.sign(x))


def test_majority_vote_refuses_what_it_cannot_count() -> None:
    sign, _ = codecs.Sign().encode(randn(5), {}, KEY)
    with pytest.raises(errors.DecodeError, match="at least one payload"):
        codecs.majority_vote([])
    with pytest.raises(errors.DecodeError, match="of one shape"):
        codecs.majority_vote([sign, codecs.Sign().encode(randn(6), {}, KEY)[0]])
    with pytest.raises(errors.DecodeError, match="takes sign payloads"):
        codecs.majority_vote([codecs.Fp32().encode(randn(5), {}, KEY)[0]])
    assert codecs.majority_vote([codecs.Sign().encode(torch.empty(3, 0), {}, KEY)[0]]).shape == (3, 0)


# Shared values.


@pytest.mark.parametrize("kind", ["normal", "laplace", "uniform", "two humps"])
@pytest.mark.parametrize("bits", [1, 2, 4, 6, 8])
def test_codebook_is_no_worse_than_uniform_levels(kind: str, bits: int) -> None:
    x = randn(20_000)
    if kind == "laplace":
        x = x * randn(20_000, seed=1).abs()
    elif kind == "uniform":
        x = torch.rand(20_000, generator=torch.Generator().manual_seed(2))
    elif kind == "two humps":
        x = x * 0.1 + torch.sign(randn(20_000, seed=1))
    decoded = once(f"codebook({bits})", x)
    assert decoded.unique().numel() <= 2**bits
    low, high = float(x.min()), float(x.max())
    step = (high - low) / 2**bits
    uniform = low + step * (((x - low) / step).floor().clamp(max=2**bits - 1) + 0.5)
    assert float((decoded - x).norm()) <= float((uniform - x).norm()) * 1.0001


def test_codebook_has_sixteen_values_and_takes_the_nearest() -> None:
    x = randn(3000)
    payload, _ = codecs.Codebook(bits=4).encode(x, {}, KEY)
    table = body_floats(payload, 16)
    decoded = codecs.decode(payload)
    assert table.unique().numel() == 16
    assert decoded.unique().numel() == 16
    distance = (x[:, None] - table).abs()
    torch.testing.assert_close((x - decoded).abs(), distance.min(1).values, rtol=0, atol=1e-6)
    # A fixed point of Lloyd's steps: each value is the mean of those that take it.
    for value in table:
        torch.testing.assert_close(x[decoded == value].mean(), value, rtol=1e-3, atol=1e-3)


def test_codebook_holds_few_values_exactly() -> None:
    x = torch.tensor([-3.0, 0.25, 7.0])[torch.arange(300) % 3]
    assert torch.equal(once("codebook(2)", x), x)


# Clipping.


@pytest.mark.parametrize("sigma", [0.5, 2.5, 100.0])
def test_clip(sigma: float) -> None:
    x = randn(61, 83) + 0.3
    limit = sigma * float(x.double().std(correction=0))
    torch.testing.assert_close(once(f"clip({sigma})", x), x.clamp(-limit, limit))
    cut = x.clamp(-limit, limit)
    nearest = "qsgd(bits=8, rounding='nearest')"
    torch.testing.assert_close(once(f"clip({sigma}) > {nearest}", x), once(nearest, cut), rtol=1e-5, atol=2e-2)


def test_clip_leaves_a_constant_alone() -> None:
    x = torch.full((1001,), 0.1)
    assert torch.equal(once("clip(2.5)", x), x)
    assert torch.equal(once("terngrad()", x), x)
