"""Damage to the directory of a cache over groups of layers.

Sectors, headers and whole slots of any group are trashed, moved, or put back as they were at an earlier moment: purged
content among them, and what lay in an extent when another group had it. One copy of the superblock may be trashed, too.

Earlier content is judged under an open cache alone: before an opening no store can tell it from its latest.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pagedkv.tiers.disk.format import PAGE
from tests.reliability import group_life as groups
from tests.reliability.life import Outside
from tests.reliability.proof import Tally, Tick
from tests.reliability.small_store import Image

SECTOR, SLOT = 512, 2 * PAGE  # a slot is a page for its header and one for its payload, in all groups
PAST = (  # lives of a store before any damage; its files are kept after each
    (groups.OPEN, *groups.asks(0, 0, 1, 2), *groups.asks(1, 0, 5), groups.CLOSE),
    (groups.OPEN, groups.Step("purge", 0), *groups.asks(1, 2, 3), *groups.asks(0, 4, 5, 2), groups.CLOSE),
    (groups.OPEN, *groups.asks(1, 3, 4), *groups.asks(0, 0, 1, 3), groups.Step("purge", 1), groups.CLOSE),
    (groups.OPEN, *groups.asks(1, 1, 2), *groups.asks(0, 2), groups.CLOSE),
)
KINDS = ("noise", "zeros", "ones", "elsewhere", "earlier", "superblock")
CHANCES = (0.1, 0.1, 0.1, 0.2, 0.4, 0.1)
Piece = tuple[str, int, bytes]


class GroupStore:
    """A store that went through PAST, and its files after each part of it."""

    def __init__(self, path: Path, room: int) -> None:
        self.path, self.room, self.known = path, room, groups.Known()
        self._none = Outside(lambda: None)
        self.moments: list[dict[str, bytes]] = []
        for script in PAST:
            life = groups.GroupLife(path, self._none, room, self.known)
            life.run(script)
            assert not life.complaints, life.complaints
            self.image = Image(path)
            self.moments.append(self.image.files)
            if script is not PAST[-1]:
                self.image.close()

    def damage(self, rng: np.random.Generator) -> tuple[str, list[Piece]]:
        """One to six pieces of one kind, and the kind."""
        kind = str(rng.choice(KINDS, p=CHANCES))
        if kind == "superblock":
            start = PAGE * int(rng.integers(2)) + SECTOR * int(rng.integers(PAGE // SECTOR))
            return kind, [("SUPER", start, rng.bytes(SECTOR))]
        return kind, [self._piece(kind, rng) for _ in range(rng.integers(1, 7))]

    def _piece(self, kind: str, rng: np.random.Generator) -> Piece:
        files = [name for name in self.image.files if name.startswith("data.")]
        name, source = (files[rng.integers(len(files))] for _ in range(2))
        length = (SECTOR, PAGE, SLOT)[rng.integers(3)]
        start, other = (
            length * int(rng.integers(len(self.image.files[file]) // length)) for file in (name, source)
        )  # fmt: skip
        if kind == "elsewhere":
            return name, start, self.image.files[source][other : other + length]
        if kind == "earlier":
            before = self.moments[rng.integers(len(self.moments) - 1)]
            return name, start, before[name][start : start + length]
        return name, start, {"noise": rng.bytes(length), "zeros": bytes(length), "ones": b"\xff" * length}[kind]

    def run(self, what: str, live: bool, rng: np.random.Generator, tally: Tally) -> None:
        """Damage the store, look at everything, and undo it.

        The damage comes under an open cache, or before one opens.
        """
        kind, pieces = self.damage(rng)
        live = live or kind == "earlier"
        known = groups.after((), 0, self.known)
        known.stored.clear()  # damage may cost anything that needs the damaged page
        life = groups.GroupLife(self.path, self._none, self.room, known)
        try:
            if live:
                life.do(groups.OPEN)
            for piece in pieces:
                self.image.write(*piece)
            if kind == "earlier":
                life.look("under an open cache")
                life.abandon()
                self.image.restore()
            life.settle()
        except Exception as problem:
            life.complaints.append(f"raised {type(problem).__name__}: {problem}")
        if life.complaints:
            tally.fail(f"{what}, {kind}{', under an open cache' * live}: {'; '.join(life.complaints[:3])}")
        self.image.restore()
        tally.add(f"damages by groups: {kind}")
        for reason, count in life.misses.items():
            tally.add(f"missed by groups: {reason}", count)
        life.tell(tally)
        tally.count += 1

    def check_undamaged(self, tally: Tally) -> None:
        """Look at everything before any damage: all that was stored is found."""
        life = groups.GroupLife(self.path, self._none, self.room, groups.after((), 0, self.known))
        life.settle()
        for complaint in life.complaints:
            tally.fail(f"groups, {self.room} blocks, no damage: {complaint}")
        self.image.restore()


def damage_by_groups(folder: Path, count: int, seed: int, tally: Tally, tick: Tick) -> None:
    """So many damages, in turns to a store with room for everything and to one without.

    Half of each come under an open cache.
    """
    stores = [GroupStore(folder / f"{room} blocks", room) for room in (groups.ROOMY, groups.NARROW)]
    for store in stores:
        store.check_undamaged(tally)
    for number in range(count):
        what = f"damage {number} by groups of seed {seed}"
        stores[number % 2].run(what, number % 4 < 2, np.random.default_rng([seed, number]), tally)
        tick(1)
    for store in stores:
        store.image.close()
