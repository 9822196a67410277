"""The local server: exact means, steps, curvature, releases, saved states."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from weightgrad import codecs
from weightgrad.errors import DecodeError, ProtocolError, StateError, StrategyError
from weightgrad.local import Combiner, GradientEncoder, Layout, LocalServer, WeightEncoder, decode_flat

LAYOUT = Layout.of_shapes([("in", (9, 5)), ("bias", (9,)), ("mid", (31, 9)), ("out", (4, 31))])
SGD: tuple[str, dict[str, Any]] = ("sgd", {"lr": 1.0})


def randn(seed: int = 0) -> Tensor:
    return torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(seed))


def encoded(gradient: Tensor, spec: str = "fp32()", key: int = 0) -> tuple[codecs.Payload, ...]:
    return GradientEncoder(LAYOUT, codecs.parse(spec), key).encode(gradient, 0)


# Combiner


def test_one_gradient_comes_back_bit_for_bit() -> None:
    gradient = randn()
    gradient[:4] = torch.tensor([-0.0, 1e-45, float("inf"), -0.0])
    combiner = Combiner(LAYOUT, "cpu")
    for _ in range(2):
        combiner.add_plain(gradient)
        assert torch.equal(combiner.mean().view(torch.int32), gradient.view(torch.int32))
    gradient[2] = 0
    combiner.add(encoded(gradient))
    assert torch.equal(combiner.mean().view(torch.int32), gradient.view(torch.int32))


@settings(max_examples=40)
@given(kinds=st.lists(st.sampled_from(["plain", "fp32()", "terngrad()", "topk(0.1)"]), min_size=1, max_size=9))
def test_the_mean_is_the_sum_in_order_over_the_number(kinds: list[str]) -> None:
    combiner = Combiner(LAYOUT, "cpu")
    total = None
    for seed, kind in enumerate(kinds):
        gradient = randn(seed)
        if kind == "plain":
            combiner.add_plain(gradient)
        else:
            payloads = encoded(gradient, kind, seed)
            combiner.add(payloads)
            gradient = decode_flat(LAYOUT, payloads)
        total = gradient if total is None else total + gradient
    assert total is not None
    assert torch.equal(combiner.mean(), total / len(kinds))
    assert combiner.count == 0


def test_combiner_takes_no_memory_for_more_workers() -> None:
    combiner = Combiner(LAYOUT, "cpu")

    def tensors() -> dict[str, int]:
        return {k: v.untyped_storage().nbytes() for k, v in vars(combiner).items() if isinstance(v, Tensor)}

    for seed in range(50):
        combiner.add(encoded(randn(seed), "terngrad()", seed))
        assert sum(tensors().values()) == 4 * LAYOUT.numel


def test_a_combiner_can_work_in_a_room_it_is_given() -> None:
    room = torch.full((LAYOUT.numel,), 7.0)
    combiner = Combiner(LAYOUT, room=room)
    combiner.add_plain(randn(1))
    assert combiner.mean(out=room) is room
    assert torch.equal(room, randn(1))
    combiner.add_plain(randn(1))
    combiner.add_plain(randn(2))
    assert torch.equal(combiner.mean(out=room), (randn(1) + randn(2)) / 2)


def test_a_mean_is_not_overwritten_by_the_next() -> None:
    combiner = Combiner(LAYOUT, "cpu")
    combiner.add_plain(randn(1))
    first = combiner.mean()
    combiner.add_plain(randn(2))
    combiner.mean()
    assert torch.equal(first, randn(1))


def test_there_is_no_mean_of_nothing() -> None:
    with pytest.raises(ProtocolError, match="no mean of no gradients"):
        Combiner(LAYOUT, "cpu").mean()


def test_a_payload_that_does_not_decode_spoils_the_sum_until_reset() -> None:
    combiner = Combiner(LAYOUT, "cpu")
    combiner.add(encoded(randn(1)))
    broken = list(encoded(randn(2)))
    broken[2] = dataclasses.replace(broken[2], body=broken[2].body[:-4])
    with pytest.raises(DecodeError):
        combiner.add(broken)
    with pytest.raises(ProtocolError, match="half added"):
        combiner.mean()
    combiner.reset()
    combiner.add(encoded(randn(3)))
    assert torch.equal(combiner.mean(), randn(3))


# Steps


@pytest.mark.parametrize("optimizer", [SGD, ("sgd", {"momentum": 0.9}), ("adam", {}), ("lars", {})], ids=str)
def test_serial_with_one_worker_is_mean(optimizer: tuple[str, Mapping[str, Any]]) -> None:
    servers = [LocalServer(LAYOUT, randn(99), optimizer, combine=combine) for combine in ("mean", "serial")]
    for step in range(5):
        payloads = encoded(randn(step), "terngrad()", step)
        one, other = (server.step([payloads], 0.1) for server in servers)
        assert torch.equal(one, other)
        assert torch.equal(servers[0].master(), servers[1].master())


@settings(max_examples=40)
@given(n=st.integers(1, 8), lr=st.floats(0.001, 1))
def test_serial_plain_sgd_goes_as_far_as_the_mean(n: int, lr: float) -> None:
    servers = [LocalServer(LAYOUT, randn(99), SGD, combine=combine) for combine in ("mean", "serial")]
    gradients = [randn(seed) for seed in range(n)]
    one, other = (server.step(gradients, lr) for server in servers)
    assert torch.equal(one, other)
    torch.testing.assert_close(servers[0].master(), servers[1].master(), rtol=1e-5, atol=1e-5)


def test_serial_takes_one_optimizer_step_a_gradient_in_order() -> None:
    server = LocalServer(LAYOUT, randn(99), ("adam", {}), combine="serial", serial_scale=0.7)
    weights = nn.Parameter(randn(99))
    adam = torch.optim.Adam([weights], lr=0.1 * 0.7)
    gradients = [encoded(randn(seed), "qsgd(bits=4)", seed) for seed in range(3)]
    site = server.step(iter(gradients), 0.1)
    for payloads in gradients:
        weights.grad = decode_flat(LAYOUT, payloads)
        adam.step()
    torch.testing.assert_close(server.master(), weights.detach())
    one, two, three = (decode_flat(LAYOUT, payloads) for payloads in gradients)
    assert torch.equal(site, (one + two + three) / 3)


@pytest.mark.parametrize("optimizer", [("sgd", {"momentum": 0.9}), ("lars", {"momentum": 0.9})], ids=str)
def test_matched_serial_steps_keep_up_with_the_mean(optimizer: tuple[str, Mapping[str, Any]]) -> None:
    """With the same gradients step after step all move as far a step in the end; without a gradient the matched steps
    die down as the mean's do, and those at lr/n four times as soon."""
    ways: list[dict[str, Any]] = [{"combine": "mean"}, {"combine": "serial", "serial_scale": "matched"}]
    servers = [LocalServer(LAYOUT, torch.ones(LAYOUT.numel), optimizer, **way) for way in ways]
    plain = LocalServer(LAYOUT, torch.ones(LAYOUT.numel), optimizer, combine="serial")
    gradients = [torch.full((LAYOUT.numel,), 1e-3 * (place + 1)) for place in range(4)]
    for _ in range(60):
        for server in (*servers, plain):
            server.step([gradient.clone() for gradient in gradients], 0.01)
    kept = []
    for server in (*servers, plain):
        places = [server.master().double().mean().item()]
        for _ in range(2):
            server.step([torch.zeros(LAYOUT.numel)] * 4, 0.01)
            places.append(server.master().double().mean().item())
        kept.append((places[2] - places[1]) / (places[1] - places[0]))
    assert kept == pytest.approx([0.9, 0.9, 0.9**4], rel=0.02)


