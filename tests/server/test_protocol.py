"""OpenAI's interface, request by request, on an engine whose answers are written down."""

import json

import httpx
import pytest
from server.fake import DONE, FakeEngine
from server.running import CHAT, COMPLETIONS, USER, problem, serving

from mlx_linattn.engine.types import Text, TokenLogprob, ToolCall
from mlx_linattn.errors import BusyError, ClosedError, ContextLengthError, MemoryLimitError, RequestError


@pytest.fixture(scope="module")
def engine():
    return FakeEngine()


@pytest.fixture(scope="module")
def client(engine):
    with serving(engine, max_body=20_000) as url, httpx.Client(base_url=url, timeout=20) as client:
        yield client


def ask(client, path=CHAT, **body):
    return client.post(path, json={"messages": USER, **body} if path == CHAT else {"prompt": "hi", **body})


def events(response) -> list:
    """The data of a stream of server-sent events."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block for block in response.text.split("\n\n") if block.startswith("data: ")]
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


# Answers


def test_a_chat_answer(client):
    answer = ask(client).json()
    assert answer["object"] == "chat.completion" and answer["model"] == "fake" and answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    assert choice["message"] == {
        "role": "assistant", "content": "Hello there", "reasoning_content": "hm", "refusal": None
    }  # fmt: skip
    assert answer["usage"] == {
        "prompt_tokens": 12,
        "completion_tokens": 3,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 5},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_chat_stream(client, include_usage):
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks = events(ask(client, stream=True, **options))
    usage = chunks.pop() if include_usage else None
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"} and len({c["id"] for c in chunks}) == 1
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "Hello"},
        {"content": " there"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["stop"]
    if include_usage:
        assert usage["choices"] == [] and usage["usage"]["prompt_tokens_details"]["cached_tokens"] == 5
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)


def test_completions_of_text_and_of_ids(client, engine):
    answer = ask(client, COMPLETIONS, prompt=[5, 6, 7]).json()
    assert answer["object"] == "text_completion" and answer["choices"][0]["text"] == "Hello there"
    assert engine.requests[-1].prompt == [5, 6, 7] and engine.requests[-1].messages is None
    for prompt, means in (("a b", "a b"), (["a b"], "a b"), ([[1, 2]], [1, 2])):
        assert ask(client, COMPLETIONS, prompt=prompt).status_code == 200
        assert engine.requests[-1].prompt == means
    chunks = events(ask(client, COMPLETIONS, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello there"


def test_tool_calls(client, engine, monkeypatch):
    calls = [ToolCall("call_1", "add", '{"a": 1}'), ToolCall("call_2", "sub", "{}")]
    done = type(DONE)("tool_calls", DONE.usage, DONE.timing)
    monkeypatch.setattr(engine, "script", [*calls, done])
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    choice = ask(client, tools=tools).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [
        {"name": "add", "arguments": '{"a": 1}'},
        {"name": "sub", "arguments": "{}"},
    ]
    assert engine.requests[-1].tools == tools
    deltas = [chunk["choices"][0]["delta"] for chunk in events(ask(client, tools=tools, stream=True))]
    assert [(d["tool_calls"][0]["index"], d["tool_calls"][0]["id"]) for d in deltas if "tool_calls" in d] == [
        (0, "call_1"),
        (1, "call_2"),
    ]
    ask(client, tools=tools, tool_choice="none")
    assert engine.requests[-1].tools is None


@pytest.mark.parametrize("stream", [False, True])
def test_one_tool_call_at_a_time(client, engine, monkeypatch, stream):
    monkeypatch.setattr(engine, "script", [ToolCall("a", "add", "{}"), Text("more"), ToolCall("b", "sub", "{}"), DONE])
    answer = ask(client, parallel_tool_calls=False, stream=stream)
    if stream:
        choices = [chunk["choices"][0] for chunk in events(answer)]
        assert [c["delta"]["tool_calls"][0]["id"] for c in choices if "tool_calls" in c["delta"]] == ["a"]
        assert choices[-1]["finish_reason"] == "tool_calls"
    else:
        (choice,) = answer.json()["choices"]
        assert [call["id"] for call in choice["message"]["tool_calls"]] == ["a"]
        assert choice["finish_reason"] == "tool_calls"
    assert engine.streams[-1].cancelled


def test_logprobs(client, engine, monkeypatch):
    token = TokenLogprob(7, "é", -0.5, ((7, "é", -0.5), (8, "x", -1.5)))
    monkeypatch.setattr(engine, "script", [Text("é", (token,)), DONE])
    (content,) = ask(client, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert content["token"] == "é" and content["bytes"] == [195, 169] and content["logprob"] == -0.5
    assert [one["token"] for one in content["top_logprobs"]] == ["é", "x"]
    assert engine.requests[-1].logprobs == 2
    legacy = ask(client, COMPLETIONS, logprobs=2).json()["choices"][0]["logprobs"]
    assert legacy == {
        "tokens": ["é"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"é": -0.5, "x": -1.5}],
        "text_offset": [0],
    }
    assert ask(client).json()["choices"][0]["logprobs"] is None and engine.requests[-1].logprobs is None


def test_every_parameter_reaches_the_engine(client, engine):
    answer = ask(
        client, model="fake", max_completion_tokens=7, temperature=0.5, top_p=0.9, min_p=0.1, top_k=4, seed=3, stop=["a", "b"],
        logit_bias={"5": -100, "6": 1.5}, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=-0.3, user="me", n=1,
        response_format={"type": "text"}, chat_template_kwargs={"enable_thinking": False}, metadata={}, logprobs=False,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    request = engine.requests[-1]
    assert (request.max_tokens, request.temp, request.top_p, request.min_p, request.top_k, request.seed) == (
        7,
        0.5,
        0.9,
        0.1,
        4,
        3,
    )
    assert list(request.stop) == ["a", "b"] and request.logit_bias == {5: -100.0, 6: 1.5}
    assert (request.repetition_penalty, request.presence_penalty, request.frequency_penalty) == (1.1, 0.2, -0.3)
    assert request.template == {"enable_thinking": False}
    ask(client, max_tokens=9, temperature=None, stop="x")
    assert engine.requests[-1].max_tokens == 9 and engine.requests[-1].temp == 0.0
    assert list(engine.requests[-1].stop) == ["x"]


def test_messages_become_what_templates_expect(client, engine):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    ask(
        client,
        messages=[
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [call],
                "refusal": None,
                "annotations": [],
                "audio": None,
            },
            {"role": "tool", "content": "2", "tool_call_id": "c"},
        ],
    )
    system, user, assistant, tool = engine.requests[-1].messages
    assert system == {"role": "system", "content": "be kind"} and user == {"role": "user", "content": "ab"}
    assert assistant["content"] == "" and assistant["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert tool == {"role": "tool", "content": "2", "tool_call_id": "c"}


# Refusals

BAD = [
    ({"n": 2}, "unsupported_parameter", "n"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "unsupported_parameter", "response_format"),
    ({"tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "unsupported_parameter", "tool_choice"),
    ({"functions": [{"name": "f"}]}, "unsupported_parameter", "functions"),
    ({"reasoning_effort": "high"}, "unsupported_parameter", "reasoning_effort"),
    ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools[0]"),
    ({"temperature": 3}, "invalid_value", "temperature"),
    ({"temperature": "hot"}, "invalid_value", "temperature"),
    ({"temperature": True}, "invalid_value", "temperature"),
    ({"top_p": 0}, "invalid_value", "top_p"),
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"max_tokens": 1.5}, "invalid_value", "max_tokens"),
    ({"stop": [""]}, "invalid_value", "stop"),
    ({"stop": ["x"] * 17}, "invalid_value", "stop"),
    ({"logit_bias": {"word": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"1": 101}}, "invalid_value", "logit_bias"),
    ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": "hi"}, "invalid_value", "messages"),
    ({"messages": ["hi"]}, "invalid_value", "messages[0]"),
    ({"messages": [{"role": "king", "content": "hi"}]}, "invalid_value", "messages[0]"),
    ({"messages": [{"role": "user"}]}, "invalid_value", "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "unsupported_parameter", "messages[0].content"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "invalid_value", "messages[0].tool_calls"),
    ({"temprature": 1}, "unknown_parameter", "temprature"),
    ({"model": "gpt-9"}, "model_not_found", "model"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "code", "param"), BAD, ids=[json.dumps(body)[:40] for body, _, _ in BAD])
def test_what_cannot_be_done_is_refused_by_name(client, engine, body, code, param):
    before = len(engine.requests)
    problem(ask(client, **body), 404 if code == "model_not_found" else 400, code, param)
    assert len(engine.requests) == before


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
    ],
)
def test_completions_refuse_too(client, body, param):
    problem(ask(client, COMPLETIONS, **body), 400, param=param)


def test_a_model_without_tools_refuses_them(client, engine, monkeypatch):
    monkeypatch.setattr(engine.tokenizer, "has_tool_calling", False)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert "knows no tools" in problem(ask(client, tools=tools), 400, "unsupported_parameter", "tools")
    assert ask(client, tools=tools, tool_choice="none").status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BusyError("full"), 429, "rate_limit_exceeded"),
        (ClosedError("closed"), 503, "service_unavailable"),
        (ContextLengthError("too long"), 400, "context_length_exceeded"),
        (MemoryLimitError("too large"), 400, "context_length_exceeded"),
        (RequestError("no"), 400, None),
        (ZeroDivisionError("secret"), 500, "internal_error"),
    ],
)
def test_errors_of_the_engine(client, engine, monkeypatch, error, status, code):
    monkeypatch.setattr(engine, "refusal", error)
    for stream in (False, True):
        answer = ask(client, stream=stream)
        assert "secret" not in problem(answer, status, code)
        assert ("retry-after" in answer.headers) == (status == 429)
    monkeypatch.setattr(engine, "refusal", None)
    monkeypatch.setattr(engine, "script", [Text("Hel"), error])
    problem(ask(client), status, code)
    last = [block for block in ask(client, stream=True).text.split("\n\n") if block][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == code
    assert engine.open == 0


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"messages": NaN}', b"[" * 9000, b'{"x": "\\ud800"}', b'{"x": 1' + b"0" * 6000 + b"}"],
    ids=["empty", "cut", "array", "null", "string", "no-utf8", "nan", "deep", "surrogate", "digits"],
)  # fmt: skip
def test_what_is_no_json_object_is_refused(client, data):
    answer = client.post(CHAT, content=data, headers={"Content-Type": "application/json"})
    problem(answer, 400, "invalid_json")


def test_foreign_pages_cannot_post_without_being_asked(client):
    answer = client.post(CHAT, content=json.dumps({"messages": USER}), headers={"Content-Type": "text/plain"})
    problem(answer, 415, "unsupported_content_type")
    answer = client.options(CHAT, headers={"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"})
    assert "access-control-allow-origin" not in answer.headers
    assert client.get("/v1/models", headers={"Host": "evil.example"}).status_code == 400
    assert client.get("/v1/models", headers={"Host": "localhost:8080"}).status_code == 200


def test_large_bodies_are_refused_while_they_are_read(client):
    problem(ask(client, stop="x" * 30_000), 413, "request_too_large")

    def endless():
        for _ in range(40):
            yield b" " * 1000

    answer = client.post(CHAT, content=endless(), headers={"Content-Type": "application/json"})
    problem(answer, 413, "request_too_large")


def test_unknown_routes_and_methods(client):
    problem(client.get("/v1/nothing"), 404, "unknown_url")
    problem(client.get(CHAT), 405)


def test_models_and_health(client, engine, monkeypatch):
    (model,) = client.get("/v1/models").json()["data"]
    assert model["id"] == "fake" and model["object"] == "model"
    assert client.get("/v1/models/fake").json() == model
    problem(client.get("/v1/models/other/one"), 404, "model_not_found")
    assert client.get("/health").json() == {"status": "ok"}

    def closed():
        raise ClosedError("its thread has failed")

    monkeypatch.setattr(engine, "stats", closed)
    problem_body = client.get("/health")
    assert problem_body.status_code == 503 and "failed" in problem_body.json()["error"]["message"]
