"""The models: `build(name, ...)` makes one, `available()` lists them, `option_names(name)` their options."""

from __future__ import annotations

from weightgrad.lab.models.registry import available, build, option_names

__all__ = ["available", "build", "option_names"]
