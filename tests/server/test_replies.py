"""OpenAI's own client gets the tokens of the model, whole and in events."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import httpx
import pytest
from numpy.typing import NDArray

import pagedkv as pk
from examples.llama_numpy.chat import SYSTEM
from examples.server.engine import Engine
from examples.server.replies import Voice
from examples.server.toy import END, Toy, greedy
from pagedkv.scheduler import Plan
from pagedkv.serving import Chunk

from .conftest import LIMIT_S, Running, running


def text_of(tokens: list[int]) -> str:
    return "".join(chr(token) for token in tokens if token != END)


def said(prompt: str, most: int = 16) -> str:
    return text_of(greedy(prompt.encode(), most))


def long_prompt(most: int) -> str:
    """A prompt whose completion does not end by itself before so many tokens."""
    return next(text for i in itertools.count() if len(greedy((text := f"prompt {i}").encode(), most + 1)) > most)


def test_a_completion_is_the_models(served: Running) -> None:
    made = served.client().completions.create(model="toy", prompt="hello there", max_tokens=40)
    tokens = greedy(b"hello there", 40)
    assert made.choices[0].text == text_of(tokens)
    assert made.choices[0].finish_reason == ("stop" if tokens[-1] == END else "length")
    assert made.usage.completion_tokens == len(tokens)
    assert made.usage.prompt_tokens == 11


def test_a_completion_streams_the_same(served: Running) -> None:
    prompt = long_prompt(30)
    events = list(served.client().completions.create(model="toy", prompt=prompt, max_tokens=30, stream=True))
    assert "".join(event.choices[0].text for event in events) == said(prompt, 30)
    assert [event.choices[0].finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]
    assert len(events) == 30, "a token at a time"


def test_a_chat_is_a_prompt_with_all_turns(served: Running) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": [{"type": "text", "text": "and "}, {"type": "text", "text": "now?"}]},
    ]
    prompt = f"system: {SYSTEM}\nuser: hi\nassistant: hello\nuser: and now?\nassistant: "
    made = served.client().chat.completions.create(model="toy", messages=messages, max_completion_tokens=12)
    assert made.choices[0].message.content == said(prompt, 12)
    assert made.choices[0].message.role == "assistant"
    events = list(
        served.client().chat.completions.create(
            model="toy", messages=messages, max_tokens=12, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == said(prompt, 12)
    assert events[0].choices[0].delta.role == "assistant"
    assert events[-1].usage.completion_tokens == made.usage.completion_tokens
    assert events[-1].usage.prompt_tokens_details.cached_tokens > 0, "the first request has left its prompt"


def test_samples_are_told_apart(served: Running) -> None:
    prompt = long_prompt(6)
    made = served.client().completions.create(model="toy", prompt=prompt, max_tokens=6, n=3)
    assert [(choice.index, choice.text) for choice in made.choices] == [(i, said(prompt, 6)) for i in range(3)]
    texts = ["", "", ""]
    for event in served.client().completions.create(model="toy", prompt=prompt, max_tokens=6, n=3, stream=True):
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == [said(prompt, 6)] * 3


class Pausing(Toy):
    """Computes 40 steps, and no more before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.go_on = 0, threading.Event()

    def logits(self, plan: Plan, step: pk.Step) -> NDArray[Any]:
        self.steps += 1
        assert self.steps <= 40 or self.go_on.wait(LIMIT_S)
        return super().logits(plan, step)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "in events"])
def test_a_stop_text_ends_it_and_is_not_told(streamed: bool) -> None:
    prompt = long_prompt(60)
    full = said(prompt, 60)
    stop = full[20:24]
    at = full.index(stop)
    engine = Pausing()
    with running(engine) as made:
        asked = made.client().completions.create(
            model="toy", prompt=prompt, max_tokens=60, stop=[stop, "\x00"], stream=streamed
        )
        if streamed:
            events = list(asked)
            text, reason = "".join(event.choices[0].text for event in events), events[-1].choices[0].finish_reason
        else:
            text, reason = asked.choices[0].text, asked.choices[0].finish_reason
        assert (text, reason) == (full[:at], "stop")
        engine.go_on.set()
        made.idle()
        ended = made.stats().ended
    assert {reason: count for reason, count in ended.items() if count} == {"stop": 1}, "not all of it is computed"


def test_what_may_become_a_stop_text_is_held_back_until_it_is_known() -> None:
    engine: Engine = Toy()
    voice = Voice(engine, ("abc", "bd"))
    assert voice.hear(Chunk(0, list(b"xa"), None)) == "x"
    assert voice.hear(Chunk(0, list(b"b"), None)) == ""
    assert voice.hear(Chunk(0, list(b"x"), None)) == "abx"
    assert voice.hear(Chunk(0, list(b"ab"), None)) == ""
    assert voice.hear(Chunk(0, list(b"d"), None)) == "a"
    assert voice.finish_reason == "stop"
    assert voice.hear(Chunk(0, list(b"more"), "length")) == ""
    held = Voice(engine, ("abc",))
    assert held.hear(Chunk(0, list(b"ab"), "length")) == "ab"


def test_keys_and_users_share_nothing_with_each_other(served: Running) -> None:
    prompt = "a prompt of several blocks, " * 4

    def cached(key: str, **options: str) -> int:
        made = served.client(key).completions.create(model="toy", prompt=prompt, max_tokens=1, **options)
        return int(made.usage.prompt_tokens_details.cached_tokens)

    assert cached("one") == 0
    assert cached("one") > 100
    assert cached("two") == 0
    assert cached("one", user="ann") == 0
    assert cached("one", user="ann") > 100
    assert cached("two", user="ann") == 0


def test_who_has_neither_shares_one_cache_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with running() as made, httpx.Client(base_url=made.url) as client:
        for cached in (0, 4):
            reply = client.post("/completions", json={"prompt": "five5", "max_tokens": 1})
            assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    assert caplog.text.count("neither an API key nor a user") == 1


def test_models_health_and_metrics(served: Running) -> None:
    client = served.client()
    assert [model.id for model in client.models.list()] == ["toy"]
    with httpx.Client(base_url=served.url.removesuffix("/v1")) as plain:
        assert plain.get("/health").json() == {"status": "ok"}
        before = plain.get("/metrics").text
        client.completions.create(model="toy", prompt="x", max_tokens=1)
        after = plain.get("/metrics").text

    def count(text: str) -> float:
        name = 'pagedkv_scheduler_first_token_seconds_count{cache="toy"}'
        return float(next(line for line in text.splitlines() if line.startswith(name)).split()[-1])

    assert count(after) == count(before) + 1
    assert 'pagedkv_prompt_tokens_total{cache="toy"}' in after
