"""What moved a local model, passed on to ranks that have the same weights."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from weightgrad import codecs
from weightgrad.core.local_model import FlatModel
from weightgrad.core.site.local_changes import (
    LocalChanges,
    changes_nbytes,
    changes_of_holder,
    pack_changes,
    unpack_changes,
    worth_passing_on,
)
from weightgrad.kernels import fixed
from weightgrad.wire.intervals import Intervals
from weightgrad.wire.messages import Segment

NUMEL = 64
CODECS = ("topk(0.2)", "topk(0.2) > sign()", "topk(0.1) > codebook(bits=2)", "qsgd(bits=4)", "fp32")

changes = st.lists(
    st.tuples(
        st.sampled_from(CODECS),
        st.sampled_from([0, 16, 40]),
        st.sampled_from([fixed.ADD, fixed.SUBTRACT]),
        st.sampled_from([1.0, 0.25, 1 / 3]),
        st.integers(0, 2**32),
    ),
    max_size=6,
)


def segment(codec_text: str, start: int, seed: int) -> Segment:
    codec = codecs.parse(codec_text)
    values = torch.randn(16, generator=torch.Generator().manual_seed(seed))
    return Segment.at(Intervals(((start, start + 16),)), codec.encode(values, codec.init(values), seed)[0])


def weights() -> FlatModel:
    return FlatModel(torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)), Intervals.whole(NUMEL))


@given(changes)
def test_whoever_is_told_the_changes_has_the_same_bits(found: list[tuple[str, int, int, float, int]]) -> None:
    holder, other, kept = weights(), weights(), LocalChanges()
    kept.begin()
    for codec, start, mode, share, seed in found:
        kept.make(holder, segment(codec, start, seed), mode, share)
    assert kept.listed is not None
    packed = []
    for held in (Intervals(((0, 32),)), Intervals(((32, NUMEL),))):
        own = changes_of_holder(kept.listed, held)
        packed.append(pack_changes(own))
        assert packed[-1].numel() == changes_nbytes(own)
    for blob in packed:
        for change in unpack_changes(blob):
            for one in change.segments:
                other.add_segment(one, change.mode, share=change.share)
    assert torch.equal(other.vector.view(torch.int32), holder.vector.view(torch.int32))


def test_nothing_is_listed_unless_somebody_asks() -> None:
    local, kept = weights(), LocalChanges()
    kept.make(local, segment("fp32", 0, 1), fixed.ADD)
    seen = [kept.listed]
    kept.begin()
    kept.make(local, segment("fp32", 0, 1), fixed.ADD)
    seen.append(kept.listed)
    kept.end()
    seen.append(kept.listed)
    assert [one is None for one in seen] == [True, False, True]


def test_weights_are_sent_where_a_rank_has_no_list_or_changes_are_larger() -> None:
    assert worth_passing_on([100, 0], 100)
    assert not worth_passing_on([100, None], 100)
    assert not worth_passing_on([300, 100], 100)
