"""What sites add to the final model: kept, put together, and checked as a stranger's."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from weightgrad import codecs
from weightgrad.codecs import Payload
from weightgrad.core.layout import Layout
from weightgrad.errors import ProtocolError
from weightgrad.runtime.checkpoints.final_state import FinalStates, SiteFinalState, values_of
from weightgrad.wire.messages import FinalPart

LAYOUT = Layout.of_shapes([("a", (4, 4)), ("b", (32, 8)), ("c", (8,))])
SITES = ("east", "west")


def payloads(seed: int) -> list[Payload]:
    """Ternary for b, exact for the others."""
    draw, made = torch.Generator().manual_seed(seed), []
    for slot in LAYOUT.slots:
        codec = codecs.parse("lossaware(bits='ternary')" if slot.name == "b" else "fp32")
        made.append(codec.encode(torch.randn(slot.shape, generator=draw), {}, 0)[0])
    return made


def parts(site: str, *, version: int = 7, samples: int = 10, mean: float = 1.0, seed: int = 0) -> list[FinalPart]:
    buffers = {"norm.mean": torch.full((3,), mean), "norm.count": torch.tensor(samples)}
    return SiteFinalState.of(LAYOUT, payloads(seed), buffers, version=version, samples=samples).parts(site)


def taken(directory: Path, *sent: list[FinalPart]) -> FinalStates:
    states = FinalStates(directory, SITES)
    for part in (part for site in sent for part in site):
        states.take(part, LAYOUT.numel)
    return states


def test_buffers_are_averaged_by_samples_and_weights_are_the_first_sites(tmp_path: Path) -> None:
    states = taken(tmp_path, parts("west", samples=30, mean=5.0, seed=1), parts("east", samples=10, mean=1.0, seed=0))
    found = states.collect(LAYOUT, 7, wanted=True)
    assert torch.equal(found.buffers["norm.mean"], torch.full((3,), 4.0))
    assert found.buffers["norm.count"] == 30, "the largest"
    assert found.quantized is not None
    assert found.quantized.keys() == {"b"}
    assert torch.equal(values_of(found.quantized["b"]), codecs.decode(payloads(0)[1]))
    assert not list(tmp_path.iterdir())


def test_a_site_that_has_not_seen_the_last_version_quantizes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = taken(tmp_path, parts("east", version=6), parts("west", seed=1)).collect(LAYOUT, 7, wanted=True)
    assert found.quantized is not None
    assert torch.equal(values_of(found.quantized["b"]), codecs.decode(payloads(1)[1]))
    with caplog.at_level(logging.WARNING):
        found = taken(tmp_path, parts("east", version=6)).collect(LAYOUT, 7, wanted=True)
    assert found.quantized is None
    assert found.buffers
    assert "no site has quantized version 7" in caplog.text


def test_a_server_that_was_restarted_still_has_them(tmp_path: Path) -> None:
    taken(tmp_path, parts("east"))
    assert FinalStates(tmp_path, SITES).collect(LAYOUT, 7, wanted=True).quantized is not None


def test_parts_come_in_order_and_replace_those_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightgrad.runtime.checkpoints.final_state._PART_BYTES", 100)
    sent = parts("east")
    assert len(sent) > 5
    states = taken(tmp_path, sent[:3])
    assert not states.collect(LAYOUT, 7, wanted=True).buffers, "a file that has not come whole is none"
    states = taken(tmp_path, sent[:3])
    with pytest.raises(ProtocolError, match="sent part 4 of its final state, wanted 3"):
        states.take(sent[4], LAYOUT.numel)
    for part in sent:  # once more, from the beginning
        states.take(part, LAYOUT.numel)
    assert states.collect(LAYOUT, 7, wanted=True).buffers


def test_too_large_a_final_state_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightgrad.runtime.checkpoints.final_state._MOST_BUFFER_BYTES", 10)
    with pytest.raises(ProtocolError, match="larger than its model"):
        taken(tmp_path, [FinalPart(site="east", place=0, parts=2, data=bytes(4 * LAYOUT.numel + 11))])


def other(buffers: dict[str, Tensor], layout: Layout = LAYOUT) -> list[FinalPart]:
    made = [codecs.parse("lossaware(bits=4)").encode(torch.ones(slot.shape), {}, 0)[0] for slot in layout.slots]
    return SiteFinalState.of(layout, made, buffers, version=7, samples=1).parts("east")


@pytest.mark.parametrize(
    "sent",
    [
        [FinalPart(site="east", place=0, parts=1, data=b"no safetensors")],
        other({}, Layout.of_shapes([("a", (4, 4)), ("stranger", (8, 8))])),
        other({}, Layout.of_shapes([("a", (4, 5))])),
        other({"b": torch.zeros(3)}),
    ],
    ids=["no file", "a tensor of another model", "another shape", "a buffer with the name of a weight"],
)
def test_what_does_not_fit_is_left_out(sent: list[FinalPart], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = taken(tmp_path, sent, parts("west", mean=2.0)).collect(LAYOUT, 7, wanted=True)
    assert "the final state of east is left out" in caplog.text
    assert torch.equal(found.buffers["norm.mean"], torch.full((3,), 2.0))
    assert found.quantized is not None


def test_without_a_directory_nothing_is_kept() -> None:
    states = FinalStates(None, SITES)
    states.take(parts("east")[0], LAYOUT.numel)
    assert not states.collect(LAYOUT, 7, wanted=True).buffers


def test_where_only_sites_have_the_model_none_has_it_of_a_version_that_is_to_come(tmp_path: Path) -> None:
    """A site that claims version 2**32 - 1 would bring its own weights as the final model."""
    honest, lie = parts("west", version=7, seed=1), parts("east", version=2**32 - 1)
    found = taken(tmp_path, lie, honest).collect(LAYOUT, 7, wanted=False, elsewhere=True)
    assert found.weights is not None
    assert torch.equal(values_of(found.weights["b"]), codecs.decode(payloads(1)[1]))
