"""The library compressed-tensors reads our packed integers, and gives the same values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import weightgrad as wg

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed: pip install compressed-tensors")


@pytest.mark.parametrize(
    "weights",
    [
        "lossaware(bits='ternary')",
        "lossaware(bits='ternary', per='row')",
        "lossaware(bits=4)",
        "lossaware(bits=8, per='row')",
        "qsgd(bits=4, bucket=32, rounding='nearest')",
    ],
)
def test_its_own_decompressor_gives_our_values(weights: str, tmp_path: Path) -> None:
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(3)), nn.Linear(96, 10))
    wg.save_quantized(model, tmp_path / "m.safetensors", weights=weights)
    ours, tensors = wg.load_quantized(tmp_path / "m.safetensors"), load_file(tmp_path / "m.safetensors")
    with safe_open(str(tmp_path / "m.safetensors"), framework="pt") as opened:
        config: Any = QuantizationConfig.model_validate(json.loads(opened.metadata()["quantization_config"]))
    assert config.ignore == ["0", "3"]
    found = []
    for scheme in config.config_groups.values():
        for target in scheme.targets:
            own = {k.removeprefix(f"{target}."): v for k, v in tensors.items() if k.startswith(f"{target}.")}
            weight = PackedQuantizationCompressor.decompress(own, scheme)["weight"]
            assert torch.equal(weight, ours[f"{target}.weight"])
            found.append(target)
    assert found == ["1", "2"]
