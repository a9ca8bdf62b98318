"""The chat format of SmolLM2: turns between ``<|im_start|>`` and ``<|im_end|>``."""

from __future__ import annotations

from collections.abc import Iterable

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
    return dialogue_tokens(tokenizer, [("system", system), ("user", message)])


def dialogue_tokens(
    tokenizer: Tokenizer, turns: Iterable[tuple[str, str]], *, most: int | None = None
) -> list[int]:
    """Tokens that ask for the assistant's next turn.

    Parameters
    ----------
    turns : ``(role, text)`` of each turn so far.
    most : tokens of the turns together, as in :meth:`Tokenizer.encode`.

    Raises
    ------
    PromptError
        The model has no such marks.
    PromptTooLong
        There are more than `most` tokens.
    """
    marks = tokenizer.specials
    if START not in marks or END not in marks:
        raise PromptError(f"this model's vocabulary has no {START} and {END}: give it plain text (--plain)")

    tokens: list[int] = []
    for role, text in turns:
        said = tokenizer.encode(f"{role}\n{text}", most=None if most is None else max(0, most - len(tokens)))
        tokens += [marks[START], *said, marks[END], *tokenizer.encode("\n")]
    return [*tokens, marks[START], *tokenizer.encode("assistant\n")]
