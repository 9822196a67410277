"""Tensors on the host where no device is named, whatever `torch.set_default_device` says in the user's script.

This package names a device where it wants one that is not the host; elsewhere it means the host. A default device is a
part of each thread, and hooks run in the user's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_host() -> Iterator[None]:
    """Within it, or within a function that it decorates, tensors are made on the host unless a device is named."""
    if torch.get_default_device().type == "cpu":
        yield
    else:
        with torch.device("cpu"):
            yield
