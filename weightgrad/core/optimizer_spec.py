"""The description of a user's optimizer, with which the global server's replica takes the same steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from weightgrad.core.lars import Lars
from weightgrad.core.optimizers import build
from weightgrad.errors import StrategyError


@dataclass(frozen=True)
class OptimizerSpec:
    """The class and the parameter groups of an optimizer, so that another process can build the same."""

    kind: str
    groups: tuple[tuple[tuple[int, ...], Mapping[str, Any]], ...]  # (indices of the parameters, options)

    @staticmethod
    def of(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> OptimizerSpec:
        """Describe an optimizer.

        Args:
            optimizer: an optimizer of torch.optim, or LARS.
            parameters: the model's parameters, in the order of the layout.

        Returns:
            The description.

        Raises:
            StrategyError: the optimizer is of another class.
        """
        kind = type(optimizer).__name__
        if getattr(torch.optim, kind, None) is not type(optimizer) and not isinstance(optimizer, Lars):
            raise StrategyError(
                f"{kind} is not an optimizer of torch.optim, which strategies that share gradients need, because every "
                "replica takes the step. Use a strategy that shares updates, such as weightgrad or diloco"
            )
        index = {id(parameter): number for number, parameter in enumerate(parameters)}
        groups = []
        for group in optimizer.param_groups:
            plain = {k: v for k, v in group.items() if isinstance(v, (bool, int, float, tuple, list)) and k != "params"}
            known = {k: v for k, v in plain.items() if k in optimizer.defaults}
            groups.append((tuple(index[id(p)] for p in group["params"] if id(p) in index), known))
        return OptimizerSpec(kind, tuple(groups))

    @staticmethod
    def parse(data: Mapping[str, Any]) -> OptimizerSpec:
        """Read what `dump` returned, also after its way through JSON.

        Raises:
            StrategyError: it cannot be read, or torch has no such optimizer.
        """
        try:
            kind = str(data["kind"])
            groups = tuple((tuple(int(i) for i in indices), dict(options)) for indices, options in data["groups"])
        except (KeyError, TypeError, ValueError) as error:
            raise StrategyError(f"an optimizer that cannot be read ({error!r})") from error
        if kind != "Lars" and not (
            isinstance(made := getattr(torch.optim, kind, None), type) and made is not Optimizer
        ):
            raise StrategyError(
                f"no optimizer {kind!r} in torch.optim of torch {torch.__version__}; use the same torch"
            )
        return OptimizerSpec(kind, groups)

    def dump(self) -> dict[str, Any]:
        """The description as plain values, for JSON."""
        return {"kind": self.kind, "groups": [[list(indices), dict(options)] for indices, options in self.groups]}

    def changed(self, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> OptimizerSpec:
        """The same optimizer with other options.

        Args:
            change: turns the options of a group into new ones.
        """
        return OptimizerSpec(self.kind, tuple((indices, change(options)) for indices, options in self.groups))

    def difference(self, other: OptimizerSpec) -> str | None:
        """Why this optimizer takes other steps than another, or None.

        Learning rates are sent with every step, so only the ratios between groups count.
        """
        if self.kind != other.kind:
            return f"it is {self.kind}, the others have {other.kind}"
        if [indices for indices, _ in self.groups] != [indices for indices, _ in other.groups]:
            return "its groups have other parameters"
        for number, (mine, theirs) in enumerate(zip(self._ratios(), other._ratios(), strict=True)):
            for name in sorted(mine.keys() | theirs.keys()):
                if mine.get(name) != theirs.get(name):
                    return f"{name} of group {number} is {mine.get(name)}, the others have {theirs.get(name)}"
        return None

    def _ratios(self) -> list[dict[str, Any]]:
        first = float(self.groups[0][1].get("lr", 0.0)) if self.groups else 0.0
        found = []
        for _, options in self.groups:
            plain = {name: list(v) if isinstance(v, tuple) else v for name, v in options.items()}
            found.append({**plain, "lr": float(options.get("lr", 0.0)) / first if first else 1.0})
        return found

    def build(self, parameters: Sequence[nn.Parameter]) -> Optimizer:
        """Build the optimizer on other parameters; learning rates of groups keep their ratio to the first group's.

        Raises:
            StrategyError: torch refuses the options.
        """
        made: Any = Lars if self.kind == "Lars" else getattr(torch.optim, self.kind)
        try:
            first = float(self.groups[0][1].get("lr", 0.0))
            groups = []
            for indices, options in self.groups:
                given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
                ratio = float(given["lr"]) / first if first else 1.0
                groups.append({"params": [parameters[index] for index in indices], **given, "ratio": ratio})
            built: Optimizer = made(groups)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise StrategyError(f"{self.kind} cannot be made with {self.dump()['groups']}: {error}") from error
        return built


def make(source: tuple[str, Mapping[str, Any]] | OptimizerSpec, parameters: list[nn.Parameter]) -> Optimizer:
    """Build an optimizer from a name with options, or from a description."""
    return source.build(parameters) if isinstance(source, OptimizerSpec) else build(source[0], parameters, source[1])
