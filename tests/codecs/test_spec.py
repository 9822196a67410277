"""The spec language: what it reads, what it writes, and what it says when it cannot."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightgrad import codecs, errors

# Codec values of every kind, by generation.

buckets = st.integers(1, 2**27).map(lambda k: 32 * k)
fractions = st.floats(1e-9, 1)
booleans = st.booleans()


def number(low: float, high: float) -> st.SearchStrategy[float]:
    """Floats, and whole numbers written as such."""
    return st.floats(low, high) | st.integers(math.ceil(low), math.floor(min(high, 2**53)))


plain: st.SearchStrategy[codecs.Codec] = st.one_of(
    st.just(codecs.Fp32()),
    st.just(codecs.Fp16()),
    st.just(codecs.Bf16()),
    st.builds(
        codecs.Qsgd,
        bits=st.sampled_from([2, 3, 4, 8]),
        bucket=buckets,
        norm=st.sampled_from(["max", "l2"]),
        rounding=st.sampled_from(["stochastic", "nearest"]),
    ),
    st.builds(
        codecs.Elias,
        bits=st.sampled_from([2, 3, 4, 8]),
        bucket=st.integers(1, 512).map(lambda k: 32 * k),
        norm=st.sampled_from(["max", "l2"]),
    ),
    st.builds(codecs.TernGrad, clip=number(0, 1e6)),
    st.builds(codecs.Sign, scale=st.sampled_from(["mean", "one"])),
    st.builds(codecs.Codebook, bits=st.integers(1, 8)),
    st.builds(codecs.OneBit, feedback=st.just(False)),
    st.builds(codecs.Adaptive, pi=number(1, 1e9), feedback=st.just(False)),
    st.builds(codecs.LossAware, bits=st.sampled_from(["ternary", 1, 2, 5, 8]), per=st.sampled_from(["tensor", "row"])),
    st.builds(codecs.LossAware, bits=st.sampled_from(["ternary", 1]), exact=booleans),
)
# Values that a sparse payload carries: any codec that has no state and chooses nothing itself.
values = st.recursive(plain, lambda inner: st.builds(codecs.Clip, sigma=number(1e-3, 1e6), then=inner), max_leaves=3)
sparse = st.one_of(
    st.builds(codecs.TopK, fraction=fractions, exact=booleans, then=values),
    st.builds(codecs.Threshold, value=number(0, 3e38), then=values),
)
stateless_or_not = st.one_of(
    values,
    sparse,
    st.builds(codecs.Clip, sigma=number(1e-3, 1e6), then=sparse),
    st.builds(codecs.TernGrad, clip=number(0, 1e6), scaler=st.just("shared")),
    st.builds(codecs.PowerSgd, rank=st.integers(1, 4096), feedback=st.just(False)),
)
anything: st.SearchStrategy[codecs.Codec] = st.one_of(
    stateless_or_not,
    st.builds(codecs.ErrorFeedback, stateless_or_not),
    st.builds(codecs.OneBit),
    st.builds(codecs.Adaptive, pi=number(1, 1e9)),
    st.builds(codecs.PowerSgd, rank=st.integers(1, 4096)),
    st.builds(
        codecs.Dgc,
        fraction=fractions,
        momentum=number(0, 0.9999),
        clip=number(0, 1e30),
        warmup=st.integers(0, 2**31),
        then=values,
    ),
    st.builds(codecs.Clip, sigma=number(1e-3, 1e6), then=st.builds(codecs.OneBit)),
)


@settings(max_examples=300, derandomize=True)
@given(anything)
def test_what_it_writes_it_reads(codec: codecs.Codec) -> None:
    spec = str(codec)
    again = codecs.parse(spec)
    assert again == codec
    assert str(again) == spec
    assert codecs.parse(f"  {spec}\n") == codec


def test_a_number_of_numpy_is_written_as_one_or_refused() -> None:
    """np.float64 is a float, but its repr is not a number."""
    try:
        codec = codecs.TopK(np.float64(0.01))
    except errors.SpecError:
        return
    assert codecs.parse(str(codec)) == codec


@pytest.mark.parametrize(
    ("spec", "codec"),
    [
        ("fp32", codecs.Fp32()),
        ("fp32()", codecs.Fp32()),
        (" qsgd ", codecs.Qsgd()),
        ("qsgd(8)", codecs.Qsgd(bits=8)),
        ("qsgd(8, 64)", codecs.Qsgd(bits=8, bucket=64)),
        ('qsgd(norm="l2", bits=2)', codecs.Qsgd(bits=2, norm="l2")),
        ("topk(0.01)", codecs.TopK(0.01)),
        ("topk(1e-2, False)", codecs.TopK(0.01, exact=False)),
        ("topk(0.01) > fp16", codecs.TopK(0.01, then=codecs.Fp16())),
        ("clip(2.5)>qsgd", codecs.Clip(2.5, then=codecs.Qsgd())),
        ("ef(topk(0.01) > qsgd(bits=4))", codecs.ErrorFeedback(codecs.TopK(0.01) > codecs.Qsgd(bits=4))),
        ("ef(inner=sign)", codecs.ErrorFeedback(codecs.Sign())),
        ("topk(0.1) > clip(2.5) > sign", codecs.TopK(0.1, then=codecs.Clip(2.5, then=codecs.Sign()))),
        ("topk(0.1) > (clip(2.5) > sign)", codecs.TopK(0.1, then=codecs.Clip(2.5, then=codecs.Sign()))),
        ("(topk(0.1) > clip(2.5)) > sign", codecs.TopK(0.1, then=codecs.Clip(2.5, then=codecs.Sign()))),
        ("dgc > fp16", codecs.Dgc(then=codecs.Fp16())),
        ("lossaware(1)", codecs.LossAware(bits=1)),
        ("lossaware('ternary', exact=True)", codecs.LossAware(exact=True)),
        ("adaptive(64)", codecs.Adaptive(pi=64.0)),
    ],
)
def test_reading(spec: str, codec: codecs.Codec) -> None:
    assert codecs.parse(spec) == codec


@pytest.mark.parametrize(
    ("codec", "spec"),
    [
        (codecs.Fp32(), "fp32()"),
        (codecs.Qsgd(), "qsgd(bits=4)"),
        (codecs.Qsgd(norm="l2"), "qsgd(bits=4, norm='l2')"),
        (codecs.TopK(0.01), "topk(0.01)"),
        (codecs.TopK(0.01, exact=False, then=codecs.Fp16()), "topk(0.01, exact=False) > fp16()"),
        (codecs.OneBit(), "onebit()"),
        (codecs.OneBit(feedback=False), "onebit(feedback=False)"),
        (codecs.ErrorFeedback(codecs.TopK(0.01) > codecs.Qsgd()), "ef(topk(0.01) > qsgd(bits=4))"),
    ],
)
def test_writing(codec: codecs.Codec, spec: str) -> None:
    assert str(codec) == spec


# What it says when it cannot.


def refused(spec: str) -> str:
    """The message of the SpecError that a spec gives."""
    with pytest.raises(errors.SpecError) as caught:
        codecs.parse(spec)
    return str(caught.value)


@pytest.mark.parametrize("spec", ["gzip", "gzip()", "ef(gzip(level=9))", "topk(0.1) > gzip", "Qsgd()"])
def test_an_unknown_codec_lists_those_there_are(spec: str) -> None:
    message = refused(spec)
    assert "no codec" in message
    for name in codecs.available():
        assert name in message


@pytest.mark.parametrize("name", codecs.available())
def test_an_unknown_argument_shows_the_signature(name: str) -> None:
    message = refused(f"{name}(colour=3)")
    assert "'colour'" in message
    assert codecs.signature(codecs.available()[name]) in message


@pytest.mark.parametrize("name", codecs.available())
def test_too_many_arguments_show_the_signature(name: str) -> None:
    message = refused(f"{name}(1, 2, 3, 4, 5, 6)")
    assert "at most" in message
    assert codecs.signature(codecs.available()[name]) in message


@pytest.mark.parametrize("name", ["topk", "threshold", "clip", "ef"])
def test_a_missing_argument_shows_the_signature(name: str) -> None:
    for spec in (name, f"{name}()"):
        message = refused(spec)
        assert f"{name} needs" in message
        assert codecs.signature(codecs.available()[name]) in message


def test_an_argument_given_twice() -> None:
    for spec in ("qsgd(4, bits=8)", "qsgd(bits=4, bits=8)"):
        assert "'bits' twice: qsgd(bits=4" in refused(spec)


def test_the_next_codec_is_not_an_argument() -> None:
    assert "has no argument 'then'" in refused("topk(0.1, then=fp16)")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("qsgd(bits=5)", ["qsgd: bits=5", "2, 3, 4, 8"]),
        ("qsgd(bits='4')", ["qsgd: bits='4'", "2, 3, 4, 8"]),
        ("qsgd(bits=True)", ["qsgd: bits=True", "2, 3, 4, 8"]),
        ("qsgd(bits=None)", ["qsgd: bits=None", "2, 3, 4, 8"]),
        ("qsgd(bits=fp32)", ["qsgd: bits=", "2, 3, 4, 8"]),
        ("qsgd(norm='l1')", ["qsgd: norm='l1'", "'max', 'l2'"]),
        ("qsgd(norm=max)", ["no codec 'max'"]),
        ("qsgd(rounding='up')", ["qsgd: rounding='up'", "'stochastic', 'nearest'"]),
        ("qsgd(bucket=100)", ["bucket=100 must be a multiple of 32", "try 96"]),
        ("qsgd(bucket=0)", ["qsgd: bucket=0", "from 32"]),
        ("qsgd(bucket=64.0)", ["qsgd: bucket=64.0", "a whole number"]),
        ("elias(bucket=32768)", ["elias: bucket=32768", "from 32 to 16384"]),
        ("terngrad(clip=-1)", ["terngrad: clip=-1", "from 0"]),
        ("terngrad(scaler='mine')", ["'own', 'shared'"]),
        ("topk(0)", ["topk: fraction=0", "from 1e-09 to 1"]),
        ("topk(1.5)", ["topk: fraction=1.5", "from 1e-09 to 1"]),
        ("topk(1e999)", ["topk: fraction=inf"]),
        ("topk('all')", ["topk: fraction='all'", "a number"]),
        ("topk(True)", ["topk: fraction=True", "a number"]),
        ("topk(fp32)", ["topk: fraction="]),
        ("topk(0.1, exact=1)", ["topk: exact=1", "True or False"]),
        ("threshold(-1)", ["threshold: value=-1"]),
        ("dgc(momentum=1)", ["dgc: momentum=1"]),
        ("dgc(warmup=1.5)", ["dgc: warmup=1.5", "a whole number"]),
        ("clip(0)", ["clip: sigma=0"]),
        ("adaptive(pi=0.5)", ["adaptive: pi=0.5", "from 1"]),
        ("adaptive(feedback=0)", ["adaptive: feedback=0", "True, False"]),
        ("onebit(feedback='yes')", ["onebit: feedback='yes'", "True, False"]),
        ("powersgd(rank=0)", ["powersgd: rank=0", "from 1 to 4096"]),
        ("sign(scale='two')", ["'mean', 'one'"]),
        ("codebook(bits=9)", ["codebook: bits=9", "from 1 to 8"]),
        ("lossaware(bits=9)", ["lossaware: bits=9", "'ternary', 1, 2"]),
        ("lossaware(bits=True)", ["lossaware: bits=True"]),
        ("lossaware(bits=4, exact=True)", ["exact=True is for ternary weights"]),
        ("lossaware(per='column')", ["'tensor', 'row'"]),
        ("ef(3)", ["ef: expected a codec, got 3", "ef(topk(0.01))"]),
        ("ef('sign')", ["ef: expected a codec, got 'sign'"]),
    ],
)
def test_a_bad_value_says_what_is_allowed(spec: str, words: list[str]) -> None:
    message = refused(spec)
    for word in words:
        assert word in message


@pytest.mark.parametrize("spec", ["qsgd(bits=4.0)", "lossaware(bits=1.0)", "lossaware(bits=4.0)", "elias(bits=2.0)"])
def test_a_float_is_not_a_number_of_bits(spec: str) -> None:
    """Equal to an allowed value, but the encoder could not use it."""
    assert "bits=" in refused(spec)


@pytest.mark.parametrize("spec", ["qsgd() > fp32", "fp32 > fp16", "ef(topk(0.1)) > qsgd", "topk(0.1) > fp32 > fp16"])
def test_nothing_can_follow_a_last_codec(spec: str) -> None:
    message = refused(spec)
    assert "nothing can follow" in message
    assert "clip, dgc, threshold, topk" in message


@pytest.mark.parametrize(
    "spec",
    [
        "topk(0.1) > ef(fp32)",
        "topk(0.1) > onebit",
        "topk(0.1) > terngrad(scaler='shared')",
        "threshold(0.1) > dgc",
        "dgc > powersgd",
        "topk(0.1) > clip(2.5) > ef(fp32)",
    ],
)
def test_values_cannot_carry_a_state(spec: str) -> None:
    message = refused(spec)
    assert "cannot keep state" in message
    assert "put error feedback around the whole chain: ef(... > ...)" in message


@pytest.mark.parametrize(
    "spec",
    [
        "topk(0.1) > topk(0.1)",
        "dgc > threshold(1)",
        "threshold(1) > topk(0.1, exact=False)",
        "topk(0.1) > clip(2.5) > topk(0.1)",
        "dgc > clip(2.5) > clip(2.5) > threshold(1)",
    ],
)
def test_entries_are_chosen_once(spec: str) -> None:
    assert "choose once, then quantize" in refused(spec)


@pytest.mark.parametrize(
    "spec",
    ["", " ", "(", "qsgd(", "qsgd)", "qsgd(bits=)", "qsgd(4 5)", "topk(0.1) >", "> fp32", "ef(,)", "a b", "\0", "é("],
)
def test_what_is_no_expression_shows_an_example(spec: str) -> None:
    message = refused(spec)
    assert repr(spec) in message
    assert "ef(topk(0.01) > qsgd(bits=4))" in message


@pytest.mark.parametrize("spec", ["topk(0.1) < fp32", "topk(0.1) >= fp32", "topk(0.1) > fp32 < fp16", "fp32 == fp32"])
def test_only_greater_than_makes_a_chain(spec: str) -> None:
    assert "chained with '>' only" in refused(spec)


@pytest.mark.parametrize(
    "spec",
    [
        "__import__('os')",
        "__import__('os').system('true')",
        "ef(__import__('os').getcwd())",
        "topk(__import__('math').pi)",
        "topk(10**-2)",
        "topk(1/100)",
        "topk((lambda: 0.1)())",
        "topk([x for x in (0.1,)][0])",
        "qsgd.encode",
        "codecs.Qsgd()",
        "qsgd()()",
        "qsgd(*[4])",
        "qsgd(**{'bits': 4})",
        "(x := qsgd())",
        "fp32 if True else fp16",
        "fp32 and fp16",
        "not fp32",
        "f'{1}'",
        "lambda: fp32",
        "[fp32]",
        "{}",
        "42",
        "'qsgd'",
        "None",
        "...",
        "fp32; fp16",
        "import os",
        "await fp32",
    ],
)
def test_nothing_is_evaluated(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def trap(*arguments: object, **keywords: object) -> object:
        raise AssertionError(f"evaluated: {arguments} {keywords}")

    monkeypatch.setattr("os.getcwd", trap)
    monkeypatch.setattr("os.system", trap)
    monkeypatch.setattr("builtins.eval", trap)
    refused(spec)


@pytest.mark.parametrize(
    "spec",
    [
        "(" * 5000 + "fp32" + ")" * 5000,
        "ef(" * 180 + "fp32" + ")" * 180,
        "topk(" + "-" * 100_000 + "1)",
        "topk(" + "-" * 500 + "1)",
        "topk(0x" + "f" * 5000 + ")",
        "dgc(warmup=0x" + "f" * 5000 + ")",
        "qsgd(bits=" + "9" * 5000 + ")",
        "a" * 100_000,
        "topk(0.5)." + "a." * 5000 + "a",
    ],
    ids=lambda spec: spec[:12],
)
def test_what_is_too_long_or_too_deep_is_refused(spec: str) -> None:
    message = refused(spec)
    assert len(message) < 1000 + 2 * len(spec)


def test_a_long_chain_is_a_codec_or_refused() -> None:
    for count in (20, 3000):
        try:
            codec = codecs.parse("clip(2.0) > " * count + "fp32")
        except errors.SpecError:
            assert count == 3000
            continue
        assert codecs.parse(str(codec)) == codec


@settings(max_examples=500, derandomize=True)
@given(
    st.text(max_size=30)
    | st.lists(
        st.sampled_from(
            [*codecs.available(), "(", ")", ",", ">", "=", "bits", "0.1", "4", "-", "'l2'", "True", "*", "[", ".", "\n"]
        ),
        max_size=12,
    ).map("".join)
)
def test_any_text_is_a_codec_or_a_spec_error(text: str) -> None:
    try:
        codec = codecs.parse(text)
    except errors.SpecError:
        return
    assert codecs.parse(str(codec)) == codec


# The same in Python.


def test_chains_in_python() -> None:
    topk, clip, sign = codecs.TopK(0.1), codecs.Clip(2.5), codecs.Sign()
    assert (topk > sign) == codecs.parse("topk(0.1) > sign")
    assert (topk > (clip > sign)) == codecs.parse("topk(0.1) > clip(2.5) > sign")
    assert ((topk > clip) > sign) == codecs.parse("topk(0.1) > clip(2.5) > sign")  # type: ignore[operator]
    assert topk.then == codecs.Fp32()  # a new codec each time: the parts are as they were


def test_a_chain_of_three_without_parentheses_is_a_type_error() -> None:
    topk, clip, sign = codecs.TopK(0.1), codecs.Clip(2.5), codecs.Sign()
    with pytest.raises(TypeError, match=re.escape("a > (b > c)")):
        topk > clip > sign  # noqa: B015


def test_what_cannot_follow_in_python_is_a_type_error() -> None:
    for wrong in (3, "fp32", None, codecs.Fp32):
        with pytest.raises(TypeError):
            codecs.TopK(0.1) > wrong  # type: ignore[operator]  # noqa: B015
    with pytest.raises(TypeError):
        codecs.Qsgd() > codecs.Fp32()  # type: ignore[operator]  # noqa: B015


def test_signatures_are_specs_but_for_what_must_be_given() -> None:
    for name, cls in codecs.available().items():
        signature = codecs.signature(cls)
        assert signature.startswith(f"{name}(")
        assert signature.endswith(" > CODEC") == issubclass(cls, codecs.Stage)
        assert codecs.summary(cls)
        filled = re.sub(r"\b(fraction|value|sigma|steps)(?!=)", "1", signature).replace("CODEC", "fp32")
        codecs.parse(filled)


def test_codecs_are_frozen_values() -> None:
    codec = codecs.Qsgd()
    with pytest.raises(AttributeError):
        codec.bits = 8  # type: ignore[misc]
    assert {codecs.Qsgd(), codecs.Qsgd(bits=4), codecs.Qsgd(bits=8)} == {codecs.Qsgd(), codecs.Qsgd(bits=8)}
    assert len({codecs.Fp32(), codecs.Fp16(), codecs.Bf16()}) == 3
