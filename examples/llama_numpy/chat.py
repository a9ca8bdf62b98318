"""The chat format of SmolLM2: turns between ``<|im_start|>`` and ``<|im_end|>``."""

from __future__ import annotations

from examples.llama_numpy.errors import PromptError
from examples.llama_numpy.tokenizer import Tokenizer

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
START, END = "<|im_start|>", "<|im_end|>"


def chat_tokens(tokenizer: Tokenizer, message: str, system: str = SYSTEM) -> list[int]:
    """Tokens that ask for an answer to a message.

    What is written in the message cannot end its turn.

    Raises
    ------
    PromptError
        The message is empty, or the model has no such marks.
    """
    if not message.strip():
        raise PromptError("an empty message: there is nothing to answer")
    marks = tokenizer.specials
    if START not in marks or END not in marks:
        raise PromptError(f"this model's vocabulary has no {START} and {END}: give it plain text (--plain)")

    def turn(role: str, text: str) -> list[int]:
        return [marks[START], *tokenizer.encode(f"{role}\n{text}"), marks[END], *tokenizer.encode("\n")]

    answer = [marks[START], *tokenizer.encode("assistant\n")]
    return [*turn("system", system), *turn("user", message), *answer]
