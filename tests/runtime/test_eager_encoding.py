"""Encoded beside backward or in the step: the same bits, whatever users do to gradients in between."""

from __future__ import annotations

import copy
import io
import logging
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from weightgrad import codecs, wire
from weightgrad.codecs import Payload
from weightgrad.core import strategies
from weightgrad.errors import NonFiniteError
from weightgrad.local import GradientEncoder, QuantizedAllreduce
from weightgrad.runtime.eager_encoding import EagerEncoder
from weightgrad.runtime.flat_parameters import FlatParameters
from weightgrad.runtime.process_group import SiteGroup
from weightgrad.runtime.rank_step import RankStep

RANKS, KEY = 3, 7
KINDS = ("chunks", "slots")
PURE = ["qsgd(bits=8)", "qsgd(bits=4)", "terngrad(clip=2.5)", "sign()", "fp16()", "topk(0.1) > sign()"]


class Model(nn.Module):
    """Two layers, and one that only some passes reach."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.seldom, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor, reach: bool = True) -> Tensor:
        x = torch.tanh(self.first(x))
        scores: Tensor = self.last(self.seldom(x) if reach else x)
        return scores


class Rank:
    """A model whose gradients are encoded ahead, and the same done plainly, to compare with."""

    def __init__(self, kind: str = "chunks", spec: str = "qsgd(bits=8)") -> None:
        torch.manual_seed(1)
        self.model = Model()
        self.flat_parameters = FlatParameters(self.model)
        self._draw = torch.Generator().manual_seed(2)
        layout, codec = self.flat_parameters.layout, codecs.parse(spec)
        pieces: list[QuantizedAllreduce | GradientEncoder] = [
            QuantizedAllreduce(RANKS, layout.numel, codec, KEY)
            if kind == "chunks"
            else GradientEncoder(layout, codec, KEY)
            for _ in range(2)
        ]
        self._plain, self.count = pieces[1], len(pieces[0].spans)
        self.eager = EagerEncoder(self.flat_parameters.parameters, layout, pieces[0], torch.zeros(layout.numel))

    def backward(self, *, reach: bool = True, scale: float = 1.0) -> None:
        x = torch.randn(8, 6, generator=self._draw)
        (scale * functional.cross_entropy(self.model(x, reach), (x.sum(1) > 0).long())).backward()

    def expected(self, step: int) -> list[Payload]:
        """As every step did before there was anything ahead."""
        gradient = torch.empty(self.flat_parameters.layout.numel)
        self.flat_parameters.read_gradient(gradient)
        if isinstance(self._plain, QuantizedAllreduce):
            return self._plain.encode_chunks(gradient, step)
        return list(self._plain.encode(gradient, step))

    def step(self, number: int) -> int:
        """How many pieces were ahead; what the step has is what it would have had without."""
        before = self.eager.used
        expected, found = self.expected(number), self.eager.take(number)
        if found is not None:
            assert [wire.to_bytes(one) for one in found] == [wire.to_bytes(one) for one in expected]
        else:
            assert self.eager.used == before
        self.flat_parameters.drop_gradients()
        return self.eager.used - before

    def apply_results(self) -> None:
        """Until the thread has done what it was given."""
        self.eager._thread.submit(int).result(60)

    def warm(self) -> None:
        """A first step, which shows how many passes there are."""
        self.backward()
        assert self.step(0) == 0

    @property
    def gradient(self) -> Tensor:
        found = self.model.first.weight.grad
        assert found is not None
        return found


@pytest.mark.parametrize("spec", PURE)
@pytest.mark.parametrize("kind", KINDS)
def test_from_the_second_step_on_everything_is_ahead_and_has_the_same_bits(kind: str, spec: str) -> None:
    rank = Rank(kind, spec)
    rank.warm()
    for step in range(1, 5):
        rank.backward()
        assert rank.step(step) == rank.count
    assert (rank.eager.used, rank.eager.asked) == (4 * rank.count, 5 * rank.count)


def test_pieces_are_done_while_backward_is_in_earlier_layers() -> None:
    rank, done = Rank("slots"), []
    rank.warm()

    def look(_: Tensor) -> None:
        rank.apply_results()
        done.append(sorted(place for place, job in rank.eager._work.items() if job.done()))

    rank.model.first.weight.register_hook(look)
    rank.backward()
    assert set(done[0]) >= {2, 3, 4, 5}, "both layers behind it are encoded before the first has its gradient"
    assert rank.step(1) == rank.count


def _replace(rank: Rank) -> None:
    rank.model.first.weight.grad = rank.gradient * 3


def _drop(rank: Rank) -> None:
    rank.model.first.weight.grad = None


CHANGES: dict[str, Callable[[Rank], object]] = {
    "clip": lambda rank: nn.utils.clip_grad_norm_(rank.model.parameters(), 1e-3),
    "clip the first layer": lambda rank: nn.utils.clip_grad_value_(rank.model.first.parameters(), 1e-4),
    "unscale": lambda rank: [p.grad.mul_(0.5) for p in rank.flat_parameters.parameters if p.grad is not None],
    "data": lambda rank: rank.gradient.data.clamp_(-1e-4, 1e-4),  # no version shows this
    "numpy": lambda rank: rank.gradient.numpy().fill(0.25),  # nor this
    "replace": _replace,
    "drop": _drop,
    "zero": lambda rank: rank.model.zero_grad(set_to_none=False),
    "another pass": lambda rank: rank.backward(),
    "another pass over a part": lambda rank: rank.backward(reach=False),
}


@pytest.mark.parametrize("settled", [True, False], ids=["encoded before", "any time"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_changed_after_backward_is_encoded_again(kind: str, change: str, settled: bool) -> None:
    rank = Rank(kind)
    rank.warm()
    for step in (1, 2):
        rank.backward()
        if settled:
            rank.apply_results()
        CHANGES[change](rank)
        eager = rank.step(step)
        learnt = step == 2 and "pass" in change  # there are two in every step
        assert eager < rank.count or learnt or not settled
    rank.backward()
    rank.step(3)


def test_what_was_changed_before_it_was_read_is_ahead() -> None:
    rank, free = Rank(), threading.Event()
    rank.warm()
    rank.eager._thread.submit(free.wait, 60)
    rank.backward()
    rank.gradient.mul_(0.5)
    free.set()
    assert rank.step(1) == rank.count


def test_what_is_changed_between_copy_and_hash_is_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, real, calls = Rank(), np.copyto, []
    rank.warm()

    def late(target: np.ndarray, source: np.ndarray) -> None:
        real(target, source)
        calls.append(len(target))
        source *= 1.0 + len(calls)

    monkeypatch.setattr(np, "copyto", late)
    rank.backward()
    rank.apply_results()
    assert len(calls) == len(rank.flat_parameters.parameters)
    assert rank.step(1) == 0


def test_clipping_that_clips_nothing_changes_nothing() -> None:
    rank = Rank()
    rank.warm()
    for step in (1, 2, 3):
        rank.backward()
        rank.apply_results()
        nn.utils.clip_grad_norm_(rank.model.parameters(), 1e6)
        assert rank.step(step) == rank.count


def test_passes_that_are_added_up_are_encoded_after_the_last() -> None:
    rank = Rank()
    eager = []
    for step, passes in enumerate([2, 2, 2, 3, 3, 1, 1]):
        for _ in range(passes):
            rank.backward()
        eager.append(rank.step(step) == rank.count)
    assert eager == [False, True, True, False, True, False, True]


def test_gradients_of_a_step_that_was_skipped_are_not_sent() -> None:
    rank = Rank()
    rank.warm()
    rank.backward()
    rank.model.zero_grad()
    rank.backward()
    assert rank.step(1) == 0
    for step, eager in ((2, 0), (3, rank.count)):  # two passes were expected, then one
        rank.backward()
        assert rank.step(step) == eager


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_no_pass_reaches_is_zero_and_not_waited_for(kind: str) -> None:
    rank = Rank(kind)
    unreached = {"slots": 2, "chunks": 1}[kind]  # pieces of which nobody hears
    for step in range(3):
        rank.backward(reach=False)
        assert rank.model.seldom.weight.grad is None
        assert rank.step(step) == (rank.count - unreached if step else 0)
    for step, reach in enumerate([True, True, False, False], 3):
        rank.backward(reach=reach)
        rank.step(step)
    assert rank.eager._misses < 2


def test_it_gives_up_when_gradients_always_change(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "weightgrad")
    rank = Rank()
    rank.warm()
    for step in range(1, 6):
        rank.backward()
        rank.apply_results() if step < 3 else None
        CHANGES["clip"](rank)
        assert rank.step(step) == 0
        assert rank.eager._closed == (step >= 2)
    assert rank.eager.asked == 6 * rank.count
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert not any(p._post_accumulate_grad_hooks for p in rank.flat_parameters.parameters)
    assert not any(thread.is_alive() for thread in rank.eager._thread._threads)


def test_one_change_now_and_then_is_forgiven() -> None:
    rank = Rank()
    rank.warm()
    for step in range(1, 9):
        rank.backward()
        rank.apply_results()
        if step % 2:
            CHANGES["clip"](rank)
        assert rank.step(step) == (0 if step % 2 else rank.count)


def test_a_step_of_another_number_is_encoded_with_its_own_key() -> None:
    rank = Rank()
    rank.warm()
    rank.backward()
    rank.apply_results()
    assert rank.step(5) == 0
    rank.backward()
    assert rank.step(6) == rank.count


def test_what_fails_in_the_thread_is_left_to_the_step() -> None:
    rank = Rank()
    rank.warm()
    rank.backward()
    rank.gradient[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="element 0 of"):
        rank.expected(1)
    assert rank.eager.take(1) is None, "so the step does it all, and raises that"


def test_steps_that_are_skipped_for_a_nan_are_no_reason_to_give_up() -> None:
    rank = Rank()
    rank.warm()
    for first in (True, False, False):
        rank.backward()
        assert rank.step(1) == (rank.count if first else 0), "after a NaN the number is another than expected"
        rank.backward(scale=float("nan"))
        assert rank.eager.take(2) is None
        rank.flat_parameters.drop_gradients()
    assert not rank.eager._closed


def test_models_can_still_be_copied_and_saved() -> None:
    rank = Rank()
    copied = copy.deepcopy(rank.model)
    assert not any(p._post_accumulate_grad_hooks for p in copied.parameters())
    torch.save(rank.model, io.BytesIO())


# -- in a rank's step ---------------------------------------------------------------------------------


class OneOfTwo(SiteGroup):
    """Rank 0 of a site of two whose other rank has the same gradients."""

    def __init__(self, idle: bool = True) -> None:
        super().__init__()
        self.size, self.idle = 2, idle

    @property
    def idle_core(self) -> bool:
        return self.idle

    def deal(self, blobs: list[Tensor]) -> list[Tensor]:
        return blobs


def rank_step_of(
    strategy: str,
    *,
    model: nn.Module | None = None,
    clip_norm: float | None = None,
    idle: bool = True,
    **changes: str | float,
) -> RankStep:
    flat_parameters = FlatParameters(model or Model())
    weights = torch.zeros(flat_parameters.layout.numel)
    flat_parameters.read_weights(weights)
    flat_parameters.write_weights(weights)
    optimizer = torch.optim.SGD(flat_parameters.parameters, lr=0.1)
    found = strategies.find(strategy, changes)
    return RankStep(flat_parameters, optimizer, weights, found, OneOfTwo(idle), KEY, clip_norm=clip_norm)


@pytest.mark.parametrize(
    "strategy", ["qsgd", "terngrad", "weightgrad", "weightgrad-serial", "weightgrad-paper", "auto"]
)
def test_strategies_that_quantize_inside_the_site_are_ahead(strategy: str) -> None:
    rank_step = rank_step_of(strategy)
    assert rank_step.eager is not None
    rank_step.close()
    assert not any(p._post_accumulate_grad_hooks for p in rank_step._flat_parameters.parameters)


def test_whatever_remembers_is_left_alone() -> None:
    assert rank_step_of("baseline").eager is None
    assert rank_step_of("auto", gradients="ef(qsgd(bits=4))").eager is None
    assert rank_step_of("qsgd", gradients="onebit()").eager is None
    assert rank_step_of("qsgd", clip_norm=1.0).eager is None
    assert rank_step_of("qsgd", correction=0.9).eager is None
    assert rank_step_of("qsgd", model=Model().to(torch.bfloat16)).eager is None


@pytest.mark.parametrize(("cores", "threads", "idle"), [(2, 1, False), (3, 1, False), (4, 1, True), (8, 4, False)])
def test_without_an_idle_core_for_every_rank_it_is_not_tried(
    cores: int, threads: int, idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    group = SiteGroup()
    group.size = 2
    assert group.idle_core == idle
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # the other one has a machine of its own
    assert group.idle_core
    assert rank_step_of("qsgd", idle=False).eager is None


@pytest.mark.parametrize("strategy", ["qsgd", "weightgrad"])
@pytest.mark.parametrize("eager", [True, False])
def test_a_gradient_that_is_not_finite_raises_what_it_did(strategy: str, eager: bool) -> None:
    torch.manual_seed(1)
    model = Model()
    rank_step = rank_step_of(strategy, model=model)
    if not eager:
        rank_step.close()
    for step in range(4):
        model(torch.ones(4, 6)).sum().backward()
        if step == 2:
            assert model.seldom.weight.grad is not None
            model.seldom.weight.grad[3, 4] = float("inf")
            with pytest.raises(NonFiniteError, match=r"^seldom.weight: element 52 of 256 is inf \(1 such in all\)"):
                rank_step.step(step)
        else:
            rank_step.step(step)
        rank_step._flat_parameters.drop_gradients()
    assert rank_step.eager is not None
    assert rank_step.eager.used == (2 if eager else 0) * len(rank_step._flat_parameters.layout.slots)
    rank_step.close()


ENDS = """
import torch
from tests.runtime.test_eager_encoding import Rank
rank = Rank()
rank.warm()
rank.backward()
print("ends")
"""


def test_a_process_that_never_leaves_ends_all_the_same() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout == "ends\n"
