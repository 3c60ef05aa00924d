"""What tells one model from another: names, shapes and dtypes of all weights (so quantization too), and a sample of their numbers."""

from __future__ import annotations

import hashlib

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ..model import Model

SAMPLE = 64  # numbers of each weight, evenly spread: two trainings of one architecture differ everywhere


def of_weights(model: Model) -> str:
    digest = hashlib.sha256(model.model_type.encode())
    samples = []
    for name, array in sorted(tree_flatten(model.parameters())):
        digest.update(f"{name} {array.dtype} {array.shape};".encode())
        sample = array.reshape(-1)[:: max(1, array.size // SAMPLE)][:SAMPLE]
        samples.append(
            sample.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else sample.astype(mx.int64)
        )
    mx.eval(samples)
    for sample in samples:
        digest.update(np.array(sample).tobytes())
    return digest.hexdigest()


def of_tokenizer(tokenizer) -> str:
    """Its vocabulary and chat template."""
    digest = hashlib.sha256(str(getattr(tokenizer, "chat_template", None)).encode())
    for word, token in sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{token} {word};".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
