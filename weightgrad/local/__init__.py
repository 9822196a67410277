"""What happens inside a site: `LocalStep`, and the encoders, the local server and the allreduce that it is made of.

Everything here is pure: no clocks, sockets or threads, and no random numbers but those of the keys given.
"""

from weightgrad.core.layout import Layout, Slot
from weightgrad.core.optimizers.lars import Lars
from weightgrad.local.allreduce import QuantizedAllreduce
from weightgrad.local.gradient_encoder import GradientEncoder
from weightgrad.local.gradient_exchange import Exchange, GradientExchange, ServedPart
from weightgrad.local.local_server import Combiner, LocalServer
from weightgrad.local.parameter_average import ParameterAverage
from weightgrad.local.serving import owners, serving
from weightgrad.local.step import LocalStep
from weightgrad.local.weight_encoder import WeightEncoder, decode_flat

__all__ = [
    "Combiner",
    "Exchange",
    "GradientEncoder",
    "GradientExchange",
    "Lars",
    "Layout",
    "LocalServer",
    "LocalStep",
    "ParameterAverage",
    "QuantizedAllreduce",
    "ServedPart",
    "Slot",
    "WeightEncoder",
    "decode_flat",
    "owners",
    "serving",
]
