"""Which module an operation of a training step belongs to, in forward and in backward.

In forward it is the module that is being called. Of backward, autograd numbers its nodes in the order in which forward
made them, so the numbers that were given out while a module was called are those of its operations. Hooks on the
gradients of a module's inputs would not do: a module whose inputs have no gradient, or come as keywords, would never be
left.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle


class LayerTracker:
    """Follows the calls of a model's modules while it is entered.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names: dict[int, str] = {id(part): name for name, part in module.named_modules()}
        self._owners: dict[int, str] = {
            id(parameter): name for name, part in module.named_modules() for parameter in part.parameters(recurse=False)
        }
        self._called: list[str] = []
        self._numbers: list[int] = []  # of autograd's nodes, at which another module had its turn
        self._turns: list[str] = []
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> LayerTracker:
        self._hooks = [
            register_module_forward_pre_hook(self._begins),
            register_module_forward_hook(self._ends, always_call=True),  # what is computed again may end in the middle
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def layer(self) -> str:
        """The path of the module whose operation is computed now; empty: of none within the model."""
        node = torch._C._current_autograd_node()
        if self._called or node is None:
            return self._called[-1] if self._called else ""
        parameter = getattr(node, "variable", None)  # of the node that adds up a parameter's gradient
        if parameter is not None:
            return self._owners.get(id(parameter), "")
        place: int = bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._turns[place] if place >= 0 else ""

    def _begins(self, module: nn.Module, inputs: Any) -> None:
        del inputs
        self._called.append(self._names.get(id(module), self._called[-1] if self._called else ""))
        self._turn()

    def _ends(self, module: nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs, output
        self._called.pop()
        self._turn()

    def _turn(self) -> None:
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._turns.append(self._called[-1] if self._called else "")
