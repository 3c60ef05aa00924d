"""The operations. Each has one public function, a float32 reference, a path in plain MLX, and a kernel where one pays.

Shape letters, here and everywhere: B batch, T tokens of this call, S tokens in a cache, H hidden size or query heads,
Hk and Hv key and value heads, Dk and Dv their widths, C channels of a convolution or tokens of a chunk, K taps, E experts.
"""

from .attention import attention
from .backend import BACKENDS, forced_backend, use_backend
from .conv import short_conv
from .delta_mixer import delta_mixer
from .gates import delta_decay, sigmoid_gate, silu, swiglu, write_strength
from .kernel_attention import kernel_attention, map_features
from .norm import gate_then_norm, l2_normalize, norm_then_gate, rms_norm
from .recurrence import recurrence
from .scan import diagonal_scan, selective_scan

__all__ = [
    "BACKENDS",
    "attention",
    "delta_decay",
    "delta_mixer",
    "diagonal_scan",
    "forced_backend",
    "gate_then_norm",
    "kernel_attention",
    "l2_normalize",
    "map_features",
    "norm_then_gate",
    "recurrence",
    "rms_norm",
    "selective_scan",
    "short_conv",
    "sigmoid_gate",
    "silu",
    "swiglu",
    "use_backend",
    "write_strength",
]
