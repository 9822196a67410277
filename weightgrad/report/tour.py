"""A real model's gradients and weights through every codec: the numbers behind `weightgrad tour`.

Gradients: a small network learns handwritten digits from two simulated workers. In every step
each worker's gradient of each tensor is encoded with a state of its own, framed, parsed and
decoded; the optimizer sees the average of what was decoded, and nothing else. All codecs start
from the same weights and see the same images. The first spec is the baseline.

    error of a step   |decoded - gradient| / |gradient|, in the last step
    error of the run  |sum of decoded - sum of gradients| / |sum of gradients|, over all steps

The second is what error feedback is about: what a step loses comes later. DGC sends sums of
momentum instead of gradients, so neither error is defined for it.

Weights: the matrices of the baseline's trained model are encoded and decoded once and tested as
they are, without retraining. Loss-aware codecs get Adam's curvature, sqrt(v) + 1e-8 with v the
running second moment of the averaged gradients, and leave the first and the last layer alone.
What is left alone travels as fp32 and is counted.

Left out: the time on a link. Bytes are those of the frames.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

from weightgrad import kernels
from weightgrad.codecs import Codec, Dgc, Fp32, LossAware, State, decode, parse
from weightgrad.errors import NonFiniteError, RangeError, SpecError
from weightgrad.report.machine import measured_on
from weightgrad.train import digits
from weightgrad.wire import parse as parse_frame
from weightgrad.wire import to_bytes

GRADIENT_SPECS = (
    "fp32",
    "fp16",
    "bf16",
    "qsgd(bits=8)",
    "qsgd(bits=4)",
    "qsgd(bits=3)",
    "qsgd(bits=2)",
    "clip(2.5) > qsgd(bits=2)",
    # Error feedback needs an error below 1. With the L2 norm of 512 elements QSGD's bound is 0.18 at
    # 8 bits and 1.8 at 4 bits, where the residual grows until training diverges.
    "ef(qsgd(bits=8, norm='l2'))",
    "elias(bits=2)",
    "terngrad",
    "ef(terngrad)",
    "ef(sign)",
    "onebit",
    "adaptive(pi=16)",
    "adaptive(pi=64)",
    "powersgd(rank=2)",
    "ef(threshold(0.05))",
    "dgc(fraction=0.01, warmup=40)",
    "ef(topk(0.01))",
    "ef(topk(0.01) > qsgd(bits=4))",
    "ef(topk(0.001))",
)
WEIGHT_SPECS = (
    "fp32",
    "fp16",
    "codebook(bits=4)",
    "codebook(bits=2)",
    "lossaware(bits=4)",
    "lossaware(bits='ternary')",
    "lossaware(bits=1)",
)
FRAMES_SPEC = "ef(topk(0.01) > qsgd(bits=4))"
_BETA = 0.999  # of the second moment, as in Adam

Watch: TypeAlias = Callable[[str, int, float], None]
"""watch(spec, steps done, loss), called after every step."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How every codec's model is trained. The learning rate falls to zero in a straight line.

    It starts where every codec of the list still trains: at 0.05 elias(bits=2), the noisiest, does not.
    """

    steps: int = 200
    workers: int = 2
    batch: int = 32
    learning_rate: float = 0.03
    momentum: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "workers", "batch"):
            if getattr(self, name) < 1:
                raise SpecError(f"Plan.{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True)
class GradientRow:
    """Training with one gradient codec."""

    codec: str
    feedback: bool
    frame_bytes_per_step: float
    bits_per_element: float
    times_smaller: float
    error_of_step: float | None
    error_of_run: float | None
    codec_mb_s: float
    accuracy: float
    accuracy_minus_fp32: float
    diverged_at_step: int | None


@dataclass(frozen=True)
class WeightRow:
    """The trained model through one weight codec."""

    codec: str
    frame_bytes: int
    bits_per_element: float
    times_smaller: float
    encoded_elements: int
    error: float | None
    accuracy: float
    accuracy_minus_fp32: float


@dataclass
class Tour:
    """Everything that was measured so far."""

    plan: Plan
    parameters: int
    largest_tensor: int
    test_images: int = digits.TEST_IMAGES
    measured_on: str = field(default_factory=measured_on)
    kernels: str = field(default_factory=lambda: str(kernels.status()))
    threads: int = field(default_factory=torch.get_num_threads)
    seconds: float = 0.0
    complete: bool = False
    gradients: list[GradientRow] = field(default_factory=list)
    weights: list[WeightRow] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """As JSON. The file is there in full or as it was before."""
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps(asdict(self), indent=1, allow_nan=False) + "\n")
        beside.replace(path)


def _ratio(error: float, whole: float) -> float | None:
    """error / whole, unless it says nothing."""
    return error / whole if math.isfinite(error) and math.isfinite(whole) and whole > 0 else None


def _split(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views of a flat tensor, shaped like these."""
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


