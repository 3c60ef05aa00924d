"""What a model is, as frozen data without MLX: the one thing that ``arch`` makes and ``layers`` read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions on the first ``dims`` features of a head."""

    dims: int
    theta: float
    interleaved: bool = False  # rotate neighbours (2i, 2i+1) instead of halves


@dataclass(frozen=True)
class GatedDeltaSpec:
    """Gated DeltaNet: one decay per value head and token, one short convolution over [q | k | v]. Without decay, DeltaNet."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_eps: float
    beta_scale: float = 1.0
    decay: bool = True
    output_gate: str | None = "silu"  # or "sigmoid", of a projection; None: the output norm alone
    separate_qkv: bool = False  # q, k and v have a projection each, which a checkpoint may quantize differently

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class LightningSpec:
    """Lightning attention (Qin et al. 2024): linear attention whose decay is a constant of the layer and the head.

    S = decay S + k (x) v,  o = scale S^T q;  y = out_proj(norm(o) * sigmoid(g_proj x)), where the norm spans all heads'
    outputs, cut into ``norm_groups`` equal groups. The decays are numbers of the architecture, not weights.
    """

    heads: int
    head_dim: int
    decay: tuple[float, ...]  # one a head, in (0, 1)
    scale: float
    norm_eps: float
    norm_groups: int = 1
    norm_shared: bool = False  # the one group goes on in other ranks' heads
    silu: bool = False  # on q, k and v
    qk_norm_eps: float | None = None  # per-head norms of q and k with this eps; None: no such norms
    rope: RopeSpec | None = None
    bias: bool = False  # of the q, k, v projection

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True)
class RgLruSpec:
    """Griffin's recurrent block (De et al. 2024): a short convolution and an RG-LRU, gated by a GeLU branch."""

    width: int
    heads: int  # blocks of the block-diagonal gates
    conv_width: int


@dataclass(frozen=True)
class MambaSpec:
    """Mamba-1 (Gu and Dao 2023). ``step_norm``: RMS norms of dt, B and C, with weights of their own or without."""

    inner: int
    state_size: int
    step_rank: int
    conv_width: int
    conv_bias: bool = True
    bias: bool = False  # of in_proj and out_proj
    step_norm: str | None = None  # or "weighted", "plain"
    norm_eps: float = 1e-6


@dataclass(frozen=True)
class LowRankDecay:
    """decay = sigmoid(W2 W1 x + b)^(1 / normalizer), one a key channel and token    (GLA: Yang et al. 2024)."""

    rank: int
    normalizer: float
    log_minimum: float | None = None  # log decays are not below this


@dataclass(frozen=True)
class KeyDecay:
    """decay = f and key = 1 - f, where f = bound + (1 - bound) sigmoid(W x)    (HGRN2: Qin et al. 2024)."""

    bounded: bool  # bound is a vector of the layer's; otherwise 0


@dataclass(frozen=True)
class LinearAttentionSpec:
    """Linear attention without a delta rule: S = decay * S + phi(k) (x) v, o = S^T phi(q) / sqrt(features).

    decay   None: 1, kernel linear attention.  A number a head: RetNet.  LowRankDecay: GLA.  KeyDecay: HGRN2.
    phi     "identity", "elu" (elu + 1), "relu", "silu", "exp" (of x / sqrt(key_dim), only with ``normalize``), or with
            weights "elementwise_product", "t2r", "hedgehog". KeyDecay's key goes without phi.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    norm_eps: float
    decay: tuple[float, ...] | LowRankDecay | KeyDecay | None = None
    feature_map: str = "identity"
    normalize: bool = False  # divide o by the sum of its weights; only without decay
    rope: RopeSpec | None = None
    output_gate: str | None = None  # "silu" or "sigmoid" of a projection multiplies the normed output
    norm_whole: bool = False  # one norm over all heads' outputs together


@dataclass(frozen=True)
class KdaSpec:
    """Kimi Delta Attention: one decay per key channel and token; q, k, v projected apart, one short convolution over all."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_eps: float
    decay_rank: int | None  # inner width of the decay's projection; None: one matrix
    gate_rank: int | None  # the same for the output gate
    gate_bias: bool = False  # the output gate's (last) projection has a bias
    lower_bound: float | None = None  # log decays lie in [lower_bound, 0]; None: the softplus gate, without a bound
    beta_scale: float = 1.0

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class MlaSpec:
    """Multi-head latent attention: keys and values of all heads are made from one latent of ``rank`` numbers a token.

    A head's key is [its own nope_dim from the latent | rope_dim shared by all heads]; ``rope`` None leaves those unrotated.
    """

    heads: int
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope: RopeSpec | None
    norm_eps: float
    query_rank: int | None = None  # inner width of the query's projection; None: one matrix
    output_gate: str | None = None  # a sigmoid for each "feature" of the output, or one for each "head"


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention with grouped keys and values."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    norm_eps: float
    qk_norm: bool = False  # norm of each head's query and key
    qk_norm_full: bool = False  # norm of all heads' queries together, and of all keys
    output_gate: bool = False  # q_proj also yields a sigmoid gate for each output feature
    bias: bool = False
    output_bias: bool = False  # o_proj has a bias even where the others have none
    window: int | None = None  # each token sees the last ``window`` tokens, itself included


