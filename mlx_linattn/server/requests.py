"""From the JSON of a request to the engine's Request. What is not understood is refused, not ignored."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ..engine.types import Request
from .problems import ApiError, invalid, unsupported

# Fields that say nothing about the answer's text.
IGNORED = {
    "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user",
}  # fmt: skip
# Fields that OpenAI's interface has, the values that ask for nothing, and why others are refused.
UNSUPPORTED = {
    "n": ((1,), "one answer for a request; ask again for another"),
    "best_of": ((1,), "one answer for a request"),
    "response_format": (({"type": "text"},), "answers are text; a JSON format or schema cannot be enforced"),
    "modalities": ((["text"],), "answers are text"),
    "audio": ((), "answers are text"),
    "prediction": ((), "predicted outputs are not used"),
    "web_search_options": ((), "there is no web search"),
    "functions": (([],), "use tools"),
    "function_call": (("none", "auto"), "use tools and tool_choice"),
    "reasoning_effort": ((), "say it in the chat template's words, in chat_template_kwargs"),
    "verbosity": ((), "say it in a message"),
    "echo": ((False,), "the prompt is not repeated"),
    "suffix": (("",), "text cannot be filled in"),
}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MOST_STOPS, MOST_LOGPROBS = 16, 20


@dataclass(frozen=True)
class Defaults:
    """What a request gets that does not say otherwise; names as in :class:`Request`."""

    max_tokens: int = 4096
    temp: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    top_k: int = 0


@dataclass
class Asked:
    """A request as the server understood it. ``tool_calls_at_once``: whether more than one may be in an answer."""

    request: Request
    model: str | None
    stream: bool = False
    include_usage: bool = False
    tool_calls_at_once: bool = True


@dataclass
class Body:
    """The object that was sent, read field by field; at the end none may be left."""

    values: dict[str, Any]
    read: set[str] = field(default_factory=set)

    def take(self, name: str, *kinds: type, default: Any = None) -> Any:
        """The field ``name``, of one of these types; ``default`` where it is absent or null."""
        self.read.add(name)
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join(NAMES[kind] for kind in kinds)
            raise invalid(name, f"is {NAMES.get(type(value), 'null')}, expected {expected}")
        return value

    def number(self, name: str, low: float, high: float, default: Any = None) -> Any:
        value = self.take(name, int, float, default=default)
        if value is not None and value is not default and not low <= value <= high:
            raise invalid(name, f"is {value}, expected {low:g} to {high:g}")
        return value

    def integer(self, name: str, low: int, high: int, default: Any = None) -> Any:
        value = self.take(name, int, default=default)
        if value is not None and value is not default and not low <= value <= high:
            raise invalid(name, f"is {value}, expected {low} to {high}")
        return value

    def finish(self) -> None:
        """Raises ApiError for a field that asks for something this server does not do, or that nobody knows."""
        for name, (harmless, why) in UNSUPPORTED.items():
            if self.take(name, *NAMES) is not None and self.values[name] not in harmless:
                raise unsupported(name, f"{json.dumps(self.values[name])[:100]} is not supported: {why}")
        if unknown := self.values.keys() - self.read - IGNORED:
            name = min(unknown)
            raise ApiError(400, f"{name}: is no parameter of this request", "unknown_parameter", name)


NAMES = {
    str: "a string", int: "an integer", float: "a number", bool: "a boolean", list: "an array", dict: "an object"
}  # fmt: skip
LARGEST = 1 << 31


def chat(values: dict, defaults: Defaults, has_tools: bool) -> Asked:
    """The body of ``/v1/chat/completions``. ``has_tools``: whether the model's chat template knows tools."""
    body = Body(values)
    asked = _common(body, defaults)
    request = asked.request
    request.messages = _messages(body.take("messages", list, default=[]))
    request.template = body.take("chat_template_kwargs", dict, default={})
    newer = body.integer("max_completion_tokens", 1, LARGEST)
    request.max_tokens = newer if newer is not None else request.max_tokens
    tools, choice = body.take("tools", list, default=[]), body.take("tool_choice", str, dict, default="auto")
    if choice not in ("none", "auto"):
        raise unsupported("tool_choice", "a call cannot be forced: use 'auto' or 'none'")
    request.tools = _tools(tools) if tools and choice == "auto" else None
    if request.tools and not has_tools:
        raise unsupported("tools", "this model's chat template knows no tools")
    asked.tool_calls_at_once = body.take("parallel_tool_calls", bool, default=True)
    top = body.integer("top_logprobs", 0, MOST_LOGPROBS)
    if body.take("logprobs", bool, default=False):
        request.logprobs = top or 0
    elif top:
        raise invalid("top_logprobs", "needs logprobs to be true")
    body.finish()
    return asked


