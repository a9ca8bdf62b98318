"""Usable boundaries of prefixes of groups of layers under a budget of bytes: the rule.

A boundary behind k blocks is usable if each group has its last need(k) pages before it. A page that no point needs is
gone. The point used longest ago goes first, of one request the deepest. Its pages that no other needs go with it, and
so do the blocks behind which no request can go on. A boundary that needs no page of short groups is a point by itself,
as recent as the last request over it. Everything is searched anew each time: slow, and easy to compare with the rule.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedkv.lab.replay.pages import Pages

Path = tuple[int, ...]


class Oracle:
    """All prefixes that are there, by their blocks.

    Attributes
    ----------
    points : each boundary's last use, and how deep it lies, negative. One that a request found is a little older until
        the request keeps it.
    """

    def __init__(self, groups: Sequence[Pages], budget: int, every: int) -> None:
        self.groups, self.budget, self.every = groups, budget, every
        self.spine: set[Path] = set()
        self.points: dict[Path, tuple[float, int]] = {}
        self.now = 0

    def request(self, path: Path) -> int:
        """Its hit blocks."""
        self.now += 1
        prefixes = [path[: k + 1] for k in range(len(path))]
        agreed = sum(prefix in self.spine for prefix in prefixes)
        pages = self.pages()
        usable = [k for k in range(1, agreed + 1) if self.tail(path[:k]) <= pages]
        hit = max(usable, default=0)
        free = {k for k in range(1, len(path)) if not self.tail(path[:k])}
        was_point = path[:hit] in self.points
        if was_point:
            self.points[path[:hit]] = (self.now - 0.5, -hit)
        if not path or self.bytes_of(set(prefixes), self.tail(path)) > self.budget:
            self.points |= {path[:k]: (self.now, -k) for k in free if k < hit and path[:k] in self.points}
            return hit
        wanted = {len(path)}
        if hit < agreed:
            wanted.add(agreed)
        if was_point:
            wanted.add(hit)
        if self.every:
            wanted |= {k for k in range(hit + 1, len(path)) if k % self.every == 0}
        kept = sorted(wanted)
        while self.bytes_of(set(prefixes), set().union(*(self.tail(path[:k]) for k in kept))) > self.budget:
            del kept[0]
        self.spine |= set(prefixes)
        self.points |= {path[:k]: (self.now, -k) for k in {*kept, *free}}
        while self.held() > self.budget:
            self.drop(min(self.points, key=lambda at: self.points[at]), path)
        return hit

    def drop(self, at: Path, running: Path) -> None:
        del self.points[at]
        while at and at not in self.points and not any(other[: len(at)] == at and other != at for other in self.spine):
            if running[: len(at)] == at:
                return
            self.spine.discard(at)
            at = at[:-1]

    def tail(self, at: Path) -> set[tuple[int, Path]]:
        """Pages of short groups that a boundary needs: group, and the prefix up to the block."""
        return {
            (g, at[:k])
            for g, pages in enumerate(self.groups[1:], 1)
            for k in range(len(at) - pages.need(len(at)) + 1, len(at) + 1)
        }

    def pages(self) -> set[tuple[int, Path]]:
        return set().union(*(self.tail(at) for at in self.points))

    def bytes_of(self, spine: set[Path], pages: set[tuple[int, Path]]) -> int:
        return len(spine) * self.groups[0].page_bytes + sum(self.groups[g].page_bytes for g, _ in pages)

    def held(self) -> int:
        return self.bytes_of(self.spine, self.pages())
