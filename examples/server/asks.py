"""Reads and checks a request's body, and refuses by name what the server cannot do."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pagedkv as pk
from examples.llama_numpy.chat import SYSTEM
from examples.llama_numpy.errors import LlamaError, PromptTooLong
from examples.llama_numpy.sampling import Sampling
from examples.server.engine import Engine

MOST_SAMPLES, MOST_STOPS, LONGEST_STOP = 16, 4, 256
COMPLETION_TOKENS = 16  # where a completion does not say how many, as at OpenAI
COMMON = {"model", "stream", "stream_options", "temperature", "top_p", "n", "stop", "seed", "user", "max_tokens"}
FIELDS = {"completions": COMMON | {"prompt"}, "chat": COMMON | {"messages", "max_completion_tokens"}}
NEUTRAL = {  # fields that change nothing at these values; at others they are not supported
    "logprobs": (False,), "echo": (False,), "best_of": (1,), "suffix": ("",), "presence_penalty": (0,),
    "frequency_penalty": (0,), "logit_bias": ({},), "tools": ([],), "functions": ([],), "tool_choice": ("none",),
    "function_call": ("none",), "parallel_tool_calls": (True, False), "response_format": ({"type": "text"},),
    "store": (False,), "metadata": ({},), "modalities": (["text"],), "service_tier": ("auto", "default"),
    "no_stop_trim": (False,), "ignore_eos": (False,), "skip_special_tokens": (True,),  # vllm-router adds these
    "return_hidden_states": (False,),
}  # fmt: skip
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class Refused(Exception):
    """A request that gets an error of OpenAI's form.

    Attributes
    ----------
    status : of HTTP.
    param : the field that it is about, or None.
    code : a word for programs, or None.
    headers : of the reply.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        """For JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that can be submitted.

    Attributes
    ----------
    is_chat, is_streamed, wants_usage : what shape the reply has.
    prompt : token ids.
    max_tokens : cut to what the model's context leaves.
    n : samples.
    sampling : of their tokens.
    stops : texts that end a sample; they are not part of it.
    user : as the client named one, or None.
    """

    is_chat: bool
    is_streamed: bool
    wants_usage: bool
    prompt: list[int]
    max_tokens: int
    n: int
    sampling: Sampling
    stops: tuple[str, ...]
    user: str | None


def read(body: bytes, kind: str, engine: Engine, chat_tokens: int) -> Ask:
    """An Ask from a body.

    Parameters
    ----------
    body : JSON.
    kind : ``"completions"`` or ``"chat"``.
    engine : whose tokens.
    chat_tokens : of an answer in a chat where the client does not say.

    Raises
    ------
    Refused
        400, with what is wrong where.
    """
    fields = _fields(body, kind)
    model = fields.get("model", engine.name)
    if model != engine.name:
        raise Refused(404, f"there is no model {model!r:.80} here, only {engine.name!r}", param="model",
                      code="model_not_found")  # fmt: skip
    is_chat = kind == "chat"
    try:
        prompt = _messages(fields, engine) if is_chat else _prompt(fields, engine)
    except LlamaError as problem:
        code = "context_length_exceeded" if isinstance(problem, PromptTooLong) else None
        raise Refused(400, str(problem), param="messages" if is_chat else "prompt", code=code) from None
    left = engine.context_length - len(prompt)
    if left < 1:
        raise Refused(
            400, f"the prompt has {len(prompt)} tokens, and the model's context is {engine.context_length}, of which "
            f"at least one is for the answer: shorten it", param="messages" if is_chat else "prompt",
            code="context_length_exceeded",
        )  # fmt: skip
    most = _most_tokens(fields, chat_tokens if is_chat else COMPLETION_TOKENS)
    streamed, options = _flag(fields, "stream"), fields.get("stream_options", {})
    if not isinstance(options, dict) or set(options) - {"include_usage"}:
        raise Refused(400, "stream_options must be an object with nothing but include_usage", param="stream_options")
    seed = _whole(fields, "seed", -(1 << 63), (1 << 63) - 1, 0)
    sampling = Sampling(
        temperature=_number(fields, "temperature", 0.0, 2.0, 0.0),
        top_p=_number(fields, "top_p", 1e-9, 1.0, 1.0), seed=seed % (1 << 64),
    )  # fmt: skip
    user = fields.get("user")
    if user is not None and not isinstance(user, str):
        raise Refused(400, "user must be a string", param="user")
    return Ask(
        is_chat, streamed, streamed and _flag(options, "include_usage"), prompt, min(most, left),
        _whole(fields, "n", 1, MOST_SAMPLES, 1), sampling, _stops(fields), user,
    )  # fmt: skip