class _Exchange:
    """What the workers send in one training: a state for each worker and tensor, and the counts."""

    def __init__(self, codec: Codec, model: nn.Module, plan: Plan) -> None:
        self.codec, self.plan = codec, plan
        tensors = [tensor.detach() for tensor in model.parameters()]
        self.states: list[list[State]] = [[codec.init(tensor) for tensor in tensors] for _ in range(plan.workers)]
        elements = sum(tensor.numel() for tensor in tensors)
        self.sent, self.received = torch.zeros(2, plan.workers, elements)
        self.sent_sum, self.received_sum = torch.zeros(2, elements)
        self.views = [_split(row, tensors) for row in self.received]
        self.average = torch.zeros(elements)
        for tensor, view in zip(model.parameters(), _split(self.average, tensors), strict=True):
            tensor.grad = view
        self.frames: list[bytes] = []
        self.frame_bytes = 0
        self.seconds = 0.0
        self.calls = 0

    def send(self, worker: int, step: int, gradients: Iterable[Tensor]) -> None:
        """Encode, frame, parse and decode one worker's gradients."""
        whole = list(gradients)
        self.sent[worker] = torch.cat([gradient.reshape(-1) for gradient in whole])
        frames = []
        for place, gradient in enumerate(whole):
            key = kernels.derive(self.plan.seed, worker, step, place)
            start = time.perf_counter()
            payload, self.states[worker][place] = self.codec.encode(gradient, self.states[worker][place], key)
            encoded = time.perf_counter()
            frames.append(to_bytes(payload))
            arrived = parse_frame(frames[-1])
            parsed = time.perf_counter()
            decode(arrived, out=self.views[worker][place])
            self.seconds += time.perf_counter() - parsed + encoded - start
        self.frame_bytes += sum(map(len, frames))
        self.calls += 1
        if worker == 0:
            self.frames = frames

    def settle(self) -> None:
        """All workers have sent: average, where the optimizer looks for it."""
        torch.mean(self.received, 0, out=self.average)
        self.sent_sum += self.sent.sum(0)
        self.received_sum += self.received.sum(0)

    def errors(self) -> tuple[float | None, float | None]:
        """Of the last step, and of the run."""
        if isinstance(self.codec, Dgc):
            return None, None
        step = _ratio(float((self.received - self.sent).norm()), float(self.sent.norm()))
        return step, _ratio(float((self.received_sum - self.sent_sum).norm()), float(self.sent_sum.norm()))

    def row(self, spec: str, accuracy: float, baseline: float, diverged_at: int | None) -> GradientRow:
        """What came of it."""
        elements, calls = self.average.numel(), max(self.calls, 1)
        bits = 8 * self.frame_bytes / (elements * calls)
        error_of_step, error_of_run = self.errors()
        return GradientRow(
            codec=spec,
            feedback=self.codec.carries_error,
            frame_bytes_per_step=self.frame_bytes / calls * self.plan.workers,
            bits_per_element=bits,
            times_smaller=32 / bits if bits else 0.0,
            error_of_step=error_of_step,
            error_of_run=error_of_run,
            codec_mb_s=4e-6 * elements * self.calls / self.seconds if self.seconds else 0.0,
            accuracy=accuracy,
            accuracy_minus_fp32=accuracy - baseline,
            diverged_at_step=diverged_at,
        )


@dataclass
class Trained:
    """What training with one codec leaves behind. `second_moment` is laid out like the parameters."""

    row: GradientRow
    model: digits.LeNet
    second_moment: list[Tensor]
    frames: list[bytes]  # of worker 0 in the last step


