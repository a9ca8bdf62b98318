"""What a request gets: texts of its samples, and objects of OpenAI's forms."""

from __future__ import annotations

import time
import uuid
from typing import Any

from examples.server.asks import Ask
from examples.server.engine import Engine
from pagedkv.scheduler import Request
from pagedkv.serving import Chunk


class Voice:
    """The text of one sample, cut before the first of its stop texts.

    What may be the beginning of a stop text is held back until it is known.

    Attributes
    ----------
    num_tokens : so far.
    finish_reason : ``"stop"``, ``"length"`` or None.
    """

    def __init__(self, engine: Engine, stops: tuple[str, ...]) -> None:
        self._stop_ids, self._stops, self._stream = engine.stop_ids, stops, engine.stream()
        self._held = ""
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def hear(self, chunk: Chunk) -> str:
        """New text, which may be none."""
        if self.finish_reason is not None:
            return ""
        self.num_tokens += len(chunk.tokens)
        self._held += "".join(self._stream.feed(token) for token in chunk.tokens if token not in self._stop_ids)
        if chunk.finish_reason is not None:
            self._held += self._stream.end()
            self.finish_reason = chunk.finish_reason
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.finish_reason = "stop"
            return self._held[: min(found)]
        kept = 0 if self.finish_reason else self._possible()
        text, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return text

    def _possible(self) -> int:
        """Characters at the end that may begin a stop text."""
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0


class Reply:
    """One request's reply, whole or in events.

    Parameters
    ----------
    engine, ask
    request : Request
        Says how much of the prompt was cached.
    """

    def __init__(self, engine: Engine, ask: Ask, request: Request) -> None:
        self._engine, self._ask, self._request = engine, ask, request
        self._voices = [Voice(engine, ask.stops) for _ in range(ask.n)]
        self._texts = [""] * ask.n
        self._id = f"{'chatcmpl' if ask.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    @property
    def is_over(self) -> bool:
        """Whether no sample has more to say."""
        return all(voice.finish_reason is not None for voice in self._voices)

    def begin(self) -> list[dict[str, Any]]:
        """Events before the first token."""
        if not self._ask.is_chat:
            return []
        return [self._event([self._delta(i, {"role": "assistant", "content": ""}, None)]) for i in range(self._ask.n)]

    def hear(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Events of one chunk."""
        voice = self._voices[chunk.sample]
        if voice.finish_reason is not None:
            return []
        text = voice.hear(chunk)
        self._texts[chunk.sample] += text
        if not text and voice.finish_reason is None:
            return []
        if self._ask.is_chat:
            delta: dict[str, Any] = {"content": text} if text else {}
            return [self._event([self._delta(chunk.sample, delta, voice.finish_reason)])]
        return [self._event([self._completion(chunk.sample, text, voice.finish_reason)])]

    def end(self) -> list[dict[str, Any]]:
        """Events after the last token."""
        return [{**self._event([]), "usage": self._usage()}] if self._ask.wants_usage else []

    def whole(self) -> dict[str, Any]:
        """All of it at once."""
        if self._ask.is_chat:
            choices = [
                {"index": i, "message": {"role": "assistant", "content": text}, "logprobs": None,
                 "finish_reason": voice.finish_reason}
                for i, (text, voice) in enumerate(zip(self._texts, self._voices, strict=True))
            ]  # fmt: skip
        else:
            choices = [
                self._completion(i, text, voice.finish_reason)
                for i, (text, voice) in enumerate(zip(self._texts, self._voices, strict=True))
            ]
        kind = "chat.completion" if self._ask.is_chat else "text_completion"
        return {**self._event(choices), "object": kind, "usage": self._usage()}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._ask.is_chat else "text_completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self._engine.name,
                "choices": choices}  # fmt: skip

    def _delta(self, sample: int, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": sample, "delta": delta, "logprobs": None, "finish_reason": reason}

    def _completion(self, sample: int, text: str, reason: str | None) -> dict[str, Any]:
        return {"index": sample, "text": text, "logprobs": None, "finish_reason": reason}

    def _usage(self) -> dict[str, Any]:
        said, asked = sum(voice.num_tokens for voice in self._voices), len(self._ask.prompt)
        return {
            "prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said,
            "prompt_tokens_details": {"cached_tokens": sum(self._request.hit_tokens.values())},
        }  # fmt: skip
