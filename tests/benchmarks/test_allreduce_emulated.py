"""The emulated half of the allreduce table: real ranks compute what one process computes, and leave no process."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
from pathlib import Path

import pytest
import table_allreduce
import torch
from allreduce import emulated, hosts, report
from allreduce.cost import ALL_TO_ALL, DOUBLING, RING, make_rank, vector_of
from result_table import MeasurementCache, Row
from tables import Options

from weightgrad.lab.emulate.stats import Verdict
from weightgrad.lab.emulate.wan import Wan

EMULATED = emulated.Setup(sides=(16,), workers=(2,), codecs=("onebit()",), mbit_s=50, delay_us=1000, repeats=1)


def cost(side: int, workers: int) -> list[Row]:
    return [{"codec": name, "side": side, "workers": workers, "add": 0.0} for name in (RING, DOUBLING)]


@pytest.fixture
def namespaces() -> None:
    if (why := hosts.refusal()) is not None:
        pytest.skip(why)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """Every rank that was started."""
    found: list[subprocess.Popen[str]] = []
    start = hosts.Ranks._start

    def noted(self: hosts.Ranks, name: str, place: int) -> subprocess.Popen[str]:
        found.append(start(self, name, place))
        return found[-1]

    monkeypatch.setattr(hosts.Ranks, "_start", noted)
    return found


def in_one_process(method: str, numel: int, steps: int) -> str:
    """The digest of the last mean of two ranks."""
    ranks = None if method in emulated.PLAIN else [make_rank(method, numel, 2, place) for place in (0, 1)]
    mean = torch.empty(0)
    for step in range(steps):
        vectors = [vector_of(numel, step, place) for place in (0, 1)]
        mean = (vectors[0] + vectors[1]) / 2
        if ranks is not None:
            chunks = [rank.encode_chunks(vector, step) for rank, vector in zip(ranks, vectors, strict=True)]
            reduced = [rank.reduce([one[place] for one in chunks], step) for place, rank in enumerate(ranks)]
            mean = ranks[0].gather(reduced)
    return hashlib.blake2b(mean.numpy().data, digest_size=8).hexdigest()


@pytest.mark.usefixtures("namespaces")
def test_ranks_on_emulated_hosts_compute_what_one_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[str]]
) -> None:
    options = Options(name="tiny", command="python tiny", quick=True, out=tmp_path, runs=tmp_path / "runs")
    plan = table_allreduce.Plan(
        sides=(32,), workers=(2,), codecs=("onebit()", "qsgd(bits=4)"), repeats=1, exact_side=32, exact_workers=2,
        exact_steps=1, emulated_sides=(64,), emulated_workers=(2,), emulated_repeats=2,
    )  # fmt: skip
    monkeypatch.setattr(Wan, "verdict", lambda _: Verdict(True, "a busy machine is no concern here"))
    document = table_allreduce.make(plan, options)
    assert "| qsgd(bits=4) |" in next(s for s in document.tables if s.name == "emulated").markdown()
    assert "The emulator trusts all 5 runs" in document.write(options)[0].read_text()
    assert not document.failures
    rows = {row["codec"]: row for row in document.numbers["emulated"]}
    assert list(rows) == [RING, DOUBLING, ALL_TO_ALL, *plan.codecs]
    for method, row in rows.items():
        assert row["same"] == "yes"
        assert row["measured"]["digest"][-1] == in_one_process(method, 64**2, 3)
        assert 0 < row["least"] <= row["clock"] <= row["most"]
        assert min(row["formula"], row["off"], row["times"]) > 0
    least = {RING: 4, DOUBLING: 2, ALL_TO_ALL: 4, "onebit()": 8}  # two for each of Gloo's messages
    delays = {one["codec"]: one["delays"] for one in document.numbers["delays"]}
    assert all(delays[method] > number - 0.1 for method, number in least.items())
    plain = 4 * 64**2 / 1e6  # of two ranks each sends half, twice
    assert plain < rows[RING]["sent_mb"] < 1.5 * plain
    assert rows["onebit()"]["frames_mb"] < rows["onebit()"]["sent_mb"] < rows["qsgd(bits=4)"]["sent_mb"] < plain / 2
    monkeypatch.setattr(hosts, "network", lambda *_: pytest.fail("it was measured already"))
    assert table_allreduce.make(plan, options).numbers["emulated"] == document.numbers["emulated"]
    assert [process.returncode is None for process in started] == [False, False]


@pytest.mark.usefixtures("namespaces")
def test_a_rank_that_fails_does_not_stop_the_other_measurements(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    setup = dataclasses.replace(EMULATED, codecs=("onebit()", "mistaken()"))
    found = emulated.measure(setup, MeasurementCache(tmp_path / "measured.json"), cost, tmp_path)
    assert [row["codec"] for row in found.rows] == [*emulated.PLAIN, "onebit()"]
    (said,) = found.failures
    assert "2 ranks, mistaken() at 16²: RunError: rank0 has ended" in said
    assert "SpecError" in said
    assert len(started) == 4
    assert all(process.returncode is not None for process in started)


def test_refused_namespaces_and_untrusted_runs_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "refusal", lambda: "no namespaces")
    found = emulated.measure(EMULATED, MeasurementCache(Path("nowhere")), cost, Path("nowhere"))
    (table,) = report.tables(EMULATED, found)
    assert "Nothing was measured: no namespaces" in table.markdown()
    assert {claim.holds for claim in report.claims(EMULATED, found)} == {None}
    measured = {"clock": [0.2], "line_bytes": [4000], "processor": [0.1], "codec": [0.1], "codec_clock": [0.1]}
    verdict = {"same": True, "trusted": False, "verdict": "too late", "rate_error": 0.0, "round_trip_error": 0.0}
    row = {**cost(16, 2)[0], "measured": {**measured, **verdict}}
    found = emulated.Found([{**emulated.evaluated(EMULATED, row, None), "times": 1.0, "fair": False}])
    assert f"| {RING} \\* |" in report.tables(EMULATED, found)[0].markdown()
    held = {claim.what.split(";")[0]: claim.holds for claim in report.claims(EMULATED, found)}
    assert held["Of fp32 by ring and doubling the formula is right within 25%"] is None
    assert held["All ranks end with the same bits, as processes over TCP."] is True


def test_the_rate_of_a_card_is_divided_among_the_peers_of_a_method() -> None:
    assert DOUBLING not in EMULATED.methods(6)
    assert {EMULATED.link_bit_s(method, 8) for method in (RING, DOUBLING)} == {50e6}
    assert {EMULATED.link_bit_s(method, 6) for method in (ALL_TO_ALL, "onebit()")} == {10e6}
