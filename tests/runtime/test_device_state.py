"""Which strategies may keep their state on a device; `tests/accelerator/` has the sites that do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from weightgrad import codecs
from weightgrad.codecs import Codec
from weightgrad.core import strategies
from weightgrad.core.layout import Layout
from weightgrad.core.site.state_memory import HostMemory
from weightgrad.errors import StrategyError
from weightgrad.runtime.model import device_state
from weightgrad.runtime.model.module_weights import ModuleWeights
from weightgrad.runtime.model.named_parameter import NamedParameter

PAGE = (Path(__file__).parents[2] / "docs/gpus.md").read_text()


def _known() -> set[type[Codec]]:
    """Every codec that has a name."""
    found: set[type[Codec]] = set()
    for benchmark in codecs.benchmarks():
        found |= {type(one) for one in device_state._within(codecs.parse(benchmark.spec))}
    assert {one.spec_name for one in found} == set(codecs.available())
    return found


def test_every_codec_is_said_to_have_the_same_bytes_or_not() -> None:
    same, other = set(device_state.SAME_ON_DEVICES), set(device_state.OTHER_ON_DEVICES)
    assert not same & other
    assert same | other == _known()
    assert all(f"`{one.spec_name}`" in PAGE for one in other)


def _weights(device: str) -> ModuleWeights:
    parameter = nn.Parameter(torch.zeros(4, device=device))
    return ModuleWeights([NamedParameter("p", parameter)], Layout.of_shapes([("p", (4,))]))


@pytest.mark.parametrize("changes", [{"up": "powersgd(rank=2)", "per": "tensor"}, {"selector": "largest(0.1)"}])
def test_what_would_have_other_bits_is_refused_on_a_device_and_not_on_the_host(changes: dict[str, str]) -> None:
    strategy = strategies.find("diloco", changes)
    with pytest.raises(StrategyError, match='state_on="host"'):
        device_state.memory_for("device", _weights("meta"), strategy)
    assert isinstance(device_state.memory_for("host", _weights("meta"), strategy), HostMemory)
    assert isinstance(device_state.memory_for("device", _weights("cpu"), strategy), HostMemory)


def test_presets_that_are_refused_are_those_that_the_page_names() -> None:
    refused = {name for name in strategies.available() if device_state._refused(strategies.find(name)) is not None}
    assert refused == {"powersgd", "weightgrad-paper"}


def test_parameters_on_two_devices_and_unknown_places_are_refused() -> None:
    parameters = [NamedParameter(name, nn.Parameter(torch.zeros(2, device=name))) for name in ("cpu", "meta")]
    weights = ModuleWeights(parameters, Layout.of_shapes([("cpu", (2,)), ("meta", (2,))]))
    with pytest.raises(StrategyError, match="cpu, meta"):
        device_state.memory_for("device", weights, strategies.find("diloco"))
    with pytest.raises(StrategyError, match='"host" or "device"'):
        device_state.check_place("gpu")
