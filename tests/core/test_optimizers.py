"""The flat optimizers do what torch does to a module, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weightgrad.core import optimizers
from weightgrad.core.flat_parameters import attach, parameters_of
from weightgrad.core.local_model import scatter
from weightgrad.core.optimizers.learning_rates import set_rate
from weightgrad.core.optimizers.state import load_state, load_state_tensors, state_scalars, state_tensors, state_vectors
from weightgrad.errors import StateError, StrategyError
from weightgrad.local import Layout
from weightgrad.wire.intervals import Intervals

from .harness import at

SHAPES = [("a", (7, 5)), ("b", (5,)), ("c", (3, 2, 3, 3)), ("d", ()), ("e", (0, 4)), ("f", (33,))]
LAYOUT = Layout.of_shapes(SHAPES)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"lr": 0.1}),
    ("sgd", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    ("adam", {"lr": 0.01, "betas": [0.8, 0.99]}),
    ("adam", {"lr": 0.01, "amsgrad": True}),
    ("adamw", {"lr": 0.01, "weight_decay": 0.1}),
    ("adagrad", {"lr": 0.1, "lr_decay": 0.01}),
    ("adadelta", {"lr": 1.0, "rho": 0.8}),
    ("lars", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    ("muon", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
]
TORCH = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Flat:
    """Flat weights with their optimizer."""

    def __init__(self, name: str, options: Mapping[str, Any], weights: Tensor) -> None:
        self.weights = weights.clone()
        self.parameters = parameters_of(LAYOUT, self.weights)
        self.optimizer = optimizers.build(name, list(self.parameters.values()), options)

    def step(self, gradient: Tensor) -> None:
        attach(self.parameters, LAYOUT, gradient)
        self.optimizer.step()


@pytest.mark.parametrize(("name", "options"), [case for case in CASES if case[0] in TORCH], ids=str)
def test_bit_equal_to_torch(name: str, options: dict[str, Any]) -> None:
    start = randn(LAYOUT.numel)
    flat = Flat(name, options, start)
    plain = [nn.Parameter(view.clone()) for view in LAYOUT.views(start)]
    reference = TORCH[name](plain, **options)
    for step in range(20):
        gradient = randn(LAYOUT.numel, seed=step + 1)
        for parameter, view in zip(plain, LAYOUT.views(gradient), strict=True):
            parameter.grad = view.clone()
        rate = 0.1 / (step + 1)
        set_rate(flat.optimizer, rate)
        set_rate(reference, rate)
        flat.step(gradient)
        reference.step()
        assert torch.equal(flat.weights, torch.cat([p.detach().view(-1) for p in plain]))
    assert not torch.equal(flat.weights, start)


@pytest.mark.parametrize("adapt_vectors", [False, True])
def test_lars_is_its_equation(adapt_vectors: bool) -> None:
    start = randn(LAYOUT.numel)
    start[LAYOUT.slots[2].start : LAYOUT.slots[2].stop] = 0  # a tensor without a norm
    options = {"momentum": 0.9, "weight_decay": 0.05, "trust": 0.02, "eps": 0.0, "adapt_vectors": adapt_vectors}
    flat = Flat("lars", options, start)
    weights = [view.double() for view in LAYOUT.views(start)]
    velocity = [torch.zeros_like(view) for view in weights]
    for step in range(10):
        gradient = randn(LAYOUT.numel, seed=step + 1)
        rate = 0.5 / (step + 1)
        for place, g in enumerate(LAYOUT.views(gradient)):
            w, g64 = weights[place], g.double()
            ratio, decay = 1.0, 0.0
            if adapt_vectors or w.dim() > 1:
                decay = 0.05
                sizes = float(w.norm()), float(g64.norm())
                if sizes[0] > 0 and sizes[1] > 0:
                    ratio = 0.02 * sizes[0] / (sizes[1] + decay * sizes[0])
            velocity[place] = 0.9 * velocity[place] + rate * ratio * (g64 + decay * w)
            weights[place] = w - velocity[place]
        set_rate(flat.optimizer, rate)
        flat.step(gradient)
        torch.testing.assert_close(flat.weights, torch.cat([w.view(-1) for w in weights]).float())


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5), (8, 2, 3, 3)])
def test_muon_moves_matrices_along_all_their_directions(shape: tuple[int, ...]) -> None:
    matrix, vector = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(7))
    optimizer = optimizers.build("muon", [matrix, vector], {"lr": 0.1, "momentum": 0.9})
    matrix.grad, vector.grad = randn(*shape), randn(7, seed=2)
    optimizer.step()
    step = matrix.detach().reshape(shape[0], -1) / -0.1
    values = torch.linalg.svdvals(step) / max(step.shape) ** 0.5 / 0.2
    assert float(values.min()) > 0.5, "about orthogonal, whatever the scales of the gradient"
    assert float(values.max()) < 1.3
    left, _, right = torch.linalg.svd(randn(*shape).reshape(shape[0], -1), full_matrices=False)
    assert float((step * (left @ right)).sum()) > 0.9 * float(step.norm() * (left @ right).norm())
    torch.testing.assert_close(vector.detach(), -0.1 * 0.2 * randn(7, seed=2).sign())
    if len(shape) == 2:  # torch's own agrees, up to the bfloat16 that it computes in
        other = nn.Parameter(torch.zeros(shape))
        other.grad = randn(*shape)
        torch.optim.Muon([other], lr=0.1, momentum=0.9, weight_decay=0, adjust_lr_fn="match_rms_adamw").step()
        torch.testing.assert_close(other.detach(), matrix.detach(), rtol=0.1, atol=0.05 * float(step.abs().max()) * 0.1)


def test_parameters_share_memory_with_the_flat_vector() -> None:
    flat = randn(LAYOUT.numel)
    parameters = parameters_of(LAYOUT, flat)
    with torch.no_grad():
        parameters[2].fill_(7.0)
    slot = LAYOUT.slots[2]
    assert torch.equal(slot.of(flat), torch.full(slot.shape, 7.0))
    gradient = torch.zeros(LAYOUT.numel)
    attach(parameters, LAYOUT, gradient)
    gradient.fill_(3.0)
    assert all(p.grad is not None and torch.equal(p.grad, torch.full(p.shape, 3.0)) for p in parameters.values())


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_a_saved_state_continues_the_same(name: str, options: dict[str, Any]) -> None:
    through = Flat(name, options, randn(LAYOUT.numel))
    for step in range(10):
        through.step(randn(LAYOUT.numel, seed=step))
    saved = state_tensors(through.optimizer)
    middle = through.weights.clone()
    for step in range(10, 20):
        through.step(randn(LAYOUT.numel, seed=step))
    again = Flat(name, options, middle)
    load_state_tensors(again.optimizer, saved)
    for step in range(10, 20):
        again.step(randn(LAYOUT.numel, seed=step))
    assert torch.equal(again.weights, through.weights)
    assert not torch.equal(again.weights, middle)
    if name == "adam":
        assert float(saved["0.step"]) == 10


def test_the_state_before_the_first_step_can_be_loaded() -> None:
    used = Flat("adam", {}, randn(LAYOUT.numel))
    fresh = state_tensors(used.optimizer)
    used.step(randn(LAYOUT.numel))
    load_state_tensors(used.optimizer, fresh)
    assert state_tensors(used.optimizer) == {}


def test_a_state_of_another_optimizer_is_refused() -> None:
    adam, sgd = Flat("adam", {}, randn(LAYOUT.numel)), Flat("sgd", {"momentum": 0.9}, randn(LAYOUT.numel))
    adam.step(randn(LAYOUT.numel))
    sgd.step(randn(LAYOUT.numel))
    with pytest.raises(StateError, match="exp_avg"):
        load_state_tensors(adam.optimizer, state_tensors(sgd.optimizer))
    short = state_tensors(sgd.optimizer)
    short["0.momentum_buffer"] = short["0.momentum_buffer"][:3].contiguous()
    with pytest.raises(StateError, match=r"0\.momentum_buffer should be .* \[7, 5\]"):
        load_state_tensors(sgd.optimizer, short)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sdg", {}, "no optimizer 'sdg'; there are adadelta, adagrad, adam, adamw, lars, muon, sgd"),
        ("sgd", {"betas": (0.9, 0.99)}, "no option 'betas'; there are lr, momentum, dampening, weight_decay, nesterov"),
        ("adam", {"lr": "1e-3"}, "lr='1e-3' must be a finite number"),
        ("adam", {"lr": float("nan")}, "lr=nan must be a finite number"),
        ("adam", {"betas": 0.9}, "betas=0.9 must be two numbers"),
        ("sgd", {"nesterov": 1}, "nesterov=1 must be true or false"),
        ("sgd", {"lr": -1.0}, "sgd: Invalid learning rate"),
        ("lars", {"momentum": -1.0}, "lars: momentum=-1.0 must not be negative"),
    ],
)
def test_mistakes_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        Flat(name, options, randn(LAYOUT.numel))


@pytest.mark.parametrize(
    "flat", [torch.zeros(3), torch.zeros(LAYOUT.numel).double(), torch.zeros(LAYOUT.numel, 2)[:, 0]]
)
def test_a_vector_that_does_not_fit_is_refused(flat: Tensor) -> None:
    with pytest.raises(StrategyError, match=f"vector of {LAYOUT.numel} elements"):
        parameters_of(LAYOUT, flat)


# -- parts of a model ------------------------------------------------------------------------

HOLDERS = [
    Intervals(((0, 12), (34, 36))),  # rows, one element of a tensor, one of the next
    Intervals(((12, 34), (36, 60), (62, 94))),
    Intervals(((60, 62), (94, 95))),  # and the scalar
    Intervals(((95, LAYOUT.numel),)),
]


class Part:
    """What a holder has of the flat weights, with an optimizer of its own."""

    def __init__(self, name: str, options: Mapping[str, Any], held: Intervals, weights: Tensor) -> None:
        self.held, self.weights = held, at(weights, held)
        self.parameters = parameters_of(LAYOUT, self.weights, held)
        self.optimizer = optimizers.build(name, list(self.parameters.values()), options)

    def step(self, gradient: Tensor) -> None:
        attach(self.parameters, LAYOUT, at(gradient, self.held), self.held)
        self.optimizer.step()

    def vectors(self) -> dict[str, Tensor]:
        return state_vectors(self.optimizer, self.parameters, LAYOUT, self.held)

    def scalars(self) -> dict[str, Tensor]:
        return state_scalars(self.optimizer, self.parameters)

    def load(self, vectors: Mapping[str, Tensor], scalars: Mapping[str, Tensor]) -> None:
        load_state(self.optimizer, self.parameters, LAYOUT, self.held, vectors, scalars)


@pytest.mark.parametrize(("name", "options"), [case for case in CASES if case[0] in TORCH], ids=str)
def test_parts_of_a_model_move_as_the_whole(name: str, options: dict[str, Any]) -> None:
    start = randn(LAYOUT.numel)
    whole, parts = Flat(name, options, start), [Part(name, options, held, start) for held in HOLDERS]
    for step in range(10):
        gradient = randn(LAYOUT.numel, seed=step)
        whole.step(gradient)
        for part in parts:
            part.step(gradient)
            assert torch.equal(part.weights, at(whole.weights, part.held))


@pytest.mark.parametrize(("name", "options"), [case for case in CASES if case[0] in TORCH], ids=str)
def test_the_state_of_the_whole_is_that_of_its_parts(name: str, options: dict[str, Any]) -> None:
    """So a site that is sharded otherwise than the server can download it, and the other way round."""
    start, everything = randn(LAYOUT.numel), Intervals.whole(LAYOUT.numel)
    whole = Part(name, options, everything, start)
    for step in range(10):
        whole.step(randn(LAYOUT.numel, seed=step))
    vectors, scalars = whole.vectors(), whole.scalars()
    assert all(vector.shape == (LAYOUT.numel,) for vector in vectors.values())
    parts = [Part(name, options, held, whole.weights) for held in HOLDERS]
    for part in parts:
        part.load({key: at(vector, part.held) for key, vector in vectors.items()}, scalars)
    again = Part(name, options, everything, whole.weights)
    again.load(vectors, scalars)
    back = Part(name, options, everything, whole.weights)
    joined = {key: torch.zeros(LAYOUT.numel) for key in vectors}
    for part in parts:
        for key, vector in part.vectors().items():
            scatter(joined[key], everything, part.held, vector)
    back.load(joined, {key: value for part in parts for key, value in part.scalars().items()})
    for step in range(10, 14):
        gradient = randn(LAYOUT.numel, seed=step)
        for one in (whole, again, back, *parts):
            one.step(gradient)
            assert torch.equal(one.weights, at(whole.weights, one.held))


def test_a_state_of_parts_of_another_optimizer_is_refused() -> None:
    start, held = randn(LAYOUT.numel), HOLDERS[0]
    adam, sgd = Part("adam", {}, held, start), Part("sgd", {"momentum": 0.9}, held, start)
    adam.step(randn(LAYOUT.numel))
    with pytest.raises(StateError, match="exp_avg"):
        sgd.load(adam.vectors(), adam.scalars())
    adam.load({}, {})
    assert adam.vectors() == {}
