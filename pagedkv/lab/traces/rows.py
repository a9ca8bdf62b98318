"""The lines of a trace file, and the order in which requests become lines.

A line needs the length of its request's output, which is known when the request ends; a trace is in order of arrival.
So ended requests wait for those that came before them.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Row:
    """One request.

    Attributes
    ----------
    t_ms : arrival in milliseconds.
    input_tokens : of the prompt.
    block_size : tokens of a block.
    block_ids : one for each whole block of the prompt.
    hit_tokens : of the prompt that the cache had in whole blocks; None where that is not known.
    session : None where there is none.
    output_tokens : None until the request has ended.
    """

    t_ms: int
    input_tokens: int
    block_size: int
    block_ids: list[int] = field(repr=False)
    hit_tokens: int | None = None
    session: int | None = None
    output_tokens: int | None = None

    def line(self) -> bytes:
        """As a line of a trace file."""
        fields: dict[str, object] = {
            "timestamp": self.t_ms,
            "input_length": self.input_tokens,
            "output_length": self.output_tokens or 0,
            "block_size": self.block_size,
        }
        if self.session is not None:
            fields["session"] = self.session
        if self.hit_tokens is not None:
            fields["hit_tokens"] = self.hit_tokens
        fields["hash_ids"] = self.block_ids
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


class Ordered:
    """Hands rows on in order of arrival, each when it and all before it have ended.

    Parameters
    ----------
    emit : callable
        Takes the rows.
    so_far : callable
        Tokens that the request of this handle has beside its prompt by now; asked of a request that has not ended and
        is given up.
    most : rows that wait at once.

    Attributes
    ----------
    cut : rows that were handed on before their requests had ended.
    """

    def __init__(self, emit: Callable[[Row], None], so_far: Callable[[int, Row], int], most: int) -> None:
        self._emit, self._so_far, self._most = emit, so_far, most
        self._waiting: OrderedDict[int, Row] = OrderedDict()  # by handle, in order of arrival
        self.cut = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, handle: int, row: Row) -> None:
        """A request arrives."""
        self._waiting[handle] = row
        self._hand_on()

    def end(self, handle: int, num_tokens: int) -> None:
        """A request has ended with this many tokens, its prompt's included."""
        row = self._waiting.get(handle)
        if row is not None:
            row.output_tokens = max(0, num_tokens - row.input_tokens)
            self._hand_on()

    def finish(self) -> None:
        """Hand all of them on."""
        self._most = 0
        self._hand_on()

    def _hand_on(self) -> None:
        while self._waiting:
            handle, row = next(iter(self._waiting.items()))
            if row.output_tokens is None:
                if len(self._waiting) <= self._most:
                    return
                row.output_tokens = max(0, self._so_far(handle, row))
                self.cut += 1
            del self._waiting[handle]
            self._emit(row)
