"""Stock mlx_lm's own code on models that it does not know: the tokens are ours."""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
import word_tokenizer
from helpers import FIXTURES, assert_close, golden, needs_mlx_lm, tolerance

import mlx_linattn as la
from mlx_linattn.convert import convert
from mlx_linattn.errors import CheckpointError
from mlx_linattn.interop import register
from mlx_linattn.interop.door import mlx_lm
from mlx_linattn.interop.stock import Model, ModelArgs
from mlx_linattn.loading import load_model

FAMILIES = [
    "fla_gla",
    "fla_hgrn2",
    "fla_kda",
    "fla_linear_attn",
    "fla_gated_deltanet_hybrid",
    "minimax_text_01",
]
HYBRIDS = ["fla_gated_deltanet_hybrid", "minimax_text_01"]
PROMPTS = [[(7 * i + row) % 80 + 8 for i in range(length)] for row, length in enumerate((9, 1, 23, 14, 2))]
LENGTHS = [12, 7, 9, 3, 16]


@pytest.fixture
def registered(monkeypatch):
    """register(), undone after the test."""
    utils = mlx_lm("utils")
    monkeypatch.setattr(utils, "MODEL_REMAPPING", dict(utils.MODEL_REMAPPING))
    return register()


@pytest.fixture
def both(registered, fixture_folder):
    """(mlx_lm's model, ours) of a fixture as published."""

    def load(name):
        folder = fixture_folder(name)
        return mlx_lm("utils").load_model(folder)[0], load_model(folder)[0]

    return load


def ours(model, prompt, n, **options) -> list[int]:
    return [token for token, _ in la.generate_step(prompt, model, max_tokens=n, **options)]


def theirs(model, prompt, n, **options) -> list[int]:
    stream = mlx_lm("generate").generate_step(mx.array(prompt), model, max_tokens=n, **options)
    return [int(token) for token, _ in stream]


def run(generator, uids) -> tuple[dict, dict]:
    """Tokens and final caches of a BatchGenerator by uid."""
    tokens, caches = {uid: [] for uid in uids}, {}
    while len(caches) < len(uids):
        for response in generator.next()[1]:
            tokens.setdefault(response.uid, []).append(response.token)
            if response.finish_reason:
                caches[response.uid] = response.prompt_cache
    return tokens, caches


def test_only_types_that_mlx_lm_lacks_are_registered(registered, fixture_folder):
    assert {"minimax_text_01", "gla", "hgrn2", "retnet", "kda"} <= set(registered)
    assert not {"minimax", "qwen3_next", "qwen3_5", "qwen3_5_text", "mamba", "falcon_mamba"} & set(registered)
    assert register() == registered
    model, _ = mlx_lm("utils").load_model(fixture_folder("mamba"))
    assert type(model).__module__ == "mlx_lm.models.mamba"


@pytest.mark.parametrize("name", FAMILIES)
def test_stock_generate_gives_our_tokens(name, both):
    stock, own = both(name)
    assert_close(stock(mx.array(golden(name)["input_ids"])), golden(name)["logits_prefill"], tolerance(name), name)
    assert theirs(stock, PROMPTS[2], 10, prefill_step_size=8) == ours(own, PROMPTS[2], 10)


@pytest.mark.parametrize("name", ["fla_kda", "fla_gated_deltanet_hybrid"])
def test_rows_of_the_stock_batch_generator_are_what_they_are_alone(name, both):
    """More prompts than rows, read a few tokens at a time, and answers that end at different moments."""
    stock, own = both(name)
    generator = mlx_lm("generate").BatchGenerator(
        stock, completion_batch_size=3, prefill_batch_size=2, prefill_step_size=5
    )
    uids = generator.insert(PROMPTS, LENGTHS)
    tokens, caches = run(generator, uids)
    for uid, prompt, n in zip(uids, PROMPTS, LENGTHS):
        assert tokens[uid] == ours(own, prompt, n), f"prompt of {len(prompt)} tokens"
        assert caches[uid][0].model_state.counts == (len(prompt) + n,)
    # Every answer goes on, beside a prompt without a past.
    more = [[11, 12, 13], [14], [15, 16], [17, 18], [19]]
    again = generator.insert([*more, PROMPTS[0]], [5] * 6, caches=[*(caches[uid] for uid in uids), None])
    later, _ = run(generator, again)
    for uid, first, prompt, next_ in zip(again, uids, PROMPTS, more):
        assert later[uid] == ours(own, [*prompt, *tokens[first], *next_], 5)
    assert later[again[-1]] == ours(own, PROMPTS[0], 5)


def test_a_padded_prompt_can_be_read_in_pieces(both):
    stock, own = both("minimax_text_01")
    rows = stock.make_cache()[0].merge([stock.make_cache()[0] for _ in range(3)])
    lengths, ids = [9, 1, 6], mx.array([prompt[:9] + [0] * (9 - len(prompt[:9])) for prompt in PROMPTS[:3]])
    rows.prepare(lengths=lengths, right_padding=[0, 8, 3])
    for first in (0, 4, 8):
        stock(ids[:, first : first + 4], [rows])
    rows.finalize()
    assert rows.model_state.counts == tuple(lengths)
    logits = stock(mx.array([[9]] * 3), [rows])
    for row, (length, prompt) in enumerate(zip(lengths, PROMPTS)):
        assert_close(logits[row, 0], own(mx.array([[*prompt[:length], 9]]))[0, -1], 1e-4, f"row {row}")


