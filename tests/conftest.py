"""One thread a process and no time limits: many tests run side by side on few cores."""

from __future__ import annotations

import signal

import hypothesis
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("no time limits", deadline=None)
hypothesis.settings.load_profile("no time limits")

# A runner started in the background may have been told to ignore Ctrl-C; the tests of interrupts need it.
signal.signal(signal.SIGINT, signal.default_int_handler)
