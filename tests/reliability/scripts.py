"""What is asked of a small store: fixed scripts that use every call, and random ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.reliability.ledger import Step
from tests.reliability.stores import MOST_BLOCKS, NUM_BLOCKS, NUM_NAMESPACES

Script = tuple[Step, ...]

OPEN, READ, FLUSH, CLEAR, CLOSE = Step("open"), Step("read"), Step("flush"), Step("clear"), Step("close")
RESET = Step("open", fingerprint=1)  # what was stored under another fingerprint makes way


def write(first_number: int, *slots: int) -> Step:
    """Consecutive numbers into slots."""
    return Step("write", slots, tuple(range(first_number, first_number + len(slots))))


def purge(*namespaces: int) -> Script:
    """Purges one after the other."""
    return tuple(Step("purge", namespace=namespace) for namespace in namespaces)


LIFE = (
    OPEN, write(0, 0, 1, 2, 3, 4, 5), write(6, 2, 3), Step("invalidate", (4, 11)), *purge(1), write(9, 7, 8, 1), FLUSH,
    READ, CLOSE, OPEN, READ, write(12, 9, 10), *purge(2), Step("invalidate", (9,)), write(15, 3, 4, 6), READ, CLOSE,
)  # fmt: skip
ONE_KEY_IN_TWO_SLOTS = (
    OPEN, write(0, 8, 2), write(0, 5, 6), READ, CLOSE, OPEN, Step("invalidate", (5,)), write(0, 8), *purge(0), CLOSE,
)  # fmt: skip
CLEARED = (OPEN, write(0, 0, 3, 8), CLEAR, write(20, 0, 3, 4), CLEAR, write(24, 5, 6), CLOSE)
REPLACED = (OPEN, write(0, *range(NUM_BLOCKS)), CLOSE, RESET, write(30, 0, 3, 7), CLOSE, RESET, READ, CLOSE)
GROWN = (
    OPEN, write(0, *range(6)), CLOSE, Step("open", num_blocks=14), write(6, 12, 13, 2), CLOSE, OPEN, READ,
    *purge(1), CLOSE, Step("open", num_blocks=MOST_BLOCKS), write(9, 23, 3), READ, CLOSE,
)  # fmt: skip
MORE_NAMESPACES_THAN_A_SUPERBLOCK_NAMES = 130
MANY_PURGES = (
    OPEN, write(0, 0, 1, 2, 3, 4, 5), *purge(1, *range(NUM_NAMESPACES, MORE_NAMESPACES_THAN_A_SUPERBLOCK_NAMES), 2),
    write(6, 7, 8), CLOSE,
)  # fmt: skip
FIXED = {
    "life": LIFE, "one key in two slots": ONE_KEY_IN_TWO_SLOTS, "cleared": CLEARED, "reset": REPLACED, "grown": GROWN,
}  # fmt: skip
KINDS = ("write", "invalidate", "purge", "flush", "read", "reopen", "clear", "grow")
CHANCES = np.array([16, 4, 3, 3, 4, 2, 1, 1])
OTHERS = {"flush": (FLUSH,), "read": (READ,), "reopen": (CLOSE, OPEN), "clear": (CLEAR,)}


def random_script(rng: np.random.Generator, num_steps: int, numbers: Iterator[int]) -> Script:
    """Return steps that begin with opening and need not end with closing.

    Every third write repeats an earlier number.
    """
    steps: list[Step] = [OPEN]
    used: list[int] = []
    size = NUM_BLOCKS
    for kind in rng.choice(KINDS, num_steps, p=CHANCES / CHANCES.sum()):
        slots = tuple(rng.choice(size, rng.integers(1, 5), replace=False).tolist())
        if kind == "write":
            old = rng.random() < 1 / 3 and len(used) > len(slots)
            chosen = rng.choice(used, len(slots), replace=False).tolist() if old else [next(numbers) for _ in slots]
            used = list(dict.fromkeys([*used, *chosen]))
            steps.append(Step("write", slots, tuple(chosen)))
        elif kind == "invalidate":
            steps.append(Step("invalidate", slots[:2]))
        elif kind == "purge":
            steps.extend(purge(int(rng.integers(NUM_NAMESPACES))))
        elif kind == "grow":
            size = int(rng.integers(size, MOST_BLOCKS + 1))
            steps += [CLOSE, Step("open", num_blocks=size)]
        else:
            steps.extend(OTHERS[kind])
    return tuple(steps)