@dataclass(frozen=True)
class MlpSpec:
    """down(activation(gate x) * up x); with a ``limit``, silu(gate x) is cut above it and up x on both sides.

    ``soft_limits`` (a, b) put a tanh(g / a) sigmoid(g) in silu's place and b tanh(u / b) in that of u = up x (SiTU).
    """

    size: int
    limit: float | None = None
    soft_limits: tuple[float, float] | None = None
    activation: str = "silu"  # or "gelu_tanh"
    bias: bool = False


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of MLPs: each token goes through the ``top_k`` experts that score best, and through a shared MLP.

    softmax router: scores are softmax(logits).  sigmoid router: scores are sigmoid(logits).
    Choice: the best ``top_k`` of score (+ ``correction_bias``), only within the ``top_groups`` best of ``groups`` equal
    groups, a group's worth being the sum of its two best. Weights: the scores without the bias, divided by their sum
    where ``renormalize``, times ``scaling``. With a ``latent_size``, the experts work between two projections to and
    from that width, the weighted sum being normed before the second where ``latent_norm_eps`` is not None.
    """

    experts: int
    top_k: int
    size: int
    shared_size: int  # 0: no shared MLP
    router: str = "softmax"  # or "sigmoid"
    renormalize: bool = True
    scaling: float = 1.0
    correction_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    shared_gate: bool = False  # a sigmoid gate of its own scales the shared MLP
    limit: float | None = None  # the experts' MlpSpec.limit
    shared_limit: float | None = None  # the shared MLP's
    soft_limits: tuple[float, float] | None = None  # the experts' and the shared MLP's
    latent_size: int | None = None
    latent_norm_eps: float | None = None
    latent_parts: int = 1  # the projection back reads one of so many parts of the latent


@dataclass(frozen=True)
class ResidualSpec:
    """How a sub-layer f and its norm join the residual stream x.

    before   x + f(norm(x))                       (almost everyone)
    after    x + norm(f(x))                       (OLMo's attention)
    carried  alpha norm(x) + beta f(norm(x))      (MiniMax-Text-01)
    mixed    p + f(norm(mix(blocks, p)))          (attention residuals, Kimi-K3)

    With "mixed", the stream is the sum p of a block's sub-layers and, kept apart, the sums of the blocks before; f reads
    a mean of them, weighted by a softmax. A sub-layer with ``starts_block`` puts p to the blocks and begins a new sum.
    """

    norm: str = "before"
    alpha: float = 1.0
    beta: float = 1.0
    starts_block: bool = False


@dataclass(frozen=True)
class LayerSpec:
    mixer: (
        AttentionSpec | GatedDeltaSpec | KdaSpec | LightningSpec | LinearAttentionSpec | MambaSpec | MlaSpec | RgLruSpec
    )
    mlp: MlpSpec | MoeSpec | None
    mixer_residual: ResidualSpec = ResidualSpec()
    mlp_residual: ResidualSpec = ResidualSpec()


@dataclass(frozen=True)
class ModelSpec:
    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tied: bool  # the output head is the embedding
    max_positions: int
    embedding_scale: float = 1.0
    logit_softcap: float | None = None  # c tanh(logits / c)
    residual_float32: bool = False  # the residual stream is float32 whatever the weights' dtype
    vocab_parts: int = 1  # embedding and head hold one of so many equal parts of the vocabulary's rows

    @property
    def mixed_residual(self) -> bool:
        return any(layer.mixer_residual.norm == "mixed" for layer in self.layers)
