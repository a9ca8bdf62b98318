"""A pin: a cached prefix that stays where it is for as long as the object lives."""

from __future__ import annotations

from types import TracebackType

from pagedkv._core.held import Hold
from pagedkv.errors import WrongType


class Pin:
    """Keeps a cached prefix from being evicted or moved. Made by :meth:`KVCache.pin`.

    A context manager. Keep the object for as long as the prefix must stay: like a Sequence, a pin that is collected
    releases its blocks.

    Attributes
    ----------
    num_tokens : int
        Leading tokens of the prompt that were cached when it was pinned, in whole blocks; 0 if none were.
    num_blocks : int
        Their blocks, as they count against ``pin_budget``.
    """

    __slots__ = ("__weakref__", "_held", "num_blocks", "num_tokens")

    def __init__(self, held: Hold, block_size: int) -> None:
        if not isinstance(held, Hold):
            raise WrongType("pins are made by KVCache.pin")
        self._held = held
        self.num_blocks = held.num_blocks
        self.num_tokens = held.num_blocks * block_size

    @property
    def is_released(self) -> bool:
        """Whether it holds nothing any more."""
        return self._held.handle < 0

    def release(self) -> None:
        """Let the prefix go: it stays cached, and may be moved and evicted again. Twice is fine."""
        self._held.release()

    def __enter__(self) -> Pin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Pin, {'released' if self.is_released else f'{self.num_tokens} tokens'}>"
