"""What the server cannot do is refused with a status, a message and the field."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from examples.server.app import Limits
from examples.server.toy import Toy

from .conftest import Running, openai, running

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
PLAIN = {"prompt": "hi", "max_tokens": 1}

WRONG = [
    ({**PLAIN, "max_tokens": -5}, 400, "max_tokens"),
    ({**PLAIN, "max_tokens": 0}, 400, "max_tokens"),
    ({**PLAIN, "max_tokens": 1.5}, 400, "max_tokens"),
    ({**PLAIN, "max_tokens": True}, 400, "max_tokens"),
    ({**PLAIN, "max_tokens": 10**400}, 400, "max_tokens"),
    ({**PLAIN, "temperature": 3}, 400, "temperature"),
    ({**PLAIN, "temperature": float("nan")}, 400, "temperature"),
    ({**PLAIN, "top_p": 0}, 400, "top_p"),
    ({**PLAIN, "n": 17}, 400, "n"),
    ({**PLAIN, "stop": ["a"] * 5}, 400, "stop"),
    ({**PLAIN, "stop": ""}, 400, "stop"),
    ({**PLAIN, "stream": "yes"}, 400, "stream"),
    ({**PLAIN, "stream_options": {"x": 1}}, 400, "stream_options"),
    ({**PLAIN, "user": 5}, 400, "user"),
    ({**PLAIN, "seed": "s"}, 400, "seed"),
    ({**PLAIN, "model": "gpt-4"}, 404, "model"),
    ({**PLAIN, "logprobs": 1}, 400, "logprobs"),
    ({**PLAIN, "echo": True}, 400, "echo"),
    ({**PLAIN, "made_up": 1}, 400, "made_up"),
    ({**PLAIN, "half a pair \ud800": 1}, 400, "half a pair \\ud800"),
    ({**PLAIN, "prompt": ""}, 400, "prompt"),
    ({**PLAIN, "prompt": []}, 400, "prompt"),
    ({**PLAIN, "prompt": ["a", "b"]}, 400, "prompt"),
    ({**PLAIN, "prompt": [1, 257]}, 400, "prompt"),
    ({**PLAIN, "prompt": [-1]}, 400, "prompt"),
    ({**PLAIN, "prompt": "x" * 2048}, 400, "prompt"),
    ({"max_tokens": 1}, 400, "prompt"),
    ({**CHAT, "tools": [{"type": "function"}]}, 400, "tools"),
    ({**CHAT, "response_format": {"type": "json_object"}}, 400, "response_format"),
    ({**CHAT, "top_logprobs": 2}, 400, "top_logprobs"),
    ({**CHAT, "max_tokens": -5, "max_completion_tokens": 1}, 400, "max_tokens"),
    ({**CHAT, "max_tokens": "1", "max_completion_tokens": 1}, 400, "max_tokens"),
    ({**CHAT, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
    ({**CHAT, "max_completion_tokens": 2}, 400, "max_completion_tokens"),
    ({**CHAT, "messages": []}, 400, "messages"),
    ({**CHAT, "messages": "hi"}, 400, "messages"),
    ({**CHAT, "messages": [5]}, 400, "messages[0]"),
    ({**CHAT, "messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role"),
    ({**CHAT, "messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ({**CHAT, "messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, 400, "messages[0]"),
    ({**CHAT, "messages": [{"role": "user", "content": "x", "half a pair \udfff": 1}]}, 400, "messages[0]"),
    ({**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content"),
    ({**CHAT, "messages": [{"role": "user", "content": "x" * 2048}]}, 400, "messages"),
]


@pytest.fixture(scope="module")
def plain(served: Running):
    with httpx.Client(base_url=served.url, timeout=120.0) as client:
        yield client
    served.idle()
    assert served.stats().ended["aborted"] == 0


@pytest.mark.parametrize(("body", "status", "param"), WRONG, ids=range(len(WRONG)))
def test_a_field_that_cannot_be_done_is_named(plain: httpx.Client, body: Any, status: int, param: str) -> None:
    route = "/chat/completions" if "messages" in body else "/completions"
    reply = plain.post(route, content=json.dumps(body))
    assert reply.status_code == status
    error = reply.json()["error"]
    assert error["param"] == param
    assert len(error["message"]) < 300
    assert reply.headers["x-request-id"].startswith("req-")


NO_OBJECTS = {
    "nothing": b"", "cut": b"{", "list": b"[]", "text": b'"text"', "no UTF-8": b"\xff\xfe", "null": b"null",
    "deep lists": b"[" * 100_000, "deep objects": b'{"a":' * 100_000, "a long number": b'{"n":' + b"9" * 9999,
}  # fmt: skip


@pytest.mark.parametrize("kind", NO_OBJECTS)
def test_what_is_no_json_object_is_refused(plain: httpx.Client, kind: str) -> None:
    reply = plain.post("/completions", content=NO_OBJECTS[kind])
    assert reply.status_code == 400
    assert "JSON" in reply.json()["error"]["message"]


def test_fields_at_the_values_that_change_nothing_are_fine(plain: httpx.Client) -> None:
    neutral = {"logprobs": False, "presence_penalty": 0, "tools": [], "response_format": {"type": "text"}, "echo": None}
    assert plain.post("/completions", json={**PLAIN, **neutral}).status_code == 200


def test_both_names_of_the_most_tokens_are_fine_where_they_agree(plain: httpx.Client) -> None:
    for fields in ({"max_completion_tokens": 1}, {"max_tokens": None, "max_completion_tokens": 3}):
        assert plain.post("/chat/completions", json={**CHAT, **fields}).status_code == 200


def test_10_mb_are_read_to_their_end_and_refused(plain: httpx.Client) -> None:
    for content in (b"x" * 10_000_000, json.dumps({**PLAIN, "prompt": "x" * 10_000_000}).encode()):
        reply = plain.post("/completions", content=content)
        assert reply.status_code == 413
        assert "1,048,576 bytes" in reply.json()["error"]["message"]
    assert plain.post("/completions", json=PLAIN).status_code == 200


def test_other_paths_and_methods_get_errors_of_the_same_form(plain: httpx.Client) -> None:
    assert plain.get("/nothing").json()["error"]["type"] == "invalid_request_error"
    assert plain.get("/completions").status_code == 405


def test_the_client_raises_its_own_errors(served: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="context is 2048"):
        served.client().completions.create(model="toy", prompt="x" * 3000)
    with pytest.raises(openai.NotFoundError, match="no model"):
        served.client().completions.create(model="gpt-4", prompt="x")


def test_a_request_that_does_not_fit_on_the_device_says_so() -> None:
    import pagedkv as pk

    with running(cache={"device_memory": pk.Blocks(16)}) as made:
        with pytest.raises(openai.BadRequestError, match="does not fit on the device"):
            made.client().completions.create(model="toy", prompt="x" * 100, max_tokens=100)
        assert made.client().completions.create(model="toy", prompt="x", max_tokens=1).choices


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with running(limits=Limits(body_s=0.2)) as made, socket.create_connection(("127.0.0.1", made.port)) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{")
        assert made.client().completions.create(model="toy", prompt="x", max_tokens=1).choices, "others are served"
        slow.settimeout(120.0)
        assert slow.recv(100).startswith(b"HTTP/1.1 408 ")


def test_a_model_that_raises_fails_its_request_and_says_no_more_than_that() -> None:
    class Broken(Toy):
        fails = True

        def logits(self, plan: Any, step: Any) -> Any:
            if self.fails:
                raise ArithmeticError("a secret of the model")
            return super().logits(plan, step)

    engine = Broken()
    with running(engine) as made:
        with pytest.raises(openai.InternalServerError, match="StepFailed") as told:
            made.client().completions.create(model="toy", prompt="x", max_tokens=3)
        assert "secret" not in str(told.value)
        with pytest.raises(openai.APIError, match="StepFailed"):
            list(made.client().completions.create(model="toy", prompt="x", max_tokens=3, stream=True))
        engine.fails = False
        assert made.client().completions.create(model="toy", prompt="x", max_tokens=3).choices
