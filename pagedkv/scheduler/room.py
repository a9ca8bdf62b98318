"""Room for requests: blocks and sequences beside those that run and load."""

from __future__ import annotations

from pagedkv.cache.cache import KVCache
from pagedkv.errors import InvalidArgument, OutOfBlocks
from pagedkv.scheduler.lanes import Lanes
from pagedkv.scheduler.loading import Loading
from pagedkv.scheduler.needs import Amount, needs_of
from pagedkv.scheduler.options import SchedulerOptions
from pagedkv.scheduler.request import Branch, Request
from pagedkv.scheduler.sharing import Sharing


class NoSequences(InvalidArgument):
    """A request lacks sequences, because others than the scheduler hold them."""


class Room:
    """The running and loading requests, and the room beside them.

    Attributes
    ----------
    requests : list of Request, by rank
    lanes : Lanes
    computing : list of Branch
    held : list of Request
    loading : Loading
    sharing : the blocks that branches of `computing` take from each other.
    needs : Needs
    short_since : moves that had ended when the requests that run lacked room and the plan was empty; None: it was not.
    width : sequences that the running requests may come to have.
    worst_blocks : Amount that they may come to hold, shared blocks counted for each.
    alone : Request or None
        It was suspended because its pages lay scattered, and runs by itself until it has ended.
    """

    def __init__(self, cache: KVCache, options: SchedulerOptions) -> None:
        self._cache, self._options = cache, options
        self._table, self._placement, self._moves = cache.table, cache.placement, cache.moves
        pool = self._placement.pools[0]
        assert pool is not None
        self._pool = pool
        self._seen = self._known = 0
        self.short_since: int | None = None
        self.needs = needs_of(cache, options)
        self.loading = Loading(cache, options)
        self.sharing = Sharing(cache, options.share if self.needs.can_share else "never")
        self.requests: list[Request] = []
        self.lanes = Lanes(options.max_running)
        self.computing: list[Branch] = []
        self.held: list[Request] = []
        self.width = 0
        self.worst_blocks: Amount = self.needs.nothing
        self.alone: Request | None = None

    # ---- blocks

    def lacks(self, amount: Amount) -> bool:
        """Whether a step cannot be given so much.

        It may have free blocks and those that the tree alone owns, less those kept for requests that load.
        """
        self._seen = self._moves.num_ended  # before it looks: what ends after this is worth another look
        self._known = self._pool.num_obtainable
        return self.needs.lacks(amount, self._known - self.loading.reserved)

    def out_of_blocks(self, asked: Amount) -> OutOfBlocks:
        """The error for a scheduler whose last request does not fit beside what others hold."""
        return self._placement.out_of_blocks(self.needs.as_blocks(asked))

    def wait(self, *, alone: bool) -> bool:
        """Wait until a move or a prefetch is over, which may leave room; False if there is none.

        One that has ended since :meth:`lacks` was asked, or since the last wait, counts.

        Unless the caller is alone, and holds up no other request, it is not waited for reads from slower tiers, and
        only for one that has left more room than :meth:`lacks` knew: a question to the store ends, too, and leaves
        none. The next attempt would ask again, for ever.
        """
        if alone:
            is_over = self._moves.wait_since(self._seen)
            self._seen = self._moves.num_ended
            return is_over
        while self._moves.room_comes(self._seen):
            seen = self._seen
            self._seen = self._moves.num_ended
            if not self._moves.wait_since(seen):
                return False
            if (room := self._pool.num_obtainable) > self._known:
                self._known = room  # the next one needs more, also where the caller does not ask `lacks` in between
                return True
        return False

    def left_by_others(self) -> tuple[int, int]:
        """Blocks and sequences that others than the scheduler do not hold."""
        rows = self._rows(self.requests)
        needs = self.needs
        own = needs.held(rows, self.loading.blocks()) + self.loading.num_moving
        others = needs.live() - own  # in this order: what a move gives back in between is not taken for others'
        blocks = needs.capacity - needs.as_blocks(others)
        return blocks, self._cache.max_sequences - self._table.num_rows + len(rows)

    def fits(self, request: Request, room: tuple[int, int]) -> bool:
        """Whether a request fits at its largest, alone, into so many blocks and sequences."""
        blocks, sequences = room
        return self.needs.as_blocks(request.worst_blocks) <= blocks and request.width <= sequences

    def is_beyond(self, request: Request) -> bool:
        """Whether a running request needs more blocks than its worst case.

        Its branches share less than they could.
        """
        return self.needs.exceeds(self.needs.held(self._rows([request])) + self.promised(), request.worst_blocks)

    def is_scattered(self, request: Request) -> bool:
        """Whether a request that is left alone would have room if its pages lay close together.

        Over groups of layers a single page keeps its extent from the other groups. A uniform cache has no extents.
        """
        return self.alone is not request and self.needs.may_scatter and self.fits(request, self.left_by_others())

    def _rows(self, requests: list[Request]) -> list[int]:
        return [branch.seq.row for request in requests for branch in request.live() if branch.seq is not None]

    def pending(self, branch: Branch) -> int:
        """Tokens of it that are not computed."""
        assert branch.seq is not None
        num_tokens, computed, _, _ = self._table.info(branch.seq.row)
        return num_tokens - computed

    def wanted(self, branch: Branch) -> int:
        """Tokens that a branch of `computing` still has to compute before it is done with that."""
        return self.pending(branch) - (branch.request in self.held)

    def fills(self, num_tokens: int) -> bool:
        """Whether the branches of `computing` ask a step for `num_tokens` or more.

        Tokens that they share count once.
        """
        asked = sum(map(self.wanted, self.computing))
        return asked >= num_tokens and asked - self.sharing.saved_tokens(self.computing) >= num_tokens

    def promised(self) -> Amount:
        """The blocks that running sequences need to finish their prompts.

        The lanes' next step, prompts to their end.
        """
        need = self.needs.of_step(self.lanes.rows)
        if self.computing:
            rows = [branch.seq.row for branch in self.computing if branch.seq is not None]
            need = need + self.needs.to_finish(rows) - self.sharing.saved_blocks(self.computing)
        return need

    def waits_for_reads(self) -> bool:
        """Whether what found no room has it when reads of loads that were given up are over.

        Then nothing can run before that, and the plan is empty.
        """
        if not self.is_room_coming():
            return False
        self.short_since = self._seen
        return True

    def waits_beside_loads(self) -> None:
        """No chunk fits beside the loads of better rank: the plan is empty though a request runs."""
        self.short_since = self._seen

    def is_room_coming(self) -> bool:
        """Whether reads are under way that leave their blocks to others: their loads were given up."""
        return self._moves.num_unowned > 0

    def _may_open(self) -> bool:
        """Whether others than the scheduler have left a sequence."""
        return self._table.num_rows < self._cache.max_sequences

    # ---- sequences

    def has_place(self, request: Request) -> bool:
        """Whether there are sequences left for a request.

        And, where that is wanted, blocks for its worst case.

        Raises
        ------
        NoSequences
            Nothing else runs, and still there are too few: others than the scheduler hold the cache's sequences.
        """
        options, loading, needs = self._options, self.loading, self.needs
        if self.width + loading.width + request.width > options.max_running:
            return False
        if self._lacks_sequences(request.width):
            if self.requests or loading:
                return False
            raise self._no_sequences(request)
        if options.admission == "worst_case" and (self.requests or loading):
            worst = self.worst_blocks + loading.worst_blocks + request.worst_blocks
            return needs.as_blocks(worst + needs.watermark) <= needs.capacity
        return True

    def _lacks_sequences(self, more: int) -> bool:
        """Whether too few sequences are free for so many more.

        Beside the branches that the running requests may get.
        """
        free = self._cache.max_sequences - self._table.num_rows - more - self.loading.width
        to_come = self.width - len(self.lanes.branches) - len(self.computing)  # or fewer
        if free >= to_come:
            return False
        return free < sum(map(_most_branches, self.requests)) - len(self._rows(self.requests))

    def _no_sequences(self, request: Request) -> NoSequences:
        others = self._table.num_rows - len(self._rows(self.requests))
        return NoSequences(
            f"{request} needs {request.width} sequences, and others than the scheduler hold {others} of the cache's "
            f"{self._cache.max_sequences}: release them, or open the cache with a larger max_sequences"
        )


def _most_branches(request: Request) -> int:
    """Branches that a running request may come to have.

    Beams fork again and again, samples once.
    """
    live = request.live()
    return request.width if request.beams > 1 or not live[0].num_output else len(live)
