"""The optimizers that all replicas know, and how they are described, kept and stepped."""

from weightgrad.core.optimizers.named import OPTIMIZERS, build, is_linear, state_names

__all__ = ["OPTIMIZERS", "build", "is_linear", "state_names"]
