"""What tells one model from another: names, shapes and dtypes of all weights (so quantization too), and a sample of their numbers."""

from __future__ import annotations

import hashlib

import mlx.core as mx
import numpy as np

from ..model import Model

SAMPLE = 64  # numbers of each weight, evenly spread: two trainings of one architecture differ everywhere


def of_weights(model: Model) -> str:
    digest = hashlib.sha256(model.model_type.encode())
    samples = []
    for name, dtype, shape, sample in model.sampled(SAMPLE):
        digest.update(f"{name} {dtype} {shape};".encode())
        samples.append(sample)
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
