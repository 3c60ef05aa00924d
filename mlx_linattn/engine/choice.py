"""How one request chooses its tokens, beside others in the same batch."""

from __future__ import annotations

import hashlib
import secrets

import mlx.core as mx

from ..errors import RequestError
from ..sampling import make_logits_processors, make_sampler
from .types import Request


class Choice:
    """The sampler and the logits processors of a request, as a batch calls them.

    Token n is drawn with a key made of the request's seed and n alone, so it is the same whatever else is drawn meanwhile.
    """

    def __init__(self, request: Request):
        self.index = 0  # the number of the next token
        self._seed = secrets.randbits(64) if request.seed is None else request.seed
        self._draws = request.sampler is not None or request.temp > 0
        self._sampler = request.sampler or make_sampler(
            request.temp, top_p=request.top_p, min_p=request.min_p, top_k=request.top_k
        )
        self.processors = [
            *make_logits_processors(
                request.logit_bias, request.repetition_penalty,
                presence_penalty=request.presence_penalty, frequency_penalty=request.frequency_penalty,
            ),
            *request.logits_processors,
        ]  # fmt: skip

    def sample(self, logprobs: mx.array) -> mx.array:
        """Token [1] for ``logprobs`` [1, V]."""
        index, self.index = self.index, self.index + 1
        if self._draws:
            digest = hashlib.blake2b(f"{self._seed} {index}".encode(), digest_size=8).digest()
            mx.random.seed(int.from_bytes(digest, "big"))  # of this thread
        token = self._sampler(logprobs)
        if not isinstance(token, mx.array) or token.size != 1:
            raise RequestError(f"the sampler returned {token!r}, expected an array of one token")
        return token.reshape(1)