def test_the_callers_weights_move_in_place() -> None:
    weights = randn(1)
    server = LocalServer(LAYOUT, weights, SGD)
    server.step([torch.ones(LAYOUT.numel)], 0.5)
    assert server.master() is weights
    assert server.working_weights() is weights
    assert server.released() is None
    assert server.average() is None
    assert server.curvature() is None
    assert torch.equal(weights, randn(1) - 0.5)
    weights.zero_()  # as a round over the WAN may
    server.step([torch.ones(LAYOUT.numel)], 0.5)
    assert torch.equal(weights, torch.full((LAYOUT.numel,), -0.5))


def test_gradients_are_taken_one_at_a_time() -> None:
    alive = 0

    class Counted(tuple[codecs.Payload, ...]):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def stream() -> Iterator[Counted]:
        nonlocal alive
        for seed in range(6):
            made = Counted(encoded(randn(seed)))
            alive += 1
            assert alive <= 2
            yield made
            del made

    for options in ({"combine": "mean"}, {"combine": "serial", "serial_scale": 1.0}):
        LocalServer(LAYOUT, randn(), SGD, **options).step(stream(), 0.1)


def test_a_bad_payload_leaves_a_mean_step_undone() -> None:
    server = LocalServer(LAYOUT, randn(1), ("sgd", {"momentum": 0.9}))
    broken = list(encoded(randn(2)))
    broken[3] = dataclasses.replace(broken[3], body=broken[3].body[:-4])
    with pytest.raises(DecodeError):
        server.step([encoded(randn(3)), broken], 0.1)
    with pytest.raises(ProtocolError):
        server.step([], 0.1)
    assert torch.equal(server.master(), randn(1))
    assert torch.equal(server.step([randn(4)], 0.1), randn(4))


