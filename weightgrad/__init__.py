"""WeightGrad trains one neural network on data that lives in several data centers.

    import weightgrad as wg

    with wg.join("gs.example.net:7443", site="virginia", credentials="certs/") as site:
        model, optimizer = site.prepare(model, optimizer, strategy="auto")
        for x, y in loader:
            loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

`codecs` encodes tensors in few bytes, `wire` puts the bytes into checked frames, and `kernels` has the hot loops.
"""

import importlib.metadata
from typing import TYPE_CHECKING, Any

from weightgrad import codecs, errors, kernels, wire
from weightgrad.errors import WeightGradError

if TYPE_CHECKING:
    from weightgrad.quantized import load_packed, load_quantized, save_quantized
    from weightgrad.runtime.join import join
    from weightgrad.runtime.session import Site

__version__ = importlib.metadata.version("weightgrad")

__all__ = [
    "Site",
    "WeightGradError",
    "__version__",
    "codecs",
    "errors",
    "join",
    "kernels",
    "load_packed",
    "load_quantized",
    "save_quantized",
    "wire",
]


def __getattr__(name: str) -> Any:
    """Load what is not always needed on first use: importing gRPC takes a while."""
    if name in ("Site", "join"):
        from weightgrad.runtime import join, session

        return join.join if name == "join" else session.Site
    if name in ("load_packed", "load_quantized", "save_quantized"):
        from weightgrad import quantized

        return getattr(quantized, name)
    raise AttributeError(f"module 'weightgrad' has no attribute {name!r}")
