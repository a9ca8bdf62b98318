"""Chats of many clients at once: each asks, waits for the whole answer, and asks on."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(frozen=True, slots=True)
class Load:
    """What the clients do.

    Attributes
    ----------
    clients : at once; each has one chat after the other.
    chats : of each client.
    turns : of a chat; each has all turns before it in its prompt.
    systems : different system messages; a chat has one of them.
    system_words, turn_words, answer_tokens : how long messages and answers are.
    seed : of the choices.
    """

    clients: int = 16
    chats: int = 2
    turns: int = 4
    systems: int = 4
    system_words: int = 120
    turn_words: int = 20
    answer_tokens: int = 24
    seed: int = 1


@dataclass(slots=True)
class Told:
    """What came of the requests, in seconds.

    Attributes
    ----------
    first_s : from the sending of a request to its first token.
    token_s : mean time from a token to the next, of each request with two tokens or more.
    prompt_tokens, cached_tokens, new_tokens : of all requests.
    refused : requests that got 429, each sent again after the time that it was told.
    wall_s : of all of it.
    """

    first_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    refused: int = 0
    wall_s: float = 0.0


async def run(url: str, model: str, load: Load, *, cached: bool) -> Told:
    """Run a load.

    Parameters
    ----------
    url : of ``/v1``.
    cached : False gives each request a user of its own, so that it finds nothing.
    """
    told = Told()
    systems = [_words(f"system {load.seed} {i}", load.system_words) for i in range(load.systems)]
    limits = httpx.Limits(max_connections=load.clients)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        began = time.perf_counter()
        await asyncio.gather(*(_chats(client, model, load, systems, told, i, cached) for i in range(load.clients)))
        told.wall_s = time.perf_counter() - began
    return told


async def _chats(
    client: httpx.AsyncClient, model: str, load: Load, systems: list[str], told: Told, number: int, cached: bool
) -> None:
    choose = random.Random(f"{load.seed} {number}")
    for chat in range(load.chats):
        messages = [{"role": "system", "content": choose.choice(systems)}]
        for turn in range(load.turns):
            name = f"{number} {chat} {turn}"
            messages.append({"role": "user", "content": _words(f"turn {load.seed} {name}", load.turn_words)})
            body = {
                "model": model, "messages": messages, "max_tokens": load.answer_tokens, "stream": True,
                "stream_options": {"include_usage": True}, "user": "bench" if cached else name,
            }  # fmt: skip
            messages.append({"role": "assistant", "content": await _ask(client, body, told)})


async def _ask(client: httpx.AsyncClient, body: dict[str, Any], told: Told) -> str:
    while True:
        began, first, last, text = time.perf_counter(), 0.0, 0.0, ""
        async with client.stream("POST", "/chat/completions", json=body) as reply:
            if reply.status_code == 429:
                told.refused += 1
                await asyncio.sleep(float(reply.headers["retry-after"]))
                continue
            if reply.status_code != 200:
                raise SystemExit(f"bench.server: {reply.status_code}: {(await reply.aread()).decode()}")
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise SystemExit(f"bench.server: {event['error']['message']}")
                if event["choices"] and event["choices"][0]["delta"].get("content"):
                    text += event["choices"][0]["delta"]["content"]
                    last = time.perf_counter()
                    first = first or last
                elif event.get("usage"):
                    usage = event["usage"]
        told.prompt_tokens += usage["prompt_tokens"]
        told.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        told.new_tokens += usage["completion_tokens"]
        told.first_s.append((first or time.perf_counter()) - began)
        told.token_s.append((last - first) / max(1, usage["completion_tokens"] - 1) if first else 0.0)
        return text


def _words(name: str, count: int) -> str:
    choose = random.Random(name)
    return " ".join("".join(choose.choices("etaoinshrdlu", k=choose.randint(2, 8))) for _ in range(count))
