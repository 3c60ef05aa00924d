"""Generating tokens and text, with mlx_lm's names, argument order and response fields."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from . import budget
from .errors import RequestError
from .model import Model
from .state import KVOptions, ModelState

PREFILL_STEP = 2048


@dataclass
class GenerationResponse:
    """One step of :func:`stream_generate`; mlx_lm's fields, then ours.

    text: the next piece of text, possibly empty.  token: its last token.  logprobs: [V].  from_draft: always False.
    prompt_tokens, prompt_tps, generation_tokens, generation_tps: counts, and tokens a second.
    peak_memory: of the process so far, in GB.  finish_reason: "stop", "length" or None while it goes on.
    reused_tokens, prefilled_tokens: of the context, those that were in the state already, and those that had to be read.
    """

    text: str
    token: int
    logprobs: mx.array
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None = None
    reused_tokens: int = 0
    prefilled_tokens: int = 0


def prefill(
    model: Model,
    ids: Sequence[int],
    state: ModelState,
    step: int = PREFILL_STEP,
    progress: Callable[[int, int], None] | None = None,
) -> mx.array:
    """Read ``ids`` into ``state`` piece by piece; returns the logits [1, V] after the last one.

    Temporary memory depends on ``step``, not on the number of ids. ``progress(done, total)`` is called after each piece.
    """
    total = len(ids)
    for start in range(0, total, step):
        if progress:
            progress(start, total)
        hidden = model.hidden_states(mx.array(ids[start : start + step])[None], state)
        if start + step < total:
            mx.eval(state.arrays)
            mx.clear_cache()
    logits = model.logits(hidden[:, -1])
    mx.eval(logits, state.arrays)
    if progress:
        progress(total, total)
    return logits


def begin(made, state: ModelState, before) -> None:
    """Let the device begin a token: what it makes, and the state behind it. ``before``: what the token before it makes.

    So the device never waits for Python, but where that would cost more (:attr:`ModelState.must_wait`).
    """
    if state.must_wait:
        mx.eval(before)
    mx.async_eval(made, state.arrays)


def generate_step(
    prompt,
    model: Model,
    *,
    max_tokens: int = 256,
    sampler: Callable[[mx.array], mx.array] | None = None,
    logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]] | None = None,
    prompt_cache: ModelState | None = None,
    prefill_step_size: int | None = None,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    max_kv_size: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 0,
    memory_limit: float | None = None,
) -> Iterator[tuple[int, mx.array]]:
    """Yield (token, logprobs [V]) one after the other; ``max_tokens`` -1 never ends.

    Args:
        prompt_cache: the state to go on from; a fresh one by default.
        prefill_step_size: tokens of the prompt to read at a time; by default as many, up to 2048, as memory allows.
        max_kv_size, kv_bits, kv_group_size, quantized_kv_start: how attention layers keep their context (:class:`KVOptions`).
        memory_limit: bytes; a prompt that would need more raises MemoryLimitError. By default the device's working set;
            ``float("inf")`` never refuses.

    When a token is yielded, ``prompt_cache`` holds the prompt and every token yielded so far, this one included:
    stopping at any yield leaves state and tokens in agreement.
    """
    ids = prompt.tolist() if isinstance(prompt, mx.array) else list(prompt)
    if not ids:
        raise RequestError("the prompt is empty: give at least one token")
    if max_tokens == 0:
        raise RequestError("max_tokens is 0: give a positive number, or -1 for no limit")
    if prefill_step_size is not None and prefill_step_size < 1:
        raise RequestError(f"prefill_step_size is {prefill_step_size}, expected at least 1")
    options = KVOptions(max_kv_size, kv_bits, kv_group_size, quantized_kv_start)
    state = model.make_cache(options) if prompt_cache is None else prompt_cache
    if state.options != options and options != KVOptions():
        if state.counts:
            raise RequestError("prompt_cache holds tokens that were stored in another way: make it with these options")
        state.adopt(options)
    end = state.offset + len(ids) + max(max_tokens, 0)
    step = budget.prefill_step(model, state, len(ids), memory_limit, prefill_step_size, max(max_tokens, 0))
    state.reserve(state.offset + len(ids))
    history = mx.array(ids) if logits_processors else None

    def choose(logits):
        for process in logits_processors or ():
            logits = process(history, logits)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        token = sampler(logprobs) if sampler else mx.argmax(logprobs, axis=-1)
        return token, logprobs[0]

    token, logprobs = choose(prefill(model, ids, state, step, prompt_progress_callback))
    mx.async_eval(token, logprobs)
    count = 0
    while count != max_tokens:
        # The next step is queued before this token is looked at, so that the device never waits for Python.
        if history is not None:
            history = mx.concatenate([history, token])
        following = choose(model(token[:, None], state)[:, -1])
        begin(following, state, token)
        yield token.item(), logprobs
        token, logprobs = following
        count += 1
        if count % 256 == 0:
            mx.clear_cache()
            if state.offset + 256 > end:
                budget.prefill_step(model, state, 256, memory_limit, 1)


def stream_generate(
    model: Model,
    tokenizer,
    prompt,
    max_tokens: int = 256,
    draft_model: Any = None,
    *,
    written: Sequence[int] = (),
    **kwargs,
) -> Iterator[GenerationResponse]:
    """Generate text for ``prompt`` (a string, or token ids), a response for each token. Options as in :func:`generate_step`.

    ``written``: the tokens of a text that is continued; without them the first piece would lack a space that it begins with.
    """
    if draft_model is not None:
        raise RequestError("draft_model: speculative decoding is not supported")
    ids = encode(tokenizer, prompt)
    detokenizer = tokenizer.detokenizer
    for token in written:
        detokenizer.add_token(token)
    _ = detokenizer.last_segment  # reading it says that it was shown
    ends = tokenizer.eos_token_ids
    cache = kwargs.get("prompt_cache")
    reused = 0 if cache is None else cache.offset
    began = time.perf_counter()
    prompt_time = 0.0
    response = None
    for count, (token, logprobs) in enumerate(generate_step(ids, model, max_tokens=max_tokens, **kwargs), start=1):
        if count == 1:
            now = time.perf_counter()
            prompt_time, began = now - began, now
        reason = "stop" if token in ends else "length" if count == max_tokens else None
        if reason != "stop":
            detokenizer.add_token(token)
        if reason:
            detokenizer.finalize()
        response = GenerationResponse(
            text=detokenizer.last_segment,
            token=token,
            logprobs=logprobs,
            from_draft=False,
            prompt_tokens=len(ids),
            prompt_tps=len(ids) / max(prompt_time, 1e-9),
            generation_tokens=count,
            generation_tps=count / max(time.perf_counter() - began, 1e-9),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=reason,
            reused_tokens=reused,
            prefilled_tokens=len(ids),
        )
        yield response
        if reason:
            return


def generate(model: Model, tokenizer, prompt, verbose: bool = False, **kwargs) -> str:
    """The whole text that :func:`stream_generate` yields; with ``verbose`` it is printed as it comes, with its speed."""
    pieces = []
    response = None
    if verbose:
        print("=" * 10)
    for response in stream_generate(model, tokenizer, prompt, **kwargs):
        pieces.append(response.text)
        if verbose:
            print(response.text, end="", flush=True)
    if verbose and response:
        print("\n" + "=" * 10)
        print(f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec")
        print(f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec")
        print(f"Peak memory: {response.peak_memory:.3f} GB")
    return "".join(pieces)


def encode(tokenizer, prompt) -> list[int]:
    """Token ids of a prompt; ids pass as they are. A beginning-of-text token is added unless the text has it."""
    if isinstance(prompt, mx.array):
        return prompt.tolist()
    if not isinstance(prompt, str):
        return list(prompt)
    begins = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
    return tokenizer.encode(prompt, add_special_tokens=begins)
