"""WeightGrad: one neural network, trained on data in several data centers.

    import weightgrad as wg

    site = wg.join("gs.example.net:7443", site="virginia", credentials="certs/")
    model, optimizer = site.prepare(model, optimizer, strategy="auto")
    for x, y in loader:
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    site.leave()

`codecs` turns tensors into few bytes and back, `wire` puts them into checked frames, `kernels` does the work.
"""

from typing import TYPE_CHECKING, Any

from weightgrad import codecs, errors, kernels, wire
from weightgrad.errors import WeightGradError

if TYPE_CHECKING:
    from weightgrad.runtime.site import Site, join

__version__ = "0.1.0"

__all__ = ["Site", "WeightGradError", "__version__", "codecs", "errors", "join", "kernels", "wire"]


def __getattr__(name: str) -> Any:
    """`join` and `Site` are loaded when they are asked for: gRPC takes a while to import."""
    if name in ("Site", "join"):
        from weightgrad.runtime import site

        return getattr(site, name)
    raise AttributeError(f"module 'weightgrad' has no attribute {name!r}")
