"""A user's optimizer in words, so that the global server's replica of the base takes the same steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from weightgrad.errors import StrategyError
from weightgrad.site.lars import Lars
from weightgrad.site.optimizers import build


@dataclass(frozen=True)
class Described:
    """A user's optimizer, told so that another process can have the same: its class and its groups."""

    kind: str
    groups: tuple[tuple[tuple[int, ...], Mapping[str, Any]], ...]  # (places of the parameters, options)

    @staticmethod
    def of(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Described:
        """Of an optimizer of torch.optim, or LARS, on these parameters."""
        kind = type(optimizer).__name__
        if getattr(torch.optim, kind, None) is not type(optimizer) and not isinstance(optimizer, Lars):
            raise StrategyError(
                f"{kind} is no optimizer of torch.optim; strategies that share gradients take the step on every "
                "replica and need one of those. Take a strategy that shares updates, such as weightgrad or diloco"
            )
        place = {id(parameter): number for number, parameter in enumerate(parameters)}
        groups = []
        for group in optimizer.param_groups:
            plain = {k: v for k, v in group.items() if isinstance(v, (bool, int, float, tuple, list)) and k != "params"}
            known = {k: v for k, v in plain.items() if k in optimizer.defaults}
            groups.append((tuple(place[id(p)] for p in group["params"] if id(p) in place), known))
        return Described(kind, tuple(groups))

    @staticmethod
    def parse(data: Mapping[str, Any]) -> Described:
        """From what `dump` gave, after its way through JSON."""
        try:
            kind = str(data["kind"])
            groups = tuple((tuple(int(i) for i in places), dict(options)) for places, options in data["groups"])
        except (KeyError, TypeError, ValueError) as error:
            raise StrategyError(f"an optimizer that cannot be read ({error!r})") from error
        if kind != "Lars" and not (
            isinstance(made := getattr(torch.optim, kind, None), type) and made is not Optimizer
        ):
            raise StrategyError(
                f"no optimizer {kind!r} in torch.optim of torch {torch.__version__}; use the same torch"
            )
        return Described(kind, groups)

    def dump(self) -> dict[str, Any]:
        """As plain values."""
        return {"kind": self.kind, "groups": [[list(places), dict(options)] for places, options in self.groups]}

    def changed(self, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Described:
        """The same with other options."""
        return Described(self.kind, tuple((places, change(options)) for places, options in self.groups))

    def difference(self, other: Described) -> str | None:
        """What makes it take other steps than the other, in words. Of rates, told with every step, the ratios count."""
        if self.kind != other.kind:
            return f"it is {self.kind}, the others have {other.kind}"
        if [places for places, _ in self.groups] != [places for places, _ in other.groups]:
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
        """The same optimizer on other parameters; rates of its groups keep their ratio to the first's."""
        made: Any = Lars if self.kind == "Lars" else getattr(torch.optim, self.kind)
        try:
            first = float(self.groups[0][1].get("lr", 0.0))
            groups = []
            for places, options in self.groups:
                given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
                ratio = float(given["lr"]) / first if first else 1.0
                groups.append({"params": [parameters[place] for place in places], **given, "ratio": ratio})
            built: Optimizer = made(groups)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise StrategyError(f"{self.kind} cannot be made with {self.dump()['groups']}: {error}") from error
        return built


def make(source: tuple[str, Mapping[str, Any]] | Described, parameters: list[nn.Parameter]) -> Optimizer:
    """From a name with options, or from a description."""
    return source.build(parameters) if isinstance(source, Described) else build(source[0], parameters, source[1])
