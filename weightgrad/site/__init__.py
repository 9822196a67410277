"""Inside a site: workers that encode gradients, a local server that holds the weights, an allreduce.

Pure: no clocks, sockets or threads, and no random numbers but those of the keys given.
"""

from weightgrad.site.allreduce import QuantizedAllreduce
from weightgrad.site.average import ParameterAverage
from weightgrad.site.lars import Lars
from weightgrad.site.layout import Layout, Slot
from weightgrad.site.local_server import Combiner, LocalServer
from weightgrad.site.weights import WeightsOut, decode_flat
from weightgrad.site.worker import GradientEncoder

__all__ = [
    "Combiner",
    "GradientEncoder",
    "Lars",
    "Layout",
    "LocalServer",
    "ParameterAverage",
    "QuantizedAllreduce",
    "Slot",
    "WeightsOut",
    "decode_flat",
]
