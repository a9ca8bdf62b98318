"""Superblocks and slot headers with extreme values, which a parser must survive.

Their sums are repaired or not.

The layout is written down here a second time, from the description of the format, and xxh3 comes from another library:
a parser and its fuzzer that share a mistake would agree.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass
from typing import Any

import xxhash

PAGE = 4096
SLOT_FIELDS = {  # name: (offset, struct code)
    "magic": (0, "4s"), "version": (4, "H"), "state": (6, "B"), "padding": (7, "B"), "slot": (8, "Q"),
    "generation": (16, "Q"), "epoch": (24, "Q"), "uuid": (32, "16s"), "fingerprint": (48, "32s"), "key": (80, "32s"),
    "parent": (112, "32s"), "namespace": (144, "32s"), "extra": (176, "32s"), "n_tokens": (208, "I"),
    "shards": (212, "I"), "payload_bytes": (216, "Q"), "tokens": (224, "16s"), "written_at": (240, "Q"),
    "reserved": (248, "32s"), "sums": (280, "16s"), "rest": (296, "32s"), "sum": (4088, "Q"),
}  # fmt: skip
SUPER_FIELDS = {
    "magic": (0, "8s"), "major": (8, "H"), "minor": (10, "H"), "length": (12, "I"), "endian": (16, "I"),
    "incompat": (20, "Q"), "compat": (28, "Q"), "uuid": (36, "16s"), "seqno": (52, "Q"), "epoch": (60, "Q"),
    "fingerprint": (68, "32s"), "num_blocks": (100, "Q"), "block_bytes": (108, "Q"), "header_bytes": (116, "Q"),
    "slot_bytes": (124, "Q"), "segment_slots": (132, "Q"), "block_tokens": (140, "I"), "shards": (144, "I"),
    "token_bytes": (148, "B"), "key_hash": (149, "B"), "sum_kind": (150, "B"), "clean": (151, "B"),
    "next_generation": (152, "Q"), "created_at": (160, "Q"), "key_check": (168, "16s"), "num_purges": (184, "I"),
    "purge": (188, "32s"), "barrier": (220, "Q"), "rest": (300, "32s"), "sum": (4088, "Q"),
}  # fmt: skip
WIDTHS = {"B": 8, "H": 16, "I": 32, "Q": 64}
EXTREMES = (0, 1, 2, -1, -2, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63)  # modulo a field's width


@dataclass(frozen=True)
class Mutator:
    """Mutations of one valid page.

    Attributes
    ----------
    page : the valid bytes, 4096.
    fields : where what lies.
    """

    page: bytes
    fields: dict[str, tuple[int, str]]

    def mutate(self, choose: random.Random, seed: int, repaired: float = 0.7) -> tuple[bytes, str]:
        """Return a page with none to three fields changed, and what was done, for a report.

        Its sum is right in most cases.
        """
        page, done = bytearray(self.page), []
        for name in choose.choices(list(self.fields), k=choose.randrange(4)):
            at, code = self.fields[name]
            old = struct.unpack_from("<" + code, page, at)[0]
            new = self._bytes(choose, old) if code.endswith("s") else self._number(choose, old, WIDTHS[code])
            struct.pack_into("<" + code, page, at, new)
            done.append(f"{name}={new!r}")
        if choose.random() < repaired:
            struct.pack_into("<Q", page, PAGE - 8, page_sum(page, seed))
        elif choose.random() < 0.5:
            page[choose.randrange(PAGE)] ^= 1 << choose.randrange(8)
        return bytes(page), ", ".join(done)

    @staticmethod
    def _number(choose: random.Random, old: int, width: int) -> int:
        top, kind = 1 << width, choose.randrange(len(EXTREMES) + 4)
        if kind < len(EXTREMES):
            return EXTREMES[kind] % top
        bit = 1 << choose.randrange(width)
        swapped = int.from_bytes(old.to_bytes(width // 8, "little"), "big")
        return (old ^ bit, swapped, bit, choose.getrandbits(width))[kind - len(EXTREMES)]

    @staticmethod
    def _bytes(choose: random.Random, old: bytes) -> bytes:
        kind = choose.randrange(4)
        if kind == 0:
            at = choose.randrange(len(old))
            return old[:at] + bytes([old[at] ^ 1 << choose.randrange(8)]) + old[at + 1 :]
        return choose.randbytes(len(old)) if kind == 1 else (b"\0", b"\xff")[kind - 2] * len(old)


def page_sum(page: bytes | bytearray, seed: int) -> int:
    """The sum that a page should end in."""
    return xxhash.xxh3_64_intdigest(bytes(page[: PAGE - 8]), seed)


def field(page: bytes, fields: dict[str, tuple[int, str]], name: str) -> Any:
    """One field of a page."""
    at, code = fields[name]
    return struct.unpack_from("<" + code, page, at)[0]


def spans(fields: dict[str, tuple[int, str]], names: tuple[str, ...]) -> list[tuple[int, int]]:
    """Where these fields lie, with neighbours as one: (start, end) of each."""
    found: list[tuple[int, int]] = []
    for at, code in sorted(fields[name] for name in names):
        end = at + struct.calcsize("<" + code)
        if found and found[-1][1] == at:
            found[-1] = found[-1][0], end
        else:
            found.append((at, end))
    return found


def same(page: bytes, valid: bytes, where: list[tuple[int, int]]) -> bool:
    """Whether a page has the valid one's bytes in all these places."""
    return all(page[start:end] == valid[start:end] for start, end in where)
