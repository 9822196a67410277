"""Quantized models as files: weights of few bits in a safetensors container, written, read and checked.

    save_quantized(model, "model.safetensors", weights="lossaware(bits='ternary')")
    model.load_state_dict(load_quantized("model.safetensors"))

Packed integers of 2, 4 and 8 bits are in the layout that compressed-tensors calls pack-quantized; what that layout
cannot hold (a codebook, signs, other widths) is in ours. `docs/export.md` specifies both.
"""

from weightgrad.quantized.packed_tensor import PackedTensor
from weightgrad.quantized.quantized_file import load_packed, load_quantized
from weightgrad.quantized.quantized_model import QuantizedModel, quantize, save_quantized

__all__ = ["PackedTensor", "QuantizedModel", "load_packed", "load_quantized", "quantize", "save_quantized"]
