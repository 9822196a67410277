"""Which network it is, and why."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weightgrad.errors import NamespacesRefusedError
from weightgrad.lab.emulate import ModelledWan, Wan, namespaces, open_wan

from .networks import refusal


def _refuse(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """As a machine that allows no namespaces."""
    tool = directory / "unshare"
    tool.write_text("#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setattr(namespaces, "system_path", lambda: f"{directory}:{os.environ['PATH']}:/usr/sbin:/sbin")


def test_the_best_kind_there_is() -> None:
    with open_wan(["hub"], []) as wan:
        if refusal("root") is None or refusal("rootless") is None:
            assert isinstance(wan, Wan)
            assert wan.reason.startswith("namespaces as")
        else:
            assert isinstance(wan, ModelledWan)
            assert "refused" in wan.reason


def test_modelled_where_namespaces_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _refuse(monkeypatch, tmp_path)
    with open_wan(["hub"], []) as wan:
        assert isinstance(wan, ModelledWan)
        assert wan.reason.startswith("modelled; because network namespaces as ")
        assert "Operation not permitted" in wan.reason


@pytest.mark.parametrize("kind", ["root", "rootless"])
def test_what_is_asked_for_is_not_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    if kind == "root" and os.geteuid() != 0:
        pytest.skip("needs root")
    _refuse(monkeypatch, tmp_path)
    with pytest.raises(NamespacesRefusedError, match="Operation not permitted"):
        open_wan(["hub"], [], kind=kind)


def test_without_the_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(namespaces, "system_path", lambda: str(tmp_path))
    with pytest.raises(NamespacesRefusedError, match="ip, tc, unshare not found: install iproute2"):
        open_wan(["hub"], [], kind="rootless")


def test_root_is_not_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NamespacesRefusedError, match="this is user 1000"):
        open_wan(["hub"], [], kind="root")


def test_a_reason_for_what_was_asked() -> None:
    with open_wan(["hub"], [], kind="modelled") as wan:
        assert wan.reason == "modelled: asked for"
