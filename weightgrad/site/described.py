"""A user's optimizer in words, so that the global server's replica of the base takes the same steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        kind = str(data["kind"])
        if kind != "Lars" and not (
            isinstance(made := getattr(torch.optim, kind, None), type) and made is not Optimizer
        ):
            raise StrategyError(
                f"no optimizer {kind!r} in torch.optim of torch {torch.__version__}; use the same torch"
            )
        groups = tuple((tuple(int(i) for i in places), dict(options)) for places, options in data["groups"])
        return Described(kind, groups)

    def dump(self) -> dict[str, Any]:
        """As plain values."""
        return {"kind": self.kind, "groups": [[list(places), dict(options)] for places, options in self.groups]}

    def build(self, parameters: Sequence[nn.Parameter]) -> Optimizer:
        """The same optimizer on other parameters; rates of its groups keep their ratio to the first's."""
        first = float(self.groups[0][1].get("lr", 0.0))
        groups = []
        for places, options in self.groups:
            given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
            ratio = float(given["lr"]) / first if first else 1.0
            groups.append({"params": [parameters[place] for place in places], **given, "ratio": ratio})
        made: Any = Lars if self.kind == "Lars" else getattr(torch.optim, self.kind)
        try:
            built: Optimizer = made(groups)
        except (TypeError, ValueError, IndexError) as error:
            raise StrategyError(f"{self.kind} cannot be made with {self.dump()['groups']}: {error}") from error
        return built


def make(source: tuple[str, Mapping[str, Any]] | Described, parameters: list[nn.Parameter]) -> Optimizer:
    """From a name with options, or from a description."""
    return source.build(parameters) if isinstance(source, Described) else build(source[0], parameters, source[1])
