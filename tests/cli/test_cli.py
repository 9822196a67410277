"""The commands, as a newcomer types them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
import typer.main

from weightgrad import cli, codecs, wire
from weightgrad.cli import main
from weightgrad.errors import WeightGradError


@dataclass(frozen=True)
class Done:
    """How a command has ended."""

    returncode: int
    stdout: str
    stderr: str


Run: TypeAlias = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`weightgrad ARGUMENTS` in this process: an interpreter that imports torch takes longer than the commands."""

    def ran(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["weightgrad", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code is None or isinstance(ended.value.code, int)
        return Done(ended.value.code or 0, *capsys.readouterr())

    return ran


def test_the_version_is_printed(run: Run) -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"weightgrad {metadata.version('weightgrad')}\n")


def test_it_can_be_typed(tmp_path: Path) -> None:
    """As a process of its own: what goes well, and a mistake that is one line."""
    (tmp_path / "noise.wg").write_bytes(b"certainly not a frame, is it?")
    command = [sys.executable, "-m", "weightgrad"]
    good, bad = (
        subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        for arguments in (("doctor",), ("inspect", str(tmp_path / "noise.wg")))
    )
    assert good.returncode == 0
    assert "kernels" in good.stdout
    assert bad.returncode == 2
    assert bad.stderr.startswith("weightgrad: MagicError")
    assert "Traceback" not in bad.stderr


def test_codecs_lists_every_codec_and_the_kernels(run: Run) -> None:
    done = run("codecs")
    assert done.returncode == 0
    for name in codecs.available():
        assert any(line.startswith(f"{name} ") for line in done.stdout.splitlines())
    assert "kernels: " in done.stdout


def test_codecs_explains_a_codec(run: Run) -> None:
    said = run("codecs", "qsgd").stdout
    assert said.startswith("qsgd(bits=4, bucket=512, norm='max', rounding='stochastic')\n")
    assert "Alistarh" in said


def test_codecs_checks_a_spec(run: Run) -> None:
    assert "ef(topk(0.01) > qsgd(bits=4))" in run("codecs", "ef(topk(0.01) > qsgd(bits=4, bucket=512))").stdout
    done = run("codecs", "qsdg(bits=4)")
    assert done.returncode == 2
    assert "no codec 'qsdg'; there are" in done.stderr
    assert "Traceback" not in done.stderr


def test_bench_prints_json_with_the_promised_keys(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "table.md"
    done = run(
        *("bench", "codecs", "--size-mb", "0.1", "--repeats", "1", "--codec", "qsgd(bits=4)", "--codec", "fp32"),
        *("--json", "--out", str(page)),
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["codec"] for row in rows} == {"qsgd(bits=4)", "fp32()"}
    assert set(rows[0]) == {
        *("codec", "backend", "encode_gb_s", "decode_gb_s", "encode_vs_copy", "decode_vs_copy"),
        *("bits_per_element", "relative_error"),
    }
    assert "| qsgd(bits=4) |" in page.read_text()


def test_inspect_prints_frames(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "two.wg"
    payloads = [codecs.parse(spec).encode(torch.ones(4, 3), {}, 0)[0] for spec in ("qsgd(bits=4)", "topk(0.5)")]
    file.write_bytes(b"".join(wire.to_bytes(p) for p in payloads))
    done = run("inspect", str(file))
    assert done.returncode == 0
    assert "uniform (id 4)" in done.stdout
    assert "sparse (id 9)" in done.stdout
    views = json.loads(run("inspect", "--json", str(file)).stdout)
    assert views[0]["shape"] == [4, 3]
    assert views[0]["parameters"] == {"bits": 4, "group": 512}


def test_commands_need_an_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda **_: metadata.EntryPoints())
    with pytest.raises(WeightGradError, match="not installed"):
        typer.main.get_command(cli.app).get_command(None, "simulate")  # type: ignore[attr-defined]
