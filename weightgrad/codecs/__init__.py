"""Tensor to compact payload and back: every published quantizer behind one interface.

    codec = codecs.parse("ef(topk(0.01) > qsgd(bits=4))")
    state = codec.init(x)
    payload, state = codec.encode(x, state, key)
    y = codecs.decode(payload)

A codec is one file in this package. The package imports all of its files, so that a new codec is known to `parse`,
to the simulator and to `weightgrad bench codecs` without another line anywhere.
"""

import importlib
import pkgutil

from weightgrad.codecs.adaptive import Adaptive
from weightgrad.codecs.clip import Clip
from weightgrad.codecs.codebook import Codebook
from weightgrad.codecs.codec import Benchmark, Codec, Stage, State
from weightgrad.codecs.cost import benchmarks
from weightgrad.codecs.dgc import Dgc
from weightgrad.codecs.elias import Elias
from weightgrad.codecs.error_feedback import ErrorFeedback
from weightgrad.codecs.floats import Bf16, Fp16, Fp32
from weightgrad.codecs.lossaware import LossAware
from weightgrad.codecs.onebit import OneBit
from weightgrad.codecs.payload import Payload
from weightgrad.codecs.powersgd import PowerSgd
from weightgrad.codecs.qsgd import Qsgd
from weightgrad.codecs.registry import Format, decode, decode_add, formats
from weightgrad.codecs.sign import Sign, majority_vote
from weightgrad.codecs.sparse import Threshold, TopK, pack_entries
from weightgrad.codecs.sparse_entries import unpack_entries
from weightgrad.codecs.spec import available, explain, parse, signature, summary
from weightgrad.codecs.terngrad import TernGrad
from weightgrad.codecs.warmup import WarmUp

__all__ = [
    "Adaptive",
    "Benchmark",
    "Bf16",
    "Clip",
    "Codebook",
    "Codec",
    "Dgc",
    "Elias",
    "ErrorFeedback",
    "Format",
    "Fp16",
    "Fp32",
    "LossAware",
    "OneBit",
    "Payload",
    "PowerSgd",
    "Qsgd",
    "Sign",
    "Stage",
    "State",
    "TernGrad",
    "Threshold",
    "TopK",
    "WarmUp",
    "available",
    "benchmarks",
    "decode",
    "decode_add",
    "explain",
    "formats",
    "majority_vote",
    "pack_entries",
    "parse",
    "signature",
    "summary",
    "unpack_entries",
]

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
