"""The KV of one sequence in an exported decoder: growing, or in arrays of a fixed length.

A context holds the KV of its first `length` tokens. An exception of a run leaves it as it was.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pagedkv.adapters.onnx_ports import LOGITS, Ports
from pagedkv.errors import InvalidArgument, NotSupported
from pagedkv.interop.onnxruntime import bind_input, bind_output
from pagedkv.spec.layers import MOST_TOKENS
from pagedkv.spec.sizes import whole_number

_WHAT = "this session"
Layers = list[NDArray[Any]]


class Context(Protocol):
    """The KV of the first tokens of a sequence."""

    @property
    def length(self) -> int:
        """Tokens whose KV it holds."""

    @property
    def limit(self) -> int | None:
        """Tokens that it can hold; None without a limit."""

    def run(self, ids: NDArray[Any]) -> NDArray[Any]:
        """Compute tokens behind those that it holds; logits [vocab] of the last one."""

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens."""

    def views(self, length: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V [num_layers, heads, length, dim], to be filled before :meth:`adopt`.

        The context's own KV may be lost: until then it counts as empty.
        """

    def adopt(self, length: int) -> None:
        """Hold the KV that the caller has put into :meth:`views`."""

    def kv(self, start: int, stop: int) -> tuple[Layers, Layers]:
        """K and V by layer, each [heads, stop - start, dim]; valid until the next call."""


def open_context(session: Any, ports: Ports, max_length: int | None) -> Context:
    """The context of a session: growing, of a fixed length, or with `max_length` in place.

    Raises
    ------
    WrongType, InvalidArgument
        `max_length` is no number of tokens, or not that of the session.
    """
    if max_length is None and ports.length is None:
        return Growing(session, ports)
    limit = ports.length
    if max_length is not None:
        limit = whole_number(max_length, "max_length", 1, MOST_TOKENS)
    if ports.length not in (None, limit):
        raise InvalidArgument(f"max_length={max_length}, and the session's past has {ports.length} tokens")
    assert limit is not None
    return Fixed(session, ports, limit, in_place=max_length is not None)


class Growing:
    """KV whose arrays grow with the sequence: each run returns those of all tokens."""

    limit: int | None = None

    def __init__(self, session: Any, ports: Ports) -> None:
        self._session, self._ports = session, ports
        self._outputs = [LOGITS, *(name for pair in ports.present for name in pair)]
        self._past: list[tuple[NDArray[Any], NDArray[Any]]] = []  # by layer [1, heads, tokens, dim]
        self._pending = ports.empty(0)
        self.adopt(0)

    @property
    def length(self) -> int:
        """As in the protocol."""
        return int(self._past[0][0].shape[2])

    def run(self, ids: NDArray[Any]) -> NDArray[Any]:
        """As in the protocol."""
        total = self.length + len(ids)
        feeds = self._ports.feeds(ids, self.length, total)
        for names, pair in zip(self._ports.past, self._past, strict=True):
            feeds.update(zip(names, pair, strict=True))
        logits, *present = self._session.run(self._outputs, feeds)
        sides = iter(present)
        past = list(zip(sides, sides, strict=True))
        for side in present:
            if side.shape != (1, self._ports.heads, total, self._ports.dim):
                raise NotSupported(_WHAT, f"after {total} tokens its present is {side.shape} (a sliding window?)")
        last = last_row(logits, len(ids), len(ids))
        self._past = past
        return last

    def cut(self, length: int) -> None:
        """As in the protocol."""
        if length < self.length:
            self._past = [(k[:, :, :length].copy(), v[:, :, :length].copy()) for k, v in self._past]

    def views(self, length: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """As in the protocol."""
        self._pending = self._ports.empty(length)
        return self._pending

    def adopt(self, length: int) -> None:
        """As in the protocol."""
        k, v = self._pending
        self._past = [(k[layer][None], v[layer][None]) for layer in range(len(k))]
        self._pending = self._ports.empty(0)

    def kv(self, start: int, stop: int) -> tuple[Layers, Layers]:
        """As in the protocol."""
        k, v = ([pair[side][0, :, start:stop] for pair in self._past] for side in (0, 1))
        return k, v


class Fixed:
    """KV in arrays of `limit` tokens, which are bound to the session.

    Parameters
    ----------
    session, ports
    limit : int
        Tokens of the arrays.
    in_place : bool
        The session writes its present into its past: one array is bound as both. Else two take turns.
    """

    def __init__(self, session: Any, ports: Ports, limit: int, in_place: bool) -> None:
        self._session, self._ports, self.length = session, ports, 0
        self.limit = limit - (ports.chunk or 1) + 1  # a run has room for its padding
        self._arrays = [ports.empty(limit) for _ in range(1 if in_place else 2)]

    def run(self, ids: NDArray[Any]) -> NDArray[Any]:
        """As in the protocol; in runs of the session's own length, the last one padded."""
        size, at = self._ports.chunk or len(ids), self.length
        last = None
        for first in range(0, len(ids), size):
            part = ids[first : first + size]
            last = self._run_once(part, size, at + first)
        assert last is not None
        self.length = at + len(ids)
        return last

    def _run_once(self, ids: NDArray[Any], size: int, start: int) -> NDArray[Any]:
        padded = np.concatenate((ids, np.zeros(size - len(ids), ids.dtype)))
        binding = self._session.io_binding()
        for name, value in self._ports.feeds(padded, start, start + len(ids)).items():
            binding.bind_cpu_input(name, value)
        bound = []  # the binding knows addresses alone
        for bind, names, arrays in (
            (bind_input, self._ports.past, self._arrays[0]),
            (bind_output, self._ports.present, self._arrays[-1]),
        ):
            for layer, pair in enumerate(names):
                for name, array in zip(pair, arrays, strict=True):
                    bound.append(bind(binding, name, array[layer][None]))
        binding.bind_output(LOGITS, "cpu")
        self._session.run_with_iobinding(binding)
        self._arrays.reverse()
        logits = binding.get_outputs()[-1].numpy()
        return last_row(logits, len(ids), size)

    def cut(self, length: int) -> None:
        """As in the protocol."""
        self.length = length

    def views(self, length: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """As in the protocol."""
        self.length = 0
        k, v = self._arrays[0]
        return k[:, :, :length], v[:, :, :length]

    def adopt(self, length: int) -> None:
        """As in the protocol."""
        self.length = length

    def kv(self, start: int, stop: int) -> tuple[Layers, Layers]:
        """As in the protocol."""
        k, v = ([layer[:, start:stop] for layer in side] for side in self._arrays[0])
        return k, v


def last_row(logits: NDArray[Any], tokens: int, size: int) -> NDArray[Any]:
    """Logits [vocab] of the last of `tokens` in a run of `size`.

    Raises
    ------
    NotSupported
        The session returns those of other tokens.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    if len(rows) == size:
        return np.array(rows[tokens - 1])
    if len(rows) == 1 and tokens == size:
        return np.array(rows[0])
    raise NotSupported(_WHAT, f"its logits are {logits.shape} for {tokens} tokens in a run of {size}")
