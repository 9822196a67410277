"""One thread a process: many tests run side by side on few cores."""

from __future__ import annotations

import signal

import torch

torch.set_num_threads(1)

# A runner started in the background may have been told to ignore Ctrl-C; the tests of interrupts need it.
signal.signal(signal.SIGINT, signal.default_int_handler)
