"""SmolLM2, or another GGUF that examples/llama_numpy reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

import pagedkv as pk
from examples.llama_numpy.chat import END, dialogue_tokens
from examples.llama_numpy.errors import PromptError, PromptTooLong
from examples.llama_numpy.gguf_file import Model
from examples.llama_numpy.model import Llama
from examples.llama_numpy.sampling import check_finite
from examples.llama_numpy.tokenizer import TextStream, Tokenizer
from pagedkv.scheduler import Plan

LONGEST_RUN = 256  # characters of one kind: a word is encoded as a whole, and other requests wait for the GIL
MOST_PER_TOKEN = 16  # characters; text that people write has about 4


class LlamaEngine:
    """A model of examples/llama_numpy behind the server.

    Parameters
    ----------
    file : Model
        What its GGUF holds.
    """

    def __init__(self, file: Model) -> None:
        self._file, self._llama, self._tokenizer = file, Llama(file.weights), Tokenizer(file.vocabulary)
        self.name, config = file.name, file.weights.config
        self.context_length, self.vocab_size = config.context_length, config.vocab_size
        import regex

        kinds = (r"\p{L}", r"[^\s\p{L}\p{N}]", r"\s", r"\p{N}")
        self._run = regex.compile("|".join(f"(?<!{kind}){kind}{{{LONGEST_RUN + 1}}}" for kind in kinds))
        marks = self._tokenizer.specials
        self.stop_ids = frozenset({file.vocabulary.eos_id} | ({marks[END]} if END in marks else set()))

    def kv_spec(self, block_size: int) -> pk.KVSpec:
        """Named after the file's content, as the command line's: both find each other's blocks."""
        return self._file.weights.config.kv_spec(
            f"{self._file.name}@sha256:{self._file.sha256}", block_size=block_size, dtype="float32"
        )

    def encode(self, text: str) -> list[int]:
        """Tokens of a text; what looks like a mark is text."""
        self._check([text])
        with self._told_of_context():
            return self._tokenizer.encode(text, most=self.context_length)

    def chat(self, turns: Iterable[tuple[str, str]]) -> list[int]:
        """SmolLM2's chat format."""
        turns = list(turns)
        self._check([text for _, text in turns])
        with self._told_of_context():
            return dialogue_tokens(self._tokenizer, turns, most=self.context_length)

    @contextlib.contextmanager
    def _told_of_context(self) -> Iterator[None]:
        try:
            yield
        except PromptTooLong:
            raise PromptTooLong(
                f"the prompt has more than {self.context_length} tokens, and the model's context is "
                f"{self.context_length}, of which at least one is for the answer: shorten it"
            ) from None

    def _check(self, texts: Sequence[str]) -> None:
        """Raise PromptError for texts that would take long to encode and cannot fit, or hardly."""
        most, characters = MOST_PER_TOKEN * self.context_length, sum(map(len, texts))
        if characters > most:
            raise PromptTooLong(
                f"the prompt has {characters:,} characters, and the model's context of {self.context_length} tokens "
                f"takes {most:,} at most: shorten it"
            )
        if any(self._run.search(text) for text in texts):
            raise PromptError(f"the prompt has a run of more than {LONGEST_RUN} letters, marks or blanks: break it up")

    def stream(self) -> TextStream:
        """Text of tokens."""
        return self._tokenizer.stream()

    def logits(self, plan: Plan, step: pk.Step) -> NDArray[Any]:
        """A forward pass."""
        logits = self._llama.forward(step, plan.last_tokens)
        check_finite(logits)
        return logits
