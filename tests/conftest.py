"""One thread a process: many tests run side by side on few cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