# Curvature and releases


@pytest.mark.parametrize("combine", ["mean", "serial"])
def test_curvature_is_of_the_decoded_gradients(combine: str) -> None:
    out = WeightEncoder(codecs.parse("lossaware()"), beta2=0.9)
    server = LocalServer(LAYOUT, randn(99), SGD, combine=combine, weight_encoder=out)
    assert server.curvature() is None
    moment, true, count = torch.zeros(LAYOUT.numel), torch.zeros(LAYOUT.numel), 0
    for step in range(4):
        both = [encoded(randn(2 * step + k), "terngrad()", 2 * step + k) for k in range(2)]
        decoded = [decode_flat(LAYOUT, payloads) for payloads in both]
        true = 0.9 * true + 0.1 * ((randn(2 * step) + randn(2 * step + 1)) / 2) ** 2
        for g in [(decoded[0] + decoded[1]) / 2] if combine == "mean" else decoded:
            moment, count = 0.9 * moment + 0.1 * g * g, count + 1
        server.step(both, 0.01)
    curvature = server.curvature()
    assert curvature is not None
    torch.testing.assert_close(curvature, (moment / (1 - 0.9**count)).sqrt() + 1e-8)
    assert not torch.allclose(curvature, (true / (1 - 0.9**4)).sqrt(), rtol=0.1)


def test_what_is_released_is_the_master_quantized_by_the_curvature() -> None:
    out = WeightEncoder(codecs.parse("lossaware()"))
    server = LocalServer(LAYOUT, randn(99), SGD, weight_encoder=out)
    for step in range(3):
        server.step([encoded(randn(step), "terngrad()", step)], 0.01)
    payloads = server.released()
    assert payloads is not None
    working = server.working_weights()
    assert torch.equal(working, decode_flat(LAYOUT, payloads))
    wanted = out.encode(LAYOUT, server.master(), server.curvature(), out.init(LAYOUT), 0)
    assert torch.equal(working, decode_flat(LAYOUT, wanted))
    for place, slot in enumerate(LAYOUT.slots):
        assert torch.equal(slot.of(working), slot.of(server.master())) == (place != 2)
    without = out.encode(LAYOUT, server.master(), None, out.init(LAYOUT), 0)
    assert not torch.equal(working, decode_flat(LAYOUT, without))


