"""Random models of published shapes, and stock mlx_lm on the very same arrays."""

import mlx.core as mx
import pytest
from helpers import MLX_LM
from mlx.utils import tree_flatten
from published_configs import kimi, qwen
from tiny_shapes import TINY

from mlx_linattn import cli
from mlx_linattn.bench import parity, peer, run
from mlx_linattn.bench.random_weights import random_model
from mlx_linattn.bench.shapes import SHAPES
from mlx_linattn.errors import ParityError, RequestError
from mlx_linattn.figures import figures
from mlx_linattn.generation import prefill
from mlx_linattn.layout import Take
from mlx_linattn.loading import load_model
from mlx_linattn.state import KVOptions

needs_mlx_lm = pytest.mark.skipif(MLX_LM < (0, 32), reason="equality with stock mlx_lm is held against 0.32 and newer")


def nbytes(model) -> int:
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


@pytest.mark.parametrize(
    ("name", "billions", "like"),
    [
        ("qwen3.5-0.8b", 0.75, qwen(24, 16, 16, 2, 1024, 8)),
        ("qwen3.5-4b", 4.2, qwen(32, 16, 32, 4, 2560, 16)),
        ("qwen3.5-9b", 9.0, qwen(32, 16, 32, 4, 4096, 16)),
        ("qwen3.5-27b", 26.9, qwen(64, 16, 48, 4, 5120, 24)),
        ("qwen3.5-35b-a3b", 34.7, qwen(40, 16, 32, 2, 2048, 16, "qwen3_5_moe")),
        (
            "qwen3-next-80b-a3b",
            79.7,
            qwen(48, 16, 32, 2, 2048, 16, "qwen3_next", vocab_size=151936, num_experts=512, num_experts_per_tok=10),
        ),
        ("kimi-linear", 49.1, kimi()),
    ],
)
def test_a_shape_is_the_published_one(name, billions, like):
    found, published = figures(SHAPES[name]), figures(like)
    assert found.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    for field in ("state_bytes", "kv_bytes_per_token", "layers", "experts", "max_positions"):
        assert getattr(found, field) == getattr(published, field)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("bits", [4, 8, None])
def test_random_weights_weigh_what_info_says(name, bits):
    model = random_model(TINY[name], bits)
    label = "bfloat16" if bits is None else f"{bits}-bit"
    assert nbytes(model) == figures(TINY[name]).weights[label]


def test_random_matrices_neither_shrink_nor_grow_what_they_multiply():
    model = random_model(TINY["mixture"], 4, mx.float32)
    for module, inputs in ((model.layers[0].mlp.switch_mlp.gate_proj, 128), (model.layers[3].mixer.o_proj, 256)):
        numbers = mx.dequantize(module.weight, module.scales, module.biases, module.group_size, module.bits)
        assert numbers.std().item() == pytest.approx(inputs**-0.5, rel=0.02) and abs(numbers.mean().item()) < 0.005
    logits = model(mx.arange(64)[None])
    assert 0.1 < logits.std().item() < 10 and mx.isfinite(logits).all().item()


def test_no_unquantized_copy_of_the_weights_is_made():
    config = TINY["dense, tied"] | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model = random_model(config, 4)
    plain = figures(config).weights["bfloat16"]
    assert mx.get_peak_memory() - before < nbytes(model) + plain / 8


@needs_mlx_lm
@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("bits", [4, None])
def test_mlx_lm_computes_the_same_with_the_same_arrays(name, bits):
    model = random_model(TINY[name], bits, mx.float32)
    mx.clear_cache()
    before = mx.get_active_memory()
    theirs = peer.build(model, TINY[name])
    mx.clear_cache()
    assert mx.get_active_memory() - before < nbytes(model) / 20, "large arrays are not shared"
    assert parity.check_peer(model, theirs, "mlx_lm") < 1e-3


@needs_mlx_lm
def test_a_peer_with_other_weights_is_not_compared_with():
    model = random_model(TINY["dense, tied"], None, mx.float32)
    theirs = peer.build(model, TINY["dense, tied"])
    layer = theirs.language_model.model.layers[1].mlp.down_proj
    layer.weight = -8 * layer.weight
    with pytest.raises(ParityError, match="do not compute the same model"):
        parity.check_peer(model, theirs, "mlx_lm")


