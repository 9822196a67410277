"""`state_dict()` of layers whose parameters lie in one buffer with all others.

With quantized weights inside a site, the parameters of a rank are views of a flat vector (`rank_step`). A view is saved
with all of the memory that it lies in: the file of one layer would be as large as the whole model, and safetensors
would refuse it. So `state_dict()` has copies of them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class CopiesOfViews:
    """A hook that gives a state dict memory of its own. It has no state: it is pickled and copied with its module."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """Called by torch when the module has put its parameters into a state dict."""
        del local_metadata
        for name, _ in module.named_parameters(recurse=False):
            found = state.get(prefix + name)
            if isinstance(found, Tensor) and not isinstance(found, nn.Parameter) and _is_part(found):
                state[prefix + name] = found.clone()


def copy_views(model: nn.Module) -> list[Any]:
    """Watch a model and each of its layers; returns handles whose `remove` ends it."""
    return [module.register_state_dict_post_hook(CopiesOfViews()) for module in model.modules()]


def _is_part(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
