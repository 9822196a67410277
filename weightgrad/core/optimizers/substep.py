"""One of the optimizer steps that a step of a site with serial workers consists of.

The serial variant of WeightGrad applies the gradients of its n workers one after the other. With the optimizer's own
options that is another optimizer than on their mean: a momentum of mu a step is mu^n after n of them. At a rate of 1/n
a gradient moves the weights as far in the end, but its momentum is gone n times as soon. Two rules make n serial steps
one mean step:

- Memory decays as fast: momentum mu becomes mu^(1/n), and so does each beta of Adam.
- A constant gradient moves as far. Under momentum a step moves it by rate/(1 - mu) in the end, so
  n scale/(1 - mu^(1/n)) = 1/(1 - mu), or scale = (1 - mu^(1/n)) / (n (1 - mu)). Adam's averages have the size of a
  gradient whatever beta is, so there, and without momentum, scale = 1/n.

For n = 4 and mu = 0.9 these are 0.974 and 0.065. Nesterov's momentum, dampening and decay have the same fixed point.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from weightgrad.core.parts import check

MATCHED = "matched"


@dataclass(frozen=True, kw_only=True)
class Substep:
    """How the options of an optimizer change for one step of several.

    Attributes:
        scale: Factor of the learning rate.
        matched: The number n of steps that together are to be one step with the optimizer's own options; it changes
            momentum, betas and learning rate. 1 changes nothing.
    """

    scale: float = 1.0
    matched: int = 1

    def __post_init__(self) -> None:
        check("Substep", "scale", self.scale, 1e-9, 1e6)
        check("Substep", "matched", self.matched, 1, 10**6, whole=True)

    @staticmethod
    def of(serial_scale: float | str | None, count: int) -> Substep:
        """Make the substep of a strategy's `serial_scale`: a number, "matched", or None for 1/n.

        Args:
            serial_scale: The field of the strategy.
            count: The number n of gradients.
        """
        if serial_scale == MATCHED:
            return Substep(matched=max(1, count))
        return Substep(scale=1 / max(1, count) if serial_scale is None else float(serial_scale))

    def options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a parameter group that change, with their values for this step."""
        n, scale = self.matched, self.scale
        changed: dict[str, Any] = {}
        if n > 1:
            scale /= n
            if momentum := float(group.get("momentum", 0.0)):
                changed["momentum"] = momentum ** (1 / n)
                scale *= (1 - changed["momentum"]) / (1 - momentum) if momentum < 1 else 1 / n
            if "betas" in group:
                changed["betas"] = tuple(float(beta) ** (1 / n) for beta in group["betas"])
        return changed if scale == 1.0 else {"lr": group["lr"] * scale, **changed}

    def change(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Change the options of an optimizer, and return the old ones for `restore`."""
        old = []
        for group in optimizer.param_groups:
            changed = self.options(group)
            old.append({name: group[name] for name in changed})
            group.update(changed)
        return old

    @staticmethod
    def restore(optimizer: Optimizer, old: list[dict[str, Any]]) -> None:
        """Give an optimizer its own options back."""
        for group, options in zip(optimizer.param_groups, old, strict=True):
            group.update(options)

    @contextmanager
    def within(self, optimizer: Optimizer) -> Iterator[None]:
        """Change the options of an optimizer for the steps inside a `with` block."""
        old = self.change(optimizer)
        try:
            yield
        finally:
            self.restore(optimizer, old)
