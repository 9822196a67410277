"""Notices weights that are written to between two steps, where gradients are shared.

There every replica makes its weights by the same steps. What a script writes into them itself, after its step, no other
replica has: clipped weights (WGAN), a layer that is made anew, the rows that `nn.Embedding(max_norm=...)` shortens in
its forward pass. Sites would drift apart, or the server's model from theirs, without a word. So digests of the weights
after a step and before the next one are compared: at the first steps, and then as often as costs about 2^20 elements a
step. Weights on a device are not watched: that would copy them, and wait for the device, at steps that cost nothing
else.
"""

from __future__ import annotations

from collections.abc import Sequence

from weightgrad.errors import StrategyError
from weightgrad.runtime.model.frozen_parameters import value_digest
from weightgrad.runtime.model.named_parameter import NamedParameter

FIRST_STEPS = 8
_ELEMENTS = 1 << 20


class WeightWatch:
    """Compares the weights of this rank after a step and before what follows it.

    Args:
        shared: The parameters that take part.
        strategy: The name of the strategy, for errors.
    """

    def __init__(self, shared: Sequence[NamedParameter], strategy: str) -> None:
        self._shared = [one for one in shared if one.parameter.device.type == "cpu"]
        self._strategy = strategy
        self._every = 1 + sum(one.parameter.numel() for one in self._shared) // _ELEMENTS
        self._steps = 0
        self._left: list[int] | None = None

    def stepped(self) -> None:
        """The optimizer has stepped: these are the weights that the other replicas have, too."""
        self._steps += 1
        if self._steps <= FIRST_STEPS or self._steps % self._every == 0:
            self._left = self._digests()

    def check(self) -> None:
        """See whether the weights are still those that the last step has left.

        Raises:
            StrategyError: They are not.
        """
        left, self._left = self._left, None
        if left is None:
            return
        moved = [one.name for one, a, b in zip(self._shared, left, self._digests(), strict=True) if a != b]
        if moved:
            raise StrategyError(
                f"{moved[0]} is not what the last optimizer.step() has left: something has written to it since, and "
                f"{self._strategy} shares gradients, so the other replicas would never see it. Clipping weights, "
                "making a layer anew, model.half() and back, nn.Embedding(max_norm=...), an optimizer around another "
                "(Lookahead, ScheduleFreeWrapper) do that. Put such a rule into the forward pass "
                "(torch.nn.utils.parametrize), or take a strategy that shares updates, such as diloco(every=1)"
            )

    def _digests(self) -> list[int]:
        return [value_digest(one.parameter) for one in self._shared]