def train(
    spec: str, plan: Plan, data: digits.Digits, *, baseline: float | None = None, watch: Watch | None = None
) -> Trained:
    """Train with this codec. `baseline` is the accuracy to compare with; None for the baseline itself."""
    codec = parse(spec)
    model = digits.LeNet(plan.seed)
    exchange = _Exchange(codec, model, plan)
    momentum = 0.0 if isinstance(codec, Dgc) else plan.momentum  # DGC has its own
    optimizer = torch.optim.SGD(model.parameters(), lr=plan.learning_rate, momentum=momentum)
    chosen = digits.batches(data, steps=plan.steps, workers=plan.workers, batch=plan.batch, seed=plan.seed)
    squares = torch.zeros_like(exchange.average)
    diverged_at: int | None = None
    for step in range(plan.steps):
        loss_sum = 0.0
        try:
            for worker in range(plan.workers):
                images = chosen[step, worker]
                loss = nn.functional.cross_entropy(model(data.train_images[images]), data.train_labels[images])
                exchange.send(worker, step, torch.autograd.grad(loss, list(model.parameters())))
                loss_sum += loss.item()
        except (NonFiniteError, RangeError):
            diverged_at = step
            break
        exchange.settle()
        squares.lerp_(exchange.average.square(), 1 - _BETA)
        optimizer.param_groups[0]["lr"] = plan.learning_rate * (1 - step / plan.steps)
        optimizer.step()
        if watch is not None:
            watch(spec, step + 1, loss_sum / plan.workers)
    accuracy = digits.accuracy(model, data)
    row = exchange.row(spec, accuracy, accuracy if baseline is None else baseline, diverged_at)
    second_moment = _split(squares / (1 - _BETA**plan.steps), list(model.parameters()))
    return Trained(row, model, second_moment, exchange.frames)


def encode_weights(spec: str, trained: Trained, data: digits.Digits, seed: int = 0) -> WeightRow:
    """The trained model after its matrices went through this codec; nothing is trained again."""
    codec = parse(spec)
    model = copy.deepcopy(trained.model)
    tensors = [tensor.data for tensor in model.parameters()]
    matrices = [place for place, tensor in enumerate(tensors) if tensor.dim() > 1]
    if isinstance(codec, LossAware):
        matrices = matrices[1:-1]
    frame_bytes = 0
    error = whole = 0.0
    for place, weight in enumerate(tensors):
        key = kernels.derive(seed, place)
        if place not in matrices:
            payload, _ = Fp32().encode(weight, {}, key)
        elif isinstance(codec, LossAware):
            curvature = trained.second_moment[place].sqrt() + 1e-8
            payload, _ = codec.encode(weight, codec.init(weight), key, curvature=curvature)
        else:
            payload, _ = codec.encode(weight, codec.init(weight), key)
        frame = to_bytes(payload)
        frame_bytes += len(frame)
        decoded = decode(parse_frame(frame))
        if place in matrices:
            error += float((decoded - weight).square().sum())
            whole += float(weight.square().sum())
        weight.copy_(decoded)
    elements = sum(tensor.numel() for tensor in tensors)
    accuracy = digits.accuracy(model, data)
    return WeightRow(
        codec=spec,
        frame_bytes=frame_bytes,
        bits_per_element=8 * frame_bytes / elements,
        times_smaller=4 * elements / frame_bytes,
        encoded_elements=sum(tensors[place].numel() for place in matrices),
        error=_ratio(math.sqrt(error), math.sqrt(whole)),
        accuracy=accuracy,
        accuracy_minus_fp32=accuracy - trained.row.accuracy,
    )


def measure(
    out: Path,
    plan: Plan,
    *,
    gradient_specs: tuple[str, ...] = GRADIENT_SPECS,
    weight_specs: tuple[str, ...] = WEIGHT_SPECS,
    watch: Watch | None = None,
) -> Tour:
    """The whole tour. Writes `tour.json` after every codec and `gradients.wg` on the way."""
    start = time.perf_counter()
    data = digits.load(plan.seed)
    sizes = [tensor.numel() for tensor in digits.LeNet(plan.seed).parameters()]
    tour = Tour(plan, sum(sizes), max(sizes))
    out.mkdir(parents=True, exist_ok=True)
    shown = FRAMES_SPEC if FRAMES_SPEC in gradient_specs else gradient_specs[-1]
    baseline: Trained | None = None
    for spec in gradient_specs:
        reference = None if baseline is None else baseline.row.accuracy
        trained = train(spec, plan, data, baseline=reference, watch=watch)
        baseline = baseline or trained
        if spec == shown:
            (out / "gradients.wg").write_bytes(b"".join(trained.frames))
        tour.gradients.append(trained.row)
        tour.seconds = time.perf_counter() - start
        tour.write(out / "tour.json")
    if baseline is not None:
        tour.weights = [encode_weights(spec, baseline, data, plan.seed) for spec in weight_specs]
    tour.seconds, tour.complete = time.perf_counter() - start, True
    tour.write(out / "tour.json")
    return tour
