"""One thread a process and no time limits: many tests run side by side on few cores."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("no time limits", deadline=None)
hypothesis.settings.load_profile("no time limits")

# A runner started in the background may have been told to ignore Ctrl-C; the tests of interrupts need it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def fixture_no_site_of_another_test() -> Iterator[None]:
    """A site that a test has not left is not in the way of the next one, which may have its name and address."""
    yield
    if (present := sys.modules.get("weightgrad.runtime.site.present_sites")) is not None:
        present._SITES.clear()
