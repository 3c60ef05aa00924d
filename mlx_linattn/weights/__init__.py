"""From a checkpoint's files to a model's parameters: headers, encodings, layouts. Every tensor is accounted for."""

from .checkpoint import Checkpoint, TensorInfo
from .tensors import (
    Tensors,
    assemble,
    float32_parameters,
    load_weights,
    module_settings,
    prepare_quantized,
    quantization,
    stored_dtype,
)

__all__ = [
    "Checkpoint",
    "TensorInfo",
    "Tensors",
    "assemble",
    "float32_parameters",
    "load_weights",
    "module_settings",
    "prepare_quantized",
    "quantization",
    "stored_dtype",
]
