"""The weights with which sites of this process have left, so that coming back with them is no surprise.

A notebook leaves and joins again with the same model. It is then given the present global model, and to say that its
own weights are gone would be noise: they are the global model that it left with.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.utils.weak import WeakIdKeyDictionary

from weightgrad.runtime.model.named_parameter import NamedParameter

_LEFT: WeakIdKeyDictionary = WeakIdKeyDictionary()  # digests, by the first parameter of a model


def remember(parameters: Sequence[NamedParameter], digest: int) -> None:
    """A site leaves with these parameters, whose values have that digest."""
    if parameters:
        _LEFT[parameters[0].parameter] = digest


def are_known(parameters: Sequence[NamedParameter], digest: int | None) -> bool:
    """Whether a site has left with these parameters and these values."""
    return digest is not None and bool(parameters) and _LEFT.get(parameters[0].parameter) == digest
