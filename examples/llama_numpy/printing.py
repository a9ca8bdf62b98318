"""Tokens as they come.

One completion as running text, several as a row per step, beams as far as they agree; and whole answers of many
requests at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import TextIO

from examples.llama_numpy.beams import Beam
from examples.llama_numpy.generation import Completion
from examples.llama_numpy.tokenizer import Tokenizer
from pagedkv.scheduler import Request

COLUMN = 12  # characters


class StreamPrinter:
    """A single completion, as running text.

    Parameters
    ----------
    out : where to.
    tokenizer : Tokenizer
    stop_ids : tokens that are not shown.
    samples : 1.
    """

    def __init__(self, out: TextIO, tokenizer: Tokenizer, stop_ids: Collection[int], samples: int = 1) -> None:
        self._out, self._stop_ids = out, stop_ids
        self._text = tokenizer.stream()

    def __call__(self, prompt: int, sample: int, token: int) -> None:
        """One more token."""
        if token not in self._stop_ids:
            self._out.write(self._text.feed(token))
            self._out.flush()

    def end(self, completions: Sequence[Completion]) -> None:
        """The completion is over."""
        self._out.write(self._text.end() + "\n")
        self._out.flush()


class ColumnPrinter:
    """Several samples: each step is a row with a column for each of them.

    Whole texts at the end.
    """

    def __init__(self, out: TextIO, tokenizer: Tokenizer, stop_ids: Collection[int], samples: int) -> None:
        self._out, self._tokenizer, self._stop_ids = out, tokenizer, stop_ids
        self._row = [""] * samples
        self._last = -1

    def __call__(self, prompt: int, sample: int, token: int) -> None:
        """One more token; a sample that is not behind the last one begins a row."""
        if sample <= self._last:
            self._flush()
        self._last = sample
        self._row[sample] = "." if token in self._stop_ids else repr(self._tokenizer.decode([token]))[1:-1]

    def end(self, completions: Sequence[Completion]) -> None:
        """All samples are over."""
        self._flush()
        for completion in completions:
            text = self._tokenizer.decode(token for token in completion.tokens if token not in self._stop_ids)
            self._out.write(f"\n[{completion.sample}] {text}\n")
        self._out.flush()

    def _flush(self) -> None:
        self._out.write("|".join(f"{cell[:COLUMN]:<{COLUMN}}" for cell in self._row).rstrip() + "\n")
        self._out.flush()
        self._row, self._last = [""] * len(self._row), -1


class BeamPrinter:
    """Beams: what all of them begin with is settled and shown; all of them at the end."""

    def __init__(self, out: TextIO, tokenizer: Tokenizer, stop_ids: Collection[int]) -> None:
        self._out, self._tokenizer, self._stop_ids = out, tokenizer, stop_ids
        self._text, self._shown = tokenizer.stream(), 0

    def __call__(self, beams: list[Beam]) -> None:
        """The beams after one more step."""
        places = zip(*(beam.tokens for beam in beams), strict=False)
        settled = [tokens[0] for tokens in itertools.takewhile(lambda tokens: len(set(tokens)) == 1, places)]
        for token in settled[self._shown :]:
            if token not in self._stop_ids:
                self._out.write(self._text.feed(token))
        self._shown = max(self._shown, len(settled))
        self._out.flush()

    def end(self, beams: list[Beam]) -> None:
        """The search is over."""
        self._out.write(self._text.end() + "\n")
        for beam in beams:
            text = self._tokenizer.decode(token for token in beam.tokens if token not in self._stop_ids)
            self._out.write(f"\n{beam.log_prob:8.3f}  {text}\n")
        self._out.flush()


class AnswerPrinter:
    """Requests that are served together.

    Each one's name, prompt and answer when it is finished.

    Parameters
    ----------
    out, tokenizer, stop_ids : as :class:`StreamPrinter`.
    names, texts : of the prompts, by the requests' ids.
    """

    def __init__(
        self, out: TextIO, tokenizer: Tokenizer, stop_ids: Collection[int], names: Sequence[str], texts: Sequence[str]
    ) -> None:
        self._out, self._tokenizer, self._stop_ids = out, tokenizer, stop_ids
        self._names, self._texts = names, texts

    def __call__(self, request: Request) -> None:
        """One is finished."""
        text = self._tokenizer.decode(token for token in request.outputs[0].tolist() if token not in self._stop_ids)
        self._out.write(f"[{self._names[request.id]}] {self._texts[request.id]}\n{text}\n\n")
        self._out.flush()
