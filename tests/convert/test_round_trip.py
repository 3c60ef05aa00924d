"""Whatever the sizes and the spelling: MLX layout, published, then converted, is MLX layout again, bit for bit."""

import json
import tempfile
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from seeded_fixtures import write_safetensors

from mlx_linattn.convert import convert as convert_and_verify
from mlx_linattn.layout import Take
from mlx_linattn.weights import transform

convert = partial(convert_and_verify, verify=False)

sizes = st.integers(1, 4)


@st.composite
def configs(draw):
    key_heads, key_dim, value_dim = draw(sizes), draw(sizes) * 2, draw(sizes) * 2
    experts = draw(st.sampled_from([0, 2, 3]))
    return {
        "model_type": draw(st.sampled_from(["qwen3_next", "qwen3_5_moe_text" if experts else "qwen3_5_text"])),
        "hidden_size": draw(sizes) * 8, "intermediate_size": draw(sizes) * 4, "vocab_size": 11,
        "num_hidden_layers": 2, "layer_types": draw(st.permutations(["linear_attention", "full_attention"])),
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw(st.integers(1, 3)), "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim, "num_experts": experts, "num_experts_per_tok": 1,
        "moe_intermediate_size": draw(sizes) * 2, "shared_expert_intermediate_size": draw(sizes) * 2,
        "max_position_embeddings": 64, "tie_word_embeddings": draw(st.booleans()), "dtype": "float32",
    }  # fmt: skip


def mlx_shapes(c) -> dict[str, tuple[int, ...]]:
    """Every tensor of MLX layout of such a model."""
    H, keys = c["hidden_size"], c["linear_num_key_heads"] * c["linear_key_head_dim"]
    heads, values = c["linear_num_value_heads"], c["linear_num_value_heads"] * c["linear_value_head_dim"]
    shapes = {"model.embed_tokens.weight": (11, H), "model.norm.weight": (H,)}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (11, H)
    for i, kind in enumerate(c["layer_types"]):
        at = f"model.layers.{i}."
        shapes |= {f"{at}input_layernorm.weight": (H,), f"{at}post_attention_layernorm.weight": (H,)}
        if kind == "full_attention":
            rows = {
                "q_proj.weight": (32, H),
                "k_proj.weight": (8, H),
                "v_proj.weight": (8, H),
                "o_proj.weight": (H, 16),
            }
            rows |= {"q_norm.weight": (8,), "k_norm.weight": (8,)}
            shapes |= {f"{at}self_attn.{name}": shape for name, shape in rows.items()}
        else:
            rows = {"A_log": (heads,), "dt_bias": (heads,), "norm.weight": (c["linear_value_head_dim"],)}
            rows |= {"conv1d.weight": (2 * keys + values, 4, 1), "out_proj.weight": (H, values)}
            if c["model_type"] == "qwen3_next":
                rows |= {"in_proj_qkvz.weight": (2 * keys + 2 * values, H), "in_proj_ba.weight": (2 * heads, H)}
            else:
                rows |= {"in_proj_qkv.weight": (2 * keys + values, H), "in_proj_z.weight": (values, H)}
                rows |= {"in_proj_a.weight": (heads, H), "in_proj_b.weight": (heads, H)}
            shapes |= {f"{at}linear_attn.{name}": shape for name, shape in rows.items()}
        E, size = c["num_experts"], c["moe_intermediate_size"]
        mlps = {"": ((), c["intermediate_size"])}
        if E:
            mlps = {"switch_mlp.": ((E,), size), "shared_expert.": ((), c["shared_expert_intermediate_size"])}
            shapes |= {f"{at}mlp.gate.weight": (E, H), f"{at}mlp.shared_expert_gate.weight": (1, H)}
        for part, (stack, inner) in mlps.items():
            shapes |= {f"{at}mlp.{part}{name}_proj.weight": (*stack, inner, H) for name in ("gate", "up")}
            shapes[f"{at}mlp.{part}down_proj.weight"] = (*stack, H, inner)
    return shapes


def publish(tensors, prefix: str, packed: bool) -> dict[str, np.ndarray]:
    """The published spelling of tensors in MLX layout, written down independently of the library's rules."""
    result = {}
    for name, array in tensors.items():
        if name.endswith("norm.weight") and "linear_attn" not in name:
            array = array - np.float32(1)
        if name.endswith("conv1d.weight"):
            array = array.transpose(0, 2, 1)
        if ".switch_mlp." not in name:
            result[name.replace("model.", prefix, 1) if name.startswith("model.") else name] = array
            continue
        base, kind = name.replace("model.", prefix, 1).removesuffix(".weight").split(".switch_mlp.")
        if not packed:
            result |= {f"{base}.experts.{e}.{kind}.weight": array[e] for e in range(len(array))}
        elif kind == "down_proj":
            result[f"{base}.experts.down_proj"] = array
        elif kind == "gate_proj":
            up = tensors[name.replace("gate_proj", "up_proj")]
            result[f"{base}.experts.gate_up_proj"] = np.concatenate([array, up], axis=1)
    return result


@settings(max_examples=40, deadline=None)
@given(configs(), st.booleans(), st.booleans(), st.integers(0, 2**32 - 1))
def test_published_then_converted_is_what_it_was(config, packed, long_prefix, seed):
    rng = np.random.default_rng(seed)
    # Multiples of 1/64 between 1 and 2, so that taking 1 off and adding it again is exact.
    tensors = {n: (1 + rng.integers(0, 64, s) / 64).astype(np.float32) for n, s in mlx_shapes(config).items()}
    prefix = "model.language_model." if long_prefix and config["model_type"] != "qwen3_next" else "model."
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "published", Path(folder) / "mlx"
        source.mkdir()
        (source / "config.json").write_text(json.dumps(config))
        published = publish(tensors, prefix, packed)
        write_safetensors(source / "model.safetensors", {name: ("F32", array) for name, array in published.items()})
        convert(source, target)
        got = mx.load(str(target / "model.safetensors"))
        outer = "" if config["model_type"] == "qwen3_next" else "language_model."
        assert got.keys() == {outer + name for name in tensors}
        for name, array in tensors.items():
            assert np.array_equal(np.array(got[outer + name]), array), name


@given(sizes, st.lists(sizes, min_size=1, max_size=4), st.data())
@settings(max_examples=50, deadline=None)
def test_ungroup_undoes_interleaving(groups, widths, data):
    order = tuple(data.draw(st.permutations(range(len(widths)))))
    pieces = [np.random.default_rng(i).normal(size=(groups, width, 3)) for i, width in enumerate(widths)]
    interleaved = np.concatenate(pieces, axis=1).reshape(-1, 3).astype(np.float32)
    take = Take("x", ("ungroup", groups, tuple(widths), order))
    want = np.concatenate([pieces[i].reshape(-1, 3) for i in order]).astype(np.float32)
    assert np.array_equal(np.array(transform.apply(take, [mx.array(interleaved)])), want)


@given(sizes, sizes, st.integers(0, 1))
@settings(max_examples=30, deadline=None)
def test_parts_of_stacks_are_stacks_of_parts(experts, rows, index):
    arrays = [mx.random.normal((2 * rows, 3)) for _ in range(experts)]
    whole = transform.apply(Take("x", ("stack",), ("part", -2, index, 2)), arrays)
    halves = [array[index * rows : (index + 1) * rows] for array in arrays]
    assert mx.array_equal(whole, mx.stack(halves))
