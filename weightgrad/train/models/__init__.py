"""The networks: `build(name, ...)` makes one, `available()` names them all."""

from __future__ import annotations

from weightgrad.train.models.registry import available, build

__all__ = ["available", "build"]