def completion(values: dict, defaults: Defaults) -> Asked:
    """The body of ``/v1/completions``."""
    body = Body(values)
    asked = _common(body, defaults)
    asked.request.prompt = _prompt(body.take("prompt", str, list))
    asked.request.logprobs = body.integer("logprobs", 0, MOST_LOGPROBS)
    body.finish()
    return asked


def _common(body: Body, defaults: Defaults) -> Asked:
    stream = body.take("stream", bool, default=False)
    options = body.take("stream_options", dict, default={})
    if options and not stream:
        raise invalid("stream_options", "is for requests with stream set to true")
    usage = options.get("include_usage", False)
    if not isinstance(usage, bool) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise invalid("stream_options", 'expected {"include_usage": true or false}')
    top_p = body.number("top_p", 0, 1, defaults.top_p)
    if top_p == 0 and body.values.get("top_p") is not None:
        raise invalid("top_p", "is 0, expected more: use temperature 0 for the likeliest token")
    penalty = body.number("repetition_penalty", 0, 10)
    request = Request(
        max_tokens=body.integer("max_tokens", 1, LARGEST, defaults.max_tokens),
        stop=_stop(body.take("stop", str, list, default=[])),
        temp=body.number("temperature", 0, 2, defaults.temp),
        top_p=top_p,
        min_p=body.number("min_p", 0, 1, defaults.min_p),
        top_k=body.integer("top_k", 0, LARGEST, defaults.top_k),
        logit_bias=_bias(body.take("logit_bias", dict)),
        repetition_penalty=None if penalty in (None, 1) else penalty,
        presence_penalty=body.number("presence_penalty", -2, 2) or None,
        frequency_penalty=body.number("frequency_penalty", -2, 2) or None,
        seed=body.integer("seed", -(1 << 63), (1 << 64) - 1),
    )
    return Asked(request, body.take("model", str), stream, usage)


def _stop(value: str | list) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if len(stops) > MOST_STOPS or not all(isinstance(stop, str) and stop for stop in stops):
        raise invalid("stop", f"expected a string that is not empty, or up to {MOST_STOPS} of them")
    return stops


def _bias(value: dict | None) -> dict[int, float] | None:
    try:
        bias = {int(token): float(number) for token, number in (value or {}).items()}
    except (TypeError, ValueError):
        raise invalid("logit_bias", "expected an object of token ids and numbers") from None
    if not all(-100 <= number <= 100 for number in bias.values()):
        raise invalid("logit_bias", "expected numbers between -100 and 100")
    return bias or None


def _prompt(value: str | list | None) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        (value,) = value
    if isinstance(value, list) and any(isinstance(part, (str, list)) for part in value):
        raise unsupported("prompt", "one prompt for a request; send others in requests of their own")
    if not value:
        raise invalid("prompt", "is missing or empty")
    if isinstance(value, list) and not all(isinstance(token, int) and not isinstance(token, bool) for token in value):
        raise invalid("prompt", "expected a string, or an array of token ids")
    return value


def _tools(tools: list) -> list[dict]:
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise unsupported(f"tools[{i}]", "only tools of type 'function' are supported")
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise invalid(f"tools[{i}]", "expected a function with a name")
    return tools


def _messages(messages: list) -> list[dict]:
    if not messages:
        raise invalid("messages", "is missing or empty: send at least a user's message")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _message(where: str, message: Any) -> dict:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise invalid(where, f"expected an object with a role, one of {', '.join(ROLES)}")
    for name in ("function_call", "audio"):
        if message.get(name) is not None:
            raise unsupported(f"{where}.{name}", "is not supported")
    calls = message.get("tool_calls")
    result = {
        "role": ROLES[message["role"]],
        "content": _content(f"{where}.content", message.get("content"), bool(calls)),
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = message.get(name)
        if value is not None and not isinstance(value, str):
            raise invalid(f"{where}.{name}", "expected a string")
        result |= {name: value} if value else {}
    if calls:
        result["tool_calls"] = _calls(f"{where}.tool_calls", calls)
    return result


def _content(where: str, content: Any, may_lack: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_lack:
        return ""
    if not isinstance(content, list) or not content:
        raise invalid(where, "expected a string, or an array of text parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise unsupported(where, f"a part of type {kind!r} cannot be read: this server reads text only")
        if not isinstance(part.get("text"), str):
            raise invalid(where, "a text part has no text")
    return "".join(part["text"] for part in content)


def _calls(where: str, calls: Any) -> list[dict]:
    """Tool calls of an earlier answer, with their arguments as the objects that chat templates expect."""
    result = []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(where, "expected an array of objects with a function")
        arguments = function.get("arguments") or "{}"
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise invalid(where, f"the arguments of {function['name']!r} are not a JSON object")
        result.append({**call, "function": {**function, "arguments": arguments}})
    return result
