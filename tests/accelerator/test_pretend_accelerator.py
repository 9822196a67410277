"""The site path on an accelerator that this machine does not have: what crosses to the host, when, and in what order.

`pretend.py` says what the pretend accelerator refuses, `cases.py` and `odd_models.py` have the cases, each a process of
its own.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.accelerator import processes
from tests.runtime.deployment import PATIENCE_S
from tests.runtime.user_sites import served

CASES = (
    "refuses",
    "counts",
    "copies_need_to_be_waited_for",
    "streams_need_to_wait",
    "rooms_are_used_again",
    "weights_cross_in_their_dtype",
    "a_round_copies_the_shard_once",
    "gradients_cross_at_every_step",
    "sparse_results_cross_as_entries",
    "scalers_and_optimizers",
    "saved_activations",
    "the_check_of_gpus",
    "encoded_bytes_cross",
    "state_that_devices_refuse",
    "parameters_on_device_and_host",
    "dtypes_of_parameters",
    "pinned_memory_is_bounded",
)
STRATEGIES = (
    "auto", "baseline", "dgc", "diloco, every: 4", "gaia", "powersgd", "adaptive", "sparseloco, every: 4",
    "streaming", "terngrad", "weightgrad", "weightgrad-paper",
)  # fmt: skip
NUMEL = 146
TRITON = {  # strategies, and kernels that must have worked for the site
    "diloco, every: 4, up: qsgd(bits=4), down: qsgd(bits=4)": "_norms _quantize _dequantize",
    "sparseloco, every: 4": "_count _list _low _scatter",
    "terngrad": "_ternary",
}


@pytest.mark.parametrize("case", CASES)
def test_case(case: str, tmp_path: Path) -> None:
    processes.run(case, out=tmp_path)


@pytest.mark.parametrize("state_on", ["host", "device"])
@pytest.mark.parametrize("case", ["odd_parameters", "moved_after_prepare"])
def test_models_and_habits_that_are_rare(case: str, state_on: str, tmp_path: Path) -> None:
    processes.run(case, state_on, out=tmp_path)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_site_on_the_device_ends_with_the_bits_of_one_on_the_host(strategy: str, tmp_path: Path) -> None:
    processes.run("equals_the_host", strategy, out=tmp_path)


@pytest.mark.parametrize(
    "strategy", ["auto", "dgc", "ahead", "gaia", "sparseloco, every: 4", "streaming", "weightgrad"]
)
def test_a_site_with_its_state_on_the_device_ends_with_the_same_bits(strategy: str, tmp_path: Path) -> None:
    processes.run("state_on_the_device", strategy, out=tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(("strategy", "kernels"), TRITON.items())
def test_a_site_on_the_device_works_with_triton_kernels(strategy: str, kernels: str, tmp_path: Path) -> None:
    processes.run("triton_kernels", strategy, *kernels.split(), out=tmp_path, interpreted=True)


@pytest.mark.parametrize("strategy", ["sparseloco, every: 3, overlap: 2", "streaming"])
def test_a_site_on_the_device_goes_on_from_its_state(strategy: str, tmp_path: Path) -> None:
    processes.run("two_lives", strategy, out=tmp_path)


@pytest.mark.parametrize("strategy", ["sparseloco, every: 3, overlap: 2", "streaming"])
def test_a_push_that_moves_nothing_is_encoded_beside_the_next_passes(strategy: str, tmp_path: Path) -> None:
    processes.run("pushes_beside_passes", strategy, out=tmp_path)


@pytest.mark.parametrize("strategy", ["weightgrad, every: 2, overlap: 1", "sparseloco, every: 2, overlap: 1"])
def test_pushes_in_one_pass_are_of_weights_in_host_memory(strategy: str, tmp_path: Path) -> None:
    processes.run("one_pass_only_in_host_memory", strategy, out=tmp_path)


def ranks(
    strategy: str, kind: str, out: Path
) -> tuple[list[tuple[list[tuple[int, int, int]], torch.Tensor]], torch.Tensor]:
    """A site of two ranks, to its end: what crossed in each rank's steps with its weights, and the global model."""
    out.mkdir()
    with served(strategy, "east") as hub:
        started = processes.start_ranks(kind, hub.address, 2, out)
        hub.until(lambda: all(process.poll() is not None for process, _ in started))
        codes = [process.wait(PATIENCE_S) for process, _ in started]
        assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for _, log in started)
        return [
            torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(2)
        ], hub.global_model.vector.clone()


def test_ranks_with_a_local_server(tmp_path: Path) -> None:
    """Master weights are on the host, and parameters on the device are copies of them."""
    results, there = ranks("weightgrad-paper", "device", tmp_path / "device")
    _, here = ranks("weightgrad-paper", "host", tmp_path / "host")
    assert torch.equal(there, here)
    assert all(torch.equal(results[0][1], weights) for _, weights in results)


def test_shards_with_their_state_on_the_device(tmp_path: Path) -> None:
    """Of what a rank has only encoded bytes cross: here the codec is fp32, so 4 bytes an element, each way."""
    results, there = ranks("diloco, every: 4", "device shards state", tmp_path / "device")
    _, here = ranks("diloco, every: 4", "host shards", tmp_path / "host")
    assert torch.equal(there, here)
    for steps, weights in results:
        own = 4 * weights.numel()
        assert steps == [(own, own, 0) if step % 4 == 3 else (0, 0, 0) for step in range(8)]


def test_shards_whose_pushes_are_encoded_beside_the_next_passes(tmp_path: Path) -> None:
    """Ranks encode in threads of their own while rank 0 goes on; the bits are those of the host."""
    results, there = ranks("sparseloco, every: 3, overlap: 2", "device shards", tmp_path / "device")
    _, here = ranks("sparseloco, every: 3, overlap: 2", "host shards", tmp_path / "host")
    assert torch.equal(there, here)
    for steps, weights in results:
        assert [step[0] for step in steps] == [0, 0, 4 * weights.numel(), 0, 0, 4 * weights.numel(), 0, 0]


def test_shards_as_fsdp2_has_them(tmp_path: Path) -> None:
    """A rank copies the rows that it has, at a round, and nothing in between."""
    results, there = ranks("diloco, every: 4", "device shards", tmp_path / "device")
    _, here = ranks("diloco, every: 4", "host shards", tmp_path / "host")
    assert torch.equal(there, here)
    for steps, weights in results:
        own = 4 * weights.numel()
        assert steps == [(own, own, 0) if step % 4 == 3 else (0, 0, 0) for step in range(8)]
    assert sum(weights.numel() for _, weights in results) == NUMEL


@pytest.mark.parametrize("strategy", ["diloco, every: 4", "sparseloco, every: 3, overlap: 2"])
def test_parameters_that_fsdp2_offloads_are_those_of_the_host(strategy: str, tmp_path: Path) -> None:
    """FSDP2 itself, on the CPU: with its `CPUOffloadPolicy` two ranks end with the bits that they have without."""
    results, offloaded = ranks(strategy, "host fsdp2 offload", tmp_path / "offloaded")
    plain, expected = ranks(strategy, "host fsdp2", tmp_path / "plain")
    assert torch.equal(offloaded, expected)
    assert offloaded.any()
    for (_, weights), (_, wanted) in zip(results, plain, strict=True):
        assert torch.equal(weights, wanted)
        assert weights.numel() < NUMEL
