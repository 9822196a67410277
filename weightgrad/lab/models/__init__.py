"""The models: `build(name, ...)` makes one, `available()` lists them."""

from __future__ import annotations

from weightgrad.lab.models.registry import available, build

__all__ = ["available", "build"]