def namespace_of(key: str | None, user: str | None) -> pk.Namespace | None:
    """Namespace of an API key and a user, hashed; None without either: all share that."""
    if not key and not user:
        return None
    named = hashlib.sha256(repr((key or "", user or "")).encode("utf-8", "surrogatepass")).hexdigest()
    return pk.Namespace(tenant=named)


def _fields(body: bytes, kind: str) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as problem:
        raise Refused(400, f"the body is no JSON: {str(problem)[:200]}") from None
    if not isinstance(fields, dict):
        raise Refused(400, "the body must be a JSON object")
    fields = {name: value for name, value in fields.items() if value is not None}
    for name in set(fields) - FIELDS[kind]:
        if not any(type(fields[name]) is type(fine) and fields[name] == fine for fine in NEUTRAL.get(name, ())):
            raise Refused(400, f"{_named(name)} is not supported here: leave it out", param=_named(name),
                          code="unsupported_parameter")  # fmt: skip
    return fields


def _named(name: str) -> str:
    """A client's name of a field, cut short. JSON may write half a surrogate pair, UTF-8 not."""
    return name.encode("utf-8", "backslashreplace").decode()[:80]


def _prompt(fields: dict[str, Any], engine: Engine) -> list[int]:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        tokens = engine.encode(prompt)
    elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
        tokens = prompt
        if tokens and not 0 <= min(tokens) <= max(tokens) < engine.vocab_size:
            raise Refused(400, f"tokens are 0 to {engine.vocab_size - 1}", param="prompt")
    else:
        raise Refused(400, "prompt must be a text or a list of tokens, and one of them only", param="prompt")
    if not tokens:
        raise Refused(400, "the prompt is empty: there is nothing to go on from", param="prompt")
    return tokens


def _messages(fields: dict[str, Any], engine: Engine) -> list[int]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "messages must be a list with at least one message", param="messages")
    turns = [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if turns[0][0] != "system":
        turns.insert(0, ("system", SYSTEM))
    return engine.chat(turns)


def _turn(message: Any, where: str) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise Refused(400, f"{where} must be an object", param=where)
    unknown = {name for name, value in message.items() if value is not None} - {"role", "content", "name", "refusal"}
    if unknown:
        raise Refused(400, f"{where}.{_named(min(unknown))} is not supported here", param=where,
                      code="unsupported_parameter")  # fmt: skip
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise Refused(400, f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
                   for part in content):  # fmt: skip
            raise Refused(400, f"{where}.content: only parts of type text are supported", param=f"{where}.content",
                          code="unsupported_parameter")  # fmt: skip
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise Refused(400, f"{where}.content must be a text", param=f"{where}.content")
    return ROLES[role], content


def _whole(fields: Mapping[str, Any], name: str, low: int, high: int, default: int) -> int:
    value = fields.get(name, default)
    if type(value) is not int or not low <= value <= high:
        raise Refused(400, f"{name} must be a whole number in {low}..{high}, not {value!r:.40}", param=name)
    return value


def _most_tokens(fields: Mapping[str, Any], default: int) -> int:
    """Tokens of an answer at most. A client may give either name, or both if they agree."""
    names = [name for name in ("max_tokens", "max_completion_tokens") if name in fields]
    given = [_whole(fields, name, 1, 1 << 30, default) for name in names]
    if len(set(given)) > 1:
        raise Refused(400, f"max_tokens is {given[0]} and max_completion_tokens is {given[1]}: give one of them",
                      param="max_completion_tokens")  # fmt: skip
    return given[0] if given else default


def _number(fields: Mapping[str, Any], name: str, low: float, high: float, default: float) -> float:
    value = fields.get(name, default)
    if type(value) not in (int, float) or not low <= value <= high:
        raise Refused(400, f"{name} must be a number in {low:g}..{high:g}, not {value!r:.40}", param=name)
    return float(value)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise Refused(400, f"{name} must be true or false, not {value!r:.40}", param=name)
    return value


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    stops = fields.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    fine = isinstance(stops, list) and len(stops) <= MOST_STOPS
    if not fine or not all(isinstance(stop, str) and 0 < len(stop) <= LONGEST_STOP for stop in stops):
        raise Refused(400, f"stop must be a text of 1 to {LONGEST_STOP} characters, or up to {MOST_STOPS} of them",
                      param="stop")  # fmt: skip
    return tuple(stops)