def arrays(theirs) -> list:
    """What its recurrent layers hold, and its keys and values up to their length."""
    found = []
    for one in theirs.cache:
        tree = one.keys_and_values() if hasattr(one, "offset") else one.cache
        found += [mx.array(array) for _, array in tree_flatten(tree)]
    return found


@needs_mlx_lm
@pytest.mark.parametrize("options", [KVOptions(), KVOptions(kv_bits=8)])
def test_the_peer_goes_back_to_its_mark_and_can_skip(options):
    model = random_model(TINY["mixture"], None, mx.float32)
    theirs = peer.Peer(peer.build(model, TINY["mixture"]), options, 64)
    ids, nothing = list(range(100)), lambda done: None
    theirs.read(ids, 8, nothing)
    mark = theirs.mark()
    before = arrays(theirs)
    assert len(theirs.write(1, 5)) == 5
    assert any(not mx.array_equal(a, b).item() for a, b in zip(before, arrays(theirs)))
    theirs.back_to(mark)
    assert all(mx.array_equal(a, b).item() for a, b in zip(before, arrays(theirs)))
    assert {one.offset for one in theirs.cache if hasattr(one, "offset")} == {100}
    held = theirs.kv_bytes
    theirs.skip(412, 8)
    assert len(theirs.write(1, 5)) == 5 and theirs.kv_bytes > 1.9 * held
    assert min(one.offset for one in theirs.cache if hasattr(one, "offset")) > 512 + 5


def test_a_skipped_context_is_as_long_as_a_read_one():
    model = random_model(TINY["kimi"], None, mx.float32)
    one, other = model.make_cache(), model.make_cache()
    for state in (one, other):
        state.reserve(600)
    prefill(model, list(range(300)), one)
    prefill(model, list(range(100)), other)
    other.skip(200, 10)
    for state in (one, other):
        prefill(model, [1], state)
    assert one.counts == other.counts == (301,)
    assert [array.shape for array in one.arrays] == [array.shape for array in other.arrays]


def test_what_cannot_be_undone_is_refused():
    joined = mx.arange(12).reshape(6, 2)
    take = Take(("a", "b"), ("concat",))
    parts = peer.undone(take, joined, [(2, 2), (4, 2)])
    assert [part.tolist() for part in parts] == [joined[:2].tolist(), joined[2:].tolist()]
    with pytest.raises(RequestError, match="another layout"):
        peer.undone(Take("a", ("move_axis", 0, 1)), joined, [(2, 6)])
    assert peer.undone(Take("a"), joined, [(6, 2)])[0] is joined


def test_a_family_that_mlx_lm_lacks_is_refused(fixture_folder):
    model, config = load_model(fixture_folder("fla_gla"))
    with pytest.raises(RequestError, match="does not know model_type 'gla'"):
        peer.build(model, config)


@needs_mlx_lm
def test_shape_and_peer_from_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr(parity, "check", lambda *_: 0.0)
    monkeypatch.setattr(parity, "PIECES", (40, 4))
    monkeypatch.setattr(run, "bandwidth", lambda: 1e9)
    monkeypatch.setitem(SHAPES, "qwen3.5-0.8b", TINY["dense, tied"])
    command = "bench --shape qwen3.5-0.8b --vs mlx_lm --contexts 64,256 --read-limit 64 --tokens 4 --dtype float32 --modes exact,quantized-kv"
    assert cli.main(command.split()) == 0
    out, err = capsys.readouterr()
    assert "qwen3.5-0.8b, random weights, 4 bits" in out and "prefill x" in out and out.count("\n  mlx_lm") == 4
    assert "*256" in out and "the context was not read" in out and "GB/s, the copy bandwidth" in out
    assert "exact, 64: " in err and "not run" not in err


def test_an_unknown_shape_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "--shape", "qwen"])
    assert stop.value.code == 2 and "kimi-linear" in capsys.readouterr().err


def test_a_shape_that_does_not_fit_is_refused_before_it_is_made(capsys):
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    assert cli.main(["bench", "--shape", "kimi-linear", "--memory-limit", "20"]) == 2
    assert "kimi-linear: its weights take 27" in capsys.readouterr().err
    assert mx.get_peak_memory() - before < 2**20
