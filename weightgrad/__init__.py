"""WeightGrad: one neural network, trained on data in several data centers.

What is here so far: `codecs` turns tensors into few bytes and back, `wire` puts them into
checked frames, `kernels` does the work.
"""

from weightgrad import codecs, errors, kernels, wire
from weightgrad.errors import WeightGradError

__version__ = "0.1.0"

__all__ = ["WeightGradError", "__version__", "codecs", "errors", "kernels", "wire"]
