"""Counts what a GPU would be told to do: the primitives of a traced graph that are not mere views, and kernel launches."""

from __future__ import annotations

import io
import re
from collections import Counter
from contextlib import ExitStack
from unittest.mock import patch

import mlx.core as mx

from mlx_linattn import metal
from mlx_linattn.ops import use_backend

#: Primitives that only describe their input anew where it is contiguous.
VIEWS = {
    "AsStrided", "Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze", "StopGradient", "Transpose",
    "Unflatten", "View",
}  # fmt: skip
PROJECTIONS = {"AddMM", "Matmul", "QuantizedMatmul", "GatherMM", "GatherQMM"}


class Dispatches:
    """``count(f)`` runs f and returns a Counter of primitives; f returns the arrays that a step evaluates."""

    def __init__(self, backend: str | None = None):
        self.backend = backend
        self.launches: Counter[str] = Counter()
        self.roots: list[mx.array] = []  # what the launches read: their outputs are leaves of the graph

    def launch(self, name, inputs, shapes, dtypes):
        self.launches[name] += 1
        self.roots += [x for x in inputs if isinstance(x, mx.array)]
        outputs = [mx.zeros(s, d) for s, d in zip(shapes, dtypes)]
        mx.eval(outputs)
        return outputs

    def count(self, f) -> Counter[str]:
        def kernel(name, *_):
            return lambda **call: self.launch(name, call["inputs"], call["output_shapes"], call["output_dtypes"])

        def rms_norm(x, weight, eps):  # one kernel on a GPU, seven primitives on a CPU
            return self.launch("RMSNorm", [x], [x.shape], [x.dtype])[0]

        with ExitStack() as stack:
            stack.enter_context(patch.object(metal, "kernel", kernel))
            stack.enter_context(patch.object(mx.fast, "rms_norm", rms_norm))
            if self.backend:
                stack.enter_context(use_backend(self.backend))
            roots = [*f(), *self.roots]
        return primitives(*roots) + self.launches


def primitives(*arrays) -> Counter[str]:
    """How often each primitive stands in the graph of these arrays, views left out."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    names = re.findall(r'\d+ \[label ="(\w+)", shape=rectangle\]', text.getvalue())
    return Counter(name for name in names if name not in VIEWS)


def besides_projections(counts: Counter[str]) -> int:
    return sum(n for name, n in counts.items() if name not in PROJECTIONS)
