"""The documents name what exists, and nothing that does not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from weightgrad import codecs
from weightgrad.core import parts, strategies
from weightgrad.lab.bench import codec_speed

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("name", codecs.available())
def test_every_codec_is_documented(name: str) -> None:
    assert f"### {name}\n" in (ROOT / "docs" / "codecs.md").read_text()


def test_no_codec_is_documented_that_does_not_exist() -> None:
    headings = re.findall(r"^### (\S+)$", (ROOT / "docs" / "codecs.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(codecs.available())


@pytest.mark.parametrize("name", [f.name for f in codecs.formats()])
def test_every_wire_format_is_documented(name: str) -> None:
    assert re.search(rf"^### {name}, id \d+$", (ROOT / "docs" / "wire-format.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_examples_in_the_document_parse() -> None:
    examples = re.findall(r"^- Example: `(.*)`$", (ROOT / "docs" / "codecs.md").read_text(), re.MULTILINE)
    assert len(examples) == len(codecs.available())
    for spec in examples:
        codecs.parse(spec)


def test_the_codec_of_the_guide_works() -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs" / "write-a-codec.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(blocks) == 2
    for block in blocks:  # in a process of its own: it registers a codec
        done = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_the_benchmark_covers_every_codec() -> None:
    text = " ".join(codec_speed.SPECS)
    assert not [name for name in codecs.available() if not re.search(rf"\b{name}\b", text)]


def test_targets_are_for_codecs_that_are_measured() -> None:
    measured = {str(codecs.parse(spec)) for spec in codec_speed.SPECS}
    assert set(codec_speed.TARGETS) <= measured


def test_no_path_of_a_machine_in_the_repository() -> None:
    found = subprocess.run(
        ["git", "grep", "-nE", r"/(root|home|work|opt)/[a-z]", "--", ".", ":!tests/repository/test_documents.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout == ""


def test_the_summary_of_the_benchmarks_says_what_they_said() -> None:
    speed = (ROOT / "docs" / "codec-speed.md").read_text()
    rivals = (ROOT / "docs" / "codec-rivals.md").read_text()
    rows = re.findall(
        r"^\| `([^`]+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (.+?) \|$",
        (ROOT / "docs" / "benchmarks.md").read_text(),
        re.M,
    )
    assert len(rows) > 5
    for name, bits, encode, decode, rival in rows:
        found = re.search(rf"^\| {re.escape(name)} \| native \| (.*) \|$", speed, re.M)
        assert found is not None
        assert found[1].split(" | ")[2:5] == [encode, decode, bits]
        if rival != "–":  # noqa: RUF001
            assert f"| {rival} |" in rivals


def test_every_strategy_is_documented() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "docs" / "strategies.md").read_text(), re.MULTILINE)
    assert [name for name in rows if name in strategies.PRESETS] == list(strategies.PRESETS)


@pytest.mark.parametrize("kind", ["trigger", "selector", "aggregator", "consistency", "resume", "controller"])
def test_every_part_is_documented(kind: str) -> None:
    written = (ROOT / "docs" / "strategies.md").read_text()
    for signature in parts.available(kind):
        assert f"`{signature.split('(')[0]}" in written, signature
