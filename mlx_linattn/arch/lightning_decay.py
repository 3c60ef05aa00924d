"""The constant decays of Lightning attention, which no checkpoint stores: they follow from the head and the layer.

    decay = exp(-slope_head * factor_layer)         slope_head = 2^(-8 (head + 1) / heads), as ALiBi's (Press et al. 2022)

``factor_layer`` falls from about 1 in the first layer to about 0 in the last.
"""

from __future__ import annotations

import math

from .config import Config

# Ling and Ring: factor = 1 - counted / (layers - 1) + 1e-5, and the sources disagree on how the layer is counted:
#   layer                SGLang, vLLM and mlx_lm's bailing_hybrid
#   previous             layer - 1: the published modelling code, which makes the first layer's factor larger than 1
#   previous_from_zero   max(0, layer - 1): mlx_lm's bailing_moe_linear
COUNTS = {
    "layer": lambda layer: layer,
    "previous": lambda layer: layer - 1,
    "previous_from_zero": lambda layer: max(0, layer - 1),
}
OPTION = "lightning_decay_layer"  # set this key of config.json to one of COUNTS to leave the release's default


def ling_decay(text: Config, layer: int, default: str) -> tuple[float, ...]:
    """Ling's and Ring's decays; ``default`` is what a release uses where config.json does not have OPTION."""
    count = COUNTS[text.only(OPTION, default, *(name for name in COUNTS if name != default))]
    last = max(1, text.integer("num_hidden_layers") - 1)
    return decays(text.integer("num_attention_heads"), 1 - count(layer) / last + 1e-5)


def decays(heads: int, factor: float) -> tuple[float, ...]:
    return tuple(math.exp(-slope * factor) for slope in slopes(heads))


def slopes(heads: int) -> list[float]:
    """ALiBi's slopes: a geometric series, and where heads is no power of 2, every other one of the next series too."""
    whole = 2 ** int(math.log2(heads))
    series = [2.0 ** (-8 * (i + 1) / whole) for i in range(whole)]
    return series + [2.0 ** (-4 * (i + 1) / whole) for i in range(2 * whole)][::2][: heads - whole]