def test_workers_compute_on_the_last_release() -> None:
    server = LocalServer(LAYOUT, randn(99), SGD, weight_encoder=WeightEncoder(codecs.parse("fp16()")))
    first = server.working_weights().clone()  # releases by itself
    server.master().zero_()
    assert torch.equal(server.working_weights(), first)  # nothing was released since
    server.released()
    assert not server.working_weights().any()
    server.step([torch.ones(LAYOUT.numel)], 1.0)
    assert torch.equal(server.working_weights(), -torch.ones(LAYOUT.numel))


def test_every_release_draws_new_noise() -> None:
    out = WeightEncoder(codecs.parse("qsgd(bits=2)"))
    servers = [LocalServer(LAYOUT, randn(99), SGD, weight_encoder=out, key=key) for key in (1, 1, 2)]
    first, same, other = (server.working_weights().clone() for server in servers)
    servers[0].released()
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert not torch.equal(first, servers[0].working_weights())


def test_the_average_follows_the_master() -> None:
    server = LocalServer(LAYOUT, torch.zeros(LAYOUT.numel), SGD, ema=0.9999)
    server.step([-torch.ones(LAYOUT.numel)], 1.0)
    average = server.average()
    assert average is not None
    torch.testing.assert_close(average, torch.full((LAYOUT.numel,), 0.9))


def test_mistakes_are_named() -> None:
    with pytest.raises(StrategyError, match="combine='sum'; choose"):
        LocalServer(LAYOUT, randn(), SGD, combine="sum")
    with pytest.raises(StrategyError, match=r"serial_scale=0\.5"):
        LocalServer(LAYOUT, randn(), SGD, serial_scale=0.5)
    with pytest.raises(StrategyError, match="serial_scale='mean'"):
        LocalServer(LAYOUT, randn(), SGD, combine="serial", serial_scale="mean")
    with pytest.raises(StrategyError, match="flat weights must be"):
        LocalServer(LAYOUT, torch.zeros(3), SGD)
    with pytest.raises(StrategyError, match="flat gradient must be"):
        LocalServer(LAYOUT, randn(), SGD, combine="serial").step([torch.zeros(3)], 0.1)


# Saved states


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("combine", ["mean", "serial"])
@pytest.mark.parametrize("weights", ["lossaware()", "qsgd(bits=4)", "ef(sign())", None])
@pytest.mark.parametrize("optimizer", [("sgd", {"momentum": 0.9}), ("adam", {}), ("adagrad", {})], ids=str)
def test_a_saved_state_continues_the_same(
    optimizer: tuple[str, Mapping[str, Any]], weights: str | None, combine: str, fresh: bool
) -> None:
    out = None if weights is None else WeightEncoder(codecs.parse(weights))

    def server(start: Tensor) -> LocalServer:
        return LocalServer(LAYOUT, start, optimizer, combine=combine, weight_encoder=out, ema=0.99, key=4)

    def run(server: LocalServer, steps: range) -> list[Tensor]:
        seen = []
        for step in steps:
            seen.append(server.working_weights().clone())
            server.step([encoded(randn(step), "terngrad()", step), randn(-step)], 0.05)
        average = server.average()
        assert average is not None
        return [*seen, server.master().clone(), average.clone()]

    through = server(randn(99))
    run(through, range(10))
    if fresh:
        through.working_weights()
    saved, master = through.state(), through.master().clone()
    wanted = run(through, range(10, 20))
    again = server(master)
    again.load(saved)
    for one, other in zip(run(again, range(10, 20)), wanted, strict=True):
        assert torch.equal(one, other)


def test_a_saved_state_of_another_server_is_refused() -> None:
    plain = LocalServer(LAYOUT, randn(), SGD)
    loss_aware = LocalServer(LAYOUT, randn(), SGD, weight_encoder=WeightEncoder(codecs.parse("lossaware()")))
    with pytest.raises(StateError, match="moment"):
        plain.load(loss_aware.state())
    loss_aware.working_weights()
    with pytest.raises(StateError, match="sends them whole"):
        plain.load(loss_aware.state())
    with pytest.raises(StateError, match="moment"):
        loss_aware.load(plain.state())
