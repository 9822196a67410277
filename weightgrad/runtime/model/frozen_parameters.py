"""Parameters of the model that take no part in the run: what is checked about them.

A frozen parameter does not travel, so nobody would notice that sites have different ones, or that one is unfrozen while
training goes on and every site trains its own. So sites tell the server the digests of their frozen parameters when
they enter, and `requires_grad` is looked at before each step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weightgrad.errors import StrategyError
from weightgrad.kernels.digest import digest
from weightgrad.runtime.model.named_parameter import NamedParameter, plain_name
from weightgrad.runtime.model.sharded_tensor import is_sharded

KINDS = ("same", "local", "shared")
"""What `prepare(frozen=...)` may be."""

_CHUNK = 1 << 22


class FrozenParameters:
    """The parameters of a module that are not shared, and those that are.

    Args:
        module: The user's model.
        shared: The parameters that take part.
    """

    def __init__(self, module: nn.Module, shared: Sequence[NamedParameter]) -> None:
        ours = {id(one.parameter) for one in shared}
        self._shared = shared
        self._others = [(plain_name(name), p) for name, p in module.named_parameters() if id(p) not in ours]
        self.gradients_shared = False
        """Whether replicas step with shared gradients; then nothing may be frozen later, either."""
        self._told: dict[str, str] = {}

    def digests(self) -> dict[str, str]:
        """A digest of the values of each, by name; those that are sharded over ranks are left out."""
        self._told = {name: f"{value_digest(p):016x}" for name, p in self._others if not is_sharded(p)}
        return self._told

    def changed(self) -> list[str]:
        """Those that have other values than when the server was told, such as the moving average of a teacher."""
        told = self._told
        return [name for name, p in self._others if name in told and f"{value_digest(p):016x}" != told[name]]

    def check(self, stepping: Optimizer | None = None) -> None:
        """See whether the same parameters are trained as when the site was prepared.

        Args:
            stepping: The one of several optimizers that steps; the parameters of others may be frozen meanwhile, as
                Lightning's `toggle_optimizer` does. None: all.

        Raises:
            StrategyError: One is trained that is not shared; or one is frozen with which replicas would still step.
        """
        for name, parameter in self._others:
            if parameter.requires_grad:
                raise StrategyError(
                    f"{name} was frozen when the site was prepared and is trained now, by each site alone; unfreeze it "
                    'before prepare(), or say prepare(frozen="shared") at every site, with a strategy that shares '
                    "updates"
                )
        own = None if stepping is None else {id(p) for group in stepping.param_groups for p in group["params"]}
        for one in self._shared if self.gradients_shared else ():
            if not one.parameter.requires_grad and (own is None or id(one.parameter) in own):
                raise StrategyError(
                    f"{one.name} was trained when the site was prepared and is frozen now: with shared gradients its "
                    "momentum and weight decay would go on. Freeze it before prepare(), or take a strategy that shares "
                    "updates, such as weightgrad"
                )


def value_digest(tensor: Tensor) -> int:
    """A digest of the values that this rank has: the same value in 16 and in 32 bits is the same."""
    local = tensor.to_local() if is_sharded(tensor) else tensor
    flat = local.detach().contiguous().reshape(-1)
    if not flat.is_floating_point() or flat.element_size() == 1:
        flat = flat.view(torch.uint8)
    total = 0
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].to("cpu", torch.float32).contiguous()
        total += digest(part, start)
    return total % 2**64
