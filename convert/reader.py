"""A model that is run without being loaded: every part of it is read when it is needed and let go of afterwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlx_linattn import arch
from mlx_linattn.layers import Layer, Part
from mlx_linattn.layers.mlp import limited_swiglu
from mlx_linattn.layers.moe import Experts, Moe
from mlx_linattn.layout import locate
from mlx_linattn.model import Model
from mlx_linattn.state import Span
from mlx_linattn.weights import Tensors, module_settings, quantization, transform
from mlx_linattn.weights.checkpoint import Checkpoint

from .bits import Quantization
from .tensors import Rows, dequantize

PIECE = 32 << 20  # bytes in float32 of those rows of embedding or head that are read at a time


class Numbers(Tensors):
    """A checkpoint's tensors as plain numbers, also where MLX quantized them."""

    def __init__(self, checkpoint, family, spec):
        super().__init__(checkpoint, family, spec)
        self._quantization = quantization(checkpoint.config, family.PREFIXES) if checkpoint.is_mlx else None

    def read(self, name: str, decoded_dtype: mx.Dtype = mx.float32, rows: Rows = None) -> mx.array:
        base = name.removesuffix(".weight")
        if self._quantization is None or f"{base}.scales" not in self:
            return super().read(name, decoded_dtype, rows)
        q = Quantization(**module_settings(self._quantization, base))
        parts = [part for part in (f"{base}.{end}" for end in ("weight", "scales", "biases")) if part in self]
        return dequantize([super(Numbers, self).read(part, rows=rows) for part in parts], q)


class Reader:
    """A checkpoint's model, layer by layer and in float32. ``model`` itself has read nothing."""

    def __init__(self, checkpoint: Checkpoint):
        family = arch.family(checkpoint.config)
        self.model = Model(family.spec(checkpoint.config))
        self.spec = self.model.spec
        self.tensors = Numbers(checkpoint, family, self.spec)
        self.places = dict(family.names(self.spec))

    def read(self, parameter: str, rows: Rows = None) -> mx.array:
        """A parameter of the model, or some rows of it."""
        take = locate(parameter, self.places)
        if take.steps:
            array = transform.apply(take, [self.tensors.read(source) for source in take.sources])
            array = array if rows is None else array[rows]
        else:
            array = self.tensors.read(take.sources[0], rows=rows)
        array = mx.contiguous(array.astype(mx.float32))
        mx.eval(array)
        self.tensors.checkpoint.release()
        return array

    def fill(self, part: nn.Module, path: str) -> nn.Module:
        """``part`` of the model with its parameters."""
        names = [name for name, _ in tree_flatten(part.parameters())]
        part.update(tree_unflatten([(name, self.read(f"{path}.{name}")) for name in names]))
        return part

    def layer(self, i: int) -> Layer:
        """Layer ``i``, once. It has its weights but for the experts, and reads one row of tokens after the other.

        It begins with an empty state, whatever state it is given.
        """
        layer, self.model.layers[i] = self.model.layers[i], None
        mlp = getattr(layer, "mlp", None)
        if isinstance(mlp, Moe):
            mlp.switch_mlp = _OneByOne(mlp.switch_mlp, partial(self._expert, f"layers.{i}.mlp.switch_mlp"))
        self.fill(layer, f"layers.{i}")
        layer.mixer = _RowByRow(layer.mixer)
        if mlp is not None and not isinstance(mlp, Moe):  # experts are read once for all rows
            layer.mlp = _RowByRow(mlp)
        return layer

    def _expert(self, path: str, e: int) -> list[mx.array]:
        parts = ("gate_proj", "up_proj", "down_proj")
        return [self.read(f"{path}.{part}.weight", slice(e, e + 1))[0] for part in parts]

    def embed(self, ids: mx.array) -> mx.array:
        """[B, T] -> [B, T, H]."""
        flat = ids.reshape(-1).tolist()
        x = mx.zeros((len(flat), self.spec.hidden_size))
        for rows in self.slices("embed.weight"):
            here = [i for i, token in enumerate(flat) if rows.start <= token < rows.stop]
            if here:
                table = self.read("embed.weight", rows)
                x[mx.array(here)] = table[mx.array([flat[i] - rows.start for i in here])]
                mx.eval(x)
        return x.reshape(*ids.shape, -1)

    @property
    def head(self) -> str:
        return "embed.weight" if self.spec.tied else "head.weight"

    def logits(self, hidden: mx.array, tokens: slice) -> mx.array:
        """[..., H] -> [..., of these tokens]."""
        head = self.model.embed if self.spec.tied else self.model.head
        head.weight = self.read(self.head, tokens)
        return self.model.logits(hidden)

    def slices(self, parameter: str) -> list[slice]:
        """The rows of embedding or head to read at a time: all where it is stored in a way that cannot be cut."""
        count, width = self.spec.vocab_size, self.spec.hidden_size
        take = locate(parameter, self.places)
        can_cut = not take.steps and self.tensors.can_cut(self.tensors.take(take.sources[0]))
        step = max(1, PIECE // (4 * width)) if can_cut else count
        return [slice(i, min(i + step, count)) for i in range(0, count, step)]


class _OneByOne:
    """Experts of which one is in memory at a time, and only those that a token chose."""

    def __init__(self, experts: Experts, read: Callable[[int], list[mx.array]]):
        self.limits, self.read = experts.limits, read

    def __call__(self, x, chosen):
        """x [N, H], chosen [N, top_k] -> [N, top_k, H]."""
        N, top_k = chosen.shape
        places = defaultdict(list)
        for place, expert in enumerate(chosen.reshape(-1).tolist()):
            places[expert].append(place)
        y = mx.zeros((N * top_k, x.shape[-1]))
        for expert in sorted(places):
            gate, up, down = self.read(expert)
            at = mx.array(places[expert])
            rows = x[at // top_k]
            y[at] = limited_swiglu(rows @ gate.T, rows @ up.T, *self.limits) @ down.T
            mx.eval(y)
        return y.reshape(N, top_k, -1)


class _RowByRow:
    """A mixer or MLP that gets through [B, T, H] a row at a time, so that what is inside it takes a row's memory."""

    def __init__(self, part: Part):
        self.part, self.ranks = part, part.ranks

    def __call__(self, x, *state_and_span):
        T = x.shape[1]
        rows = []
        for row in mx.split(x, len(x)):
            rest = (self.part.make_state(), Span((0,), (T,), T)) if state_and_span else ()
            rows.append(self.part(row, *rest))
            mx.eval(rows[-1])
        return mx.concatenate(rows)
