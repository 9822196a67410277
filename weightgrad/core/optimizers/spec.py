"""The description of a user's optimizer, with which the global server's replica takes the same steps."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weightgrad.core.optimizers.lars import Lars
from weightgrad.core.optimizers.learning_rates import base_rates_of
from weightgrad.core.optimizers.muon import MuonForAll
from weightgrad.core.optimizers.named import build
from weightgrad.core.optimizers.options import flat_numbers
from weightgrad.errors import StrategyError

_ELEMENTWISE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
_NOT_FOR_OTHERS = ("params", "capturable")  # the latter is for CUDA graphs: a replica elsewhere has none

TRAINING = "train_mode"
"""The option in which schedule-free optimizers keep whether they train or show their weights for evaluation."""
AT_SITES = "at_sites"
"""In the description of an optimizer: only sites can make it, and step with it."""

_OWN: dict[str, type[Optimizer]] = {"Lars": Lars, "MuonForAll": MuonForAll}

_allowed: dict[str, type[Optimizer]] = {}


def allow_optimizer(path: str) -> type[Optimizer]:
    """Let descriptions name an optimizer that is not one of torch's own.

    A site only says the name of a class. What is imported is decided here, by who runs the process.

    Args:
        path: where the class is, as "package.module:Class".

    Returns:
        The class.

    Raises:
        StrategyError: it cannot be imported, or is no optimizer.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise StrategyError(
            f"the optimizer {path!r} cannot be imported ({error}); wanted package.module:Class"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise StrategyError(f"{path} is no torch.optim.Optimizer")
    _allowed[found.__name__] = found
    return found


def _torchs(kind: str) -> type[Optimizer] | None:
    if kind in _OWN:
        return _OWN[kind]
    made = getattr(torch.optim, kind, None)
    return made if isinstance(made, type) and issubclass(made, Optimizer) and made is not Optimizer else None


def _class_of(kind: str) -> type[Optimizer] | None:
    return _torchs(kind) or _allowed.get(kind)


@dataclass(frozen=True)
class OptimizerSpec:
    """The class and the parameter groups of an optimizer, so that another process can build the same.

    Attributes:
        kind: the name of the class.
        groups: for each group the indices of its parameters, and its options.
        dtypes: of parameters that are not float32, by index: a replica steps in the same precision.
        tensor_rate: whether learning rates are tensors, with which a step rounds otherwise.
        path: where the class is, for errors.
    """

    kind: str
    groups: tuple[tuple[tuple[int, ...], Mapping[str, Any]], ...]
    dtypes: Mapping[int, str] = field(default_factory=dict)
    tensor_rate: bool = False
    path: str = ""

    @staticmethod
    def of(optimizer: Optimizer, parameters: Sequence[nn.Parameter], *, all_: bool = True) -> OptimizerSpec:
        """Describe an optimizer.

        Args:
            optimizer: an optimizer. One that is not torch's own must be allowed where it is built.
            parameters: the model's parameters, in the order of the layout.
            all_: whether every option must be described; otherwise those that cannot be are left out.

        Returns:
            The description.

        Raises:
            StrategyError: an option cannot be described.
        """
        kind = type(optimizer)
        index = {id(parameter): number for number, parameter in enumerate(parameters)}
        groups = []
        for group, rate in zip(optimizer.param_groups, base_rates_of(optimizer), strict=True):
            options = {k: v for k, v in group.items() if k in optimizer.defaults and k not in _NOT_FOR_OTHERS}
            options |= {TRAINING: True} if TRAINING in options else {}  # whatever the mode here is, replicas step
            plain = {
                k: _plain(kind.__name__, k, rate if k == "lr" else v)
                for k, v in options.items()
                if all_ or _is_plain(v)
            }
            groups.append((tuple(index[id(p)] for p in group["params"] if id(p) in index), plain))
        dtypes = {
            number: str(one.dtype).removeprefix("torch.")
            for number, one in enumerate(parameters)
            if one.dtype != torch.float32
        }
        return OptimizerSpec(
            kind.__name__,
            tuple(groups),
            dtypes,
            any(isinstance(group.get("lr"), Tensor) for group in optimizer.param_groups),
            f"{kind.__module__}:{kind.__qualname__}",
        )

    @staticmethod
    def parse(data: Mapping[str, Any], *, build: bool = True) -> OptimizerSpec:
        """Read what `dump` returned, also after its way through JSON.

        Args:
            data: the description.
            build: whether the optimizer is to be built here, so that its class must be known.

        Raises:
            StrategyError: it cannot be read, or there is no such optimizer here.
        """
        try:
            kind, path = str(data["kind"]), str(data.get("path", ""))
            groups = tuple((tuple(int(i) for i in indices), _told(options)) for indices, options in data["groups"])
            dtypes = {int(number): str(name) for number, name in dict(data.get("dtypes", {})).items()}
            good = all(isinstance(getattr(torch, name, None), torch.dtype) for name in dtypes.values())
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise StrategyError(f"an optimizer that cannot be read ({error!r})") from error
        if not good:
            raise StrategyError(f"an optimizer of parameters of unknown types: {sorted(set(dtypes.values()))}")
        if build and _class_of(kind) is None:
            where = f"MODULE:{kind}" if path.startswith("__main__") or not path else path
            remedy = f"install its module where the server runs, and start the server with --optimizer {where}"
            remedy = "use the same torch" if path.startswith("torch.") else remedy
            raise StrategyError(f"no optimizer {kind!r} in torch.optim of torch {torch.__version__}; {remedy}")
        return OptimizerSpec(kind, groups, dtypes, bool(data.get("tensor_rate", False)), path)

    @property
    def is_torchs(self) -> bool:
        """Whether it is an optimizer of torch, or one of this package that is like them."""
        return _torchs(self.kind) is not None

    @property
    def needs_whole_tensors(self) -> bool:
        """Whether its steps depend on the shapes of parameters, so that a replica must have all of each."""
        return self.kind not in _ELEMENTWISE

    def numbers(self) -> tuple[tuple[str, float], ...]:
        """The name and value of each number among the options, in the order of `core/optimizers/options.py`."""
        return tuple(
            (name, number)
            for _, options in self.groups
            for name in sorted(options)
            for number in flat_numbers(options[name])
        )

    def dump(self) -> dict[str, Any]:
        """The description as plain values, for JSON."""
        return {
            "kind": self.kind,
            "groups": [[list(indices), dict(options)] for indices, options in self.groups],
            "dtypes": {str(number): name for number, name in self.dtypes.items()},
            "tensor_rate": self.tensor_rate,
            "path": self.path,
        }

    def changed(self, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> OptimizerSpec:
        """The same optimizer with other options.

        Args:
            change: turns the options of a group into new ones.
        """
        return replace(self, groups=tuple((indices, change(options)) for indices, options in self.groups))

    def reordered(self, places: Sequence[int]) -> OptimizerSpec:
        """The same optimizer for the same parameters in another order.

        Args:
            places: for each parameter, its new index.

        Raises:
            StrategyError: the description names a parameter that there is not.
        """
        try:
            groups = tuple((tuple(places[index] for index in indices), options) for indices, options in self.groups)
            dtypes = {places[index]: name for index, name in self.dtypes.items()}
        except IndexError as error:
            raise StrategyError(f"an optimizer of more than {len(places)} parameters ({error})") from error
        return replace(self, groups=groups, dtypes=dtypes)

    def difference(self, other: OptimizerSpec) -> str | None:
        """Why this optimizer takes other steps than another, or None.

        Learning rates are sent with every step, so only the ratios between groups count.
        """
        if self.kind != other.kind:
            return f"it is {self.kind}, the others have {other.kind}"
        if [sorted(indices) for indices, _ in self.groups] != [sorted(indices) for indices, _ in other.groups]:
            return "its groups have other parameters"
        if dict(self.dtypes) != dict(other.dtypes):
            return "its parameters have other floating-point types"
        if self.tensor_rate != other.tensor_rate:
            return "its learning rate is a tensor, or that of the others is"
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

    def build(self, parameters: Mapping[int, nn.Parameter]) -> Optimizer:
        """Build the optimizer on other parameters; learning rates of groups keep their ratio to the first group's.

        Args:
            parameters: the parameters by their index in the description; those that are not held here are left out.

        Raises:
            StrategyError: torch refuses the options.
        """
        made: Any = _class_of(self.kind)
        try:
            first = float(self.groups[0][1].get("lr", 0.0))
            groups = []
            for indices, options in self.groups:
                given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
                ratio = float(given.get("lr", 1.0)) / first if first else 1.0
                if self.tensor_rate and "lr" in given:
                    given["lr"] = torch.tensor(float(given["lr"]))
                own = [parameters[index] for index in indices if index in parameters]
                groups.append({"params": own, **given, "ratio": ratio})
            built: Optimizer = made(groups, **self._required(made, groups[0]))
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise StrategyError(f"{self.kind} cannot be made with {self.dump()['groups']}: {error}") from error
        return built

    @staticmethod
    def _required(made: Any, group: Mapping[str, Any]) -> dict[str, Any]:
        """Options without which the class cannot be made, although every group has them."""
        wanted = inspect.signature(made).parameters.values()
        return {
            one.name: group[one.name]
            for one in wanted
            if one.default is inspect.Parameter.empty and one.name in group and one.name != "params"
        }


def _told(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group as another process has told them: what they are is not looked at again."""
    found = {str(name): _plain("the optimizer", str(name), value) for name, value in dict(options).items()}
    rate = found.get("lr", 0.0)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not math.isfinite(rate):
        raise ValueError(f"a learning rate of {str(rate)[:40]}")
    return found


def _is_plain(value: Any) -> bool:
    """Whether an option can be told."""
    try:
        _plain("", "", value)
    except StrategyError:
        return False
    return True


def _plain(kind: str, name: str, value: Any) -> Any:
    """An option as a value that JSON can carry."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(_plain(kind, name, one) for one in value)
    raise StrategyError(
        f"{name} of {kind} is {value!r}, and other replicas can be told only numbers and words; strategies that share "
        "gradients need it told. Take a strategy that shares updates, such as weightgrad"
    )


def make(source: tuple[str, Mapping[str, Any]] | OptimizerSpec, parameters: Mapping[int, nn.Parameter]) -> Optimizer:
    """Build an optimizer from a name with options, or from a description, on parameters by their index."""
    if isinstance(source, OptimizerSpec):
        return source.build(parameters)
    return build(source[0], list(parameters.values()), source[1])