def test_rows_can_be_taken_out_at_any_moment(both):
    stock, own = both("fla_gated_deltanet_hybrid")
    generator = mlx_lm("generate").BatchGenerator(stock, completion_batch_size=4, prefill_step_size=4)
    uids = generator.insert(PROMPTS[:4], [20] * 4)
    for _ in range(9):
        generator.next()
    taken = generator.remove([uids[0], uids[2]], return_prompt_caches=True)
    rest = [uids[1], uids[3]]
    tokens, _ = run(generator, rest)
    for uid, prompt in zip(rest, (PROMPTS[1], PROMPTS[3])):
        assert tokens[uid] == ours(own, prompt, 20)[-len(tokens[uid]) :]
    for uid, prompt in ((uids[0], PROMPTS[0]), (uids[2], PROMPTS[2])):
        cache, held = taken[uid]
        assert held[: len(prompt)] == prompt
        assert cache[0].model_state.counts == (len(held),)
        assert theirs(stock, [10, 20], 4, prompt_cache=cache) == ours(own, [*held, 10, 20], 4)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_prompt_cache_file_goes_on(name, both, tmp_path):
    stock, own = both(name)
    module = mlx_lm("models.cache")
    cache = module.make_prompt_cache(stock)
    theirs(stock, PROMPTS[2], 1, prompt_cache=cache)
    held = cache[0].model_state.counts[0]
    module.save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    loaded = module.load_prompt_cache(str(tmp_path / "cache.safetensors"))
    fed = [*PROMPTS[2], *ours(own, PROMPTS[2], 2)][:held]
    assert theirs(stock, [10, 20], 6, prompt_cache=loaded) == ours(own, [*fed, 10, 20], 6)


def test_kv_bits_quantize_the_cache():
    config = json.loads((FIXTURES / "minimax_text_01" / "config.json").read_text()) | {"head_dim": 32}
    stock = Model(ModelArgs(config))
    logits = {}
    for bits in (None, 8):
        cache = stock.make_cache()
        mx.eval(stock(mx.array([PROMPTS[2]]), cache))
        full = cache[0].nbytes
        if bits:
            mlx_lm("generate").maybe_quantize_kv_cache(cache, 0, 32, bits)
            assert cache[0].nbytes < full
        rows = cache[0].merge([cache[0], cache[0].extract(0)])
        logits[bits] = np.array(stock(mx.array([[9], [9]]), [rows]))
    difference = np.abs(logits[None] - logits[8]).max()
    assert 0 < difference < 0.05 * logits[None].std()


def test_what_needs_a_cache_that_can_be_cut_is_refused(both):
    stock, _ = both("fla_gla")
    generate = mlx_lm("generate").speculative_generate_step
    with pytest.raises(ValueError, match="trimmable prompt cache"):
        next(generate(mx.array(PROMPTS[0]), stock, stock))


def test_every_tensor_of_a_published_checkpoint_is_used(registered, fixture_folder):
    folder = fixture_folder("fla_gla")
    mx.save_safetensors(str(folder / "model-extra.safetensors"), {"model.layers.0.attn.more": mx.zeros((2,))})
    with pytest.raises(CheckpointError, match=r"attn\.more.*used by nothing"):
        mlx_lm("utils").load_model(folder)


@needs_mlx_lm(0, 32)
@pytest.mark.parametrize("name", ["fla_gla", "minimax_hf"])
def test_a_converted_folder_needs_no_trust(name, registered, fixture_folder, tmp_path):
    convert(fixture_folder(name), tmp_path / "mlx", quantize=True, q_bits=6, q_group_size=32)
    stock, _ = mlx_lm("utils").load_model(tmp_path / "mlx", model_config={"model_file": None})
    assert theirs(stock, PROMPTS[0], 6) == ours(load_model(tmp_path / "mlx")[0], PROMPTS[0], 6)


SERVER = "from mlx_linattn.interop import register; register(); from mlx_lm.server import main; main()"


@pytest.fixture
def stock_server(fixture_folder):
    """URL and folder of mlx_lm's server on a model that mlx_lm does not know."""
    folder = fixture_folder("fla_gated_deltanet_hybrid")
    word_tokenizer.write(folder, 88)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", SERVER, "--model", str(folder), "--port", str(port), "--max-tokens", "12"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/v1/chat/completions", folder
    finally:
        process.kill()
        process.communicate()


def test_the_stock_server_serves_several_at_a_time_and_remembers(stock_server):
    url, folder = stock_server
    model, tokenizer = la.load(folder)

    def ask(messages) -> dict:
        body = json.dumps({"messages": messages}).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def text(messages) -> str:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return la.generate(model, tokenizer, ids, max_tokens=12)

    asked = [[{"role": "user", "content": " ".join(f"w{i}" for i in prompt)}] for prompt in PROMPTS[:4]]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, asked))
    said = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert said == [text(messages) for messages in asked]
    longer = [*asked[2], {"role": "assistant", "content": said[2]}, {"role": "user", "content": "w9 w10"}]
    answer = ask(longer)
    assert answer["choices"][0]["message"]["content"] == text(longer)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
