"""How a scheduler schedules; checked once, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.spec.budgets import check_choice
from pagedkv.spec.sizes import check_plain, whole_number

ORDERS = ("first_come", "longest_prefix")
ADMISSIONS = ("prompt", "worst_case")
MAX_RUNNING = 256  # by default
PREEMPTIONS = ("measured", "swap", "recompute")
SHARES = ("step", "next", "never")


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Options of a :class:`Scheduler`.

    Attributes
    ----------
    max_running : int
        Sequences that run at once; a request with beams or parallel samples counts as that many. Default: 256, or one
        fewer than `max_batch_tokens` where that is less.
    max_batch_tokens : int
        Tokens of one step, more than `max_running`: every running sequence gets its token, and prompts get
        the rest, in chunks.
    order : ``"first_come"`` or ``"longest_prefix"``
        Which waiting request to take next. ``"longest_prefix"``: of the first `window`, the one with most cached
        tokens; no request is overtaken more than `window` times.
    window : int
    admission : ``"prompt"`` or ``"worst_case"``
        The blocks that must fit before a request begins: its prompt's, and then a request may have to be suspended
        later; or all that it can ever need, and then none ever is.
    watermark : float
        Share of the device's blocks, 0..0.9, that admission leaves free for the sequences that run. A request that runs
        alone may have them all.
    lookahead : int
        Token slots that each step allocates beyond each sequence's tokens, for drafts that the model writes itself.
    preemption : ``"measured"``, ``"swap"`` or ``"recompute"``
        How a request that has to be suspended gets its KV back where there is a colder tier: the cheaper way as
        measured (swap, as long as nothing was), or always from that tier, or always by computing it again.
    loading_share : float
        Share of the device's blocks, 0..1, that requests may have whose cached prefixes are being loaded from slower
        tiers while others run; one of them is always allowed to load. 0: such a request is loaded by the call of
        `schedule` that begins it, and the others wait.
    priority_tokens : int
        How far a level of priority lets a request pass others: as if it had come so many tokens of service earlier.
    max_waiting : int, optional
        Requests that may wait before they begin; a further one is refused with QueueFull. Suspended requests do not
        count: they have begun. Default: no bound.
    share : ``"step"``, ``"next"`` or ``"never"``
        How a prompt takes the same tokens from a better placed request of the same namespace. ``"step"``:
        whole blocks at once, in the step that computes them; for engines that write all rows of a layer before they
        attend any, as ``step.write`` and ``step.attend`` do. ``"next"``: it waits for them and begins one step later;
        for engines that go row by row. ``"never"``: each request computes all tokens not cached when it began; so it
        does over a cache by groups, whatever is said here.
    """

    max_running: int = None  # type: ignore[assignment]  # made a number below
    max_batch_tokens: int = 2048
    order: str = "first_come"
    window: int = 16
    admission: str = "prompt"
    preemption: str = "measured"
    watermark: float = 0.01
    lookahead: int = 0
    loading_share: float = 0.25
    priority_tokens: int = 65536
    max_waiting: int | None = None
    share: str = "step"

    def __post_init__(self) -> None:
        whole_number(self.max_batch_tokens, "max_batch_tokens", 2, 1 << 24)
        if self.max_running is None:
            object.__setattr__(self, "max_running", min(MAX_RUNNING, self.max_batch_tokens - 1))
        whole_number(self.max_running, "max_running", 1, 1 << 20)
        if self.max_batch_tokens <= self.max_running:
            raise InvalidArgument(
                f"max_batch_tokens = {self.max_batch_tokens} leaves no room for prompts beside max_running = "
                f"{self.max_running} sequences of one token each: it must be larger"
            )
        check_choice("order", self.order, ORDERS)
        check_choice("admission", self.admission, ADMISSIONS)
        check_choice("preemption", self.preemption, PREEMPTIONS)
        check_choice("share", self.share, SHARES)
        whole_number(self.window, "window", 1, 1 << 16)
        whole_number(self.lookahead, "lookahead", 0, 1 << 10)
        whole_number(self.priority_tokens, "priority_tokens", 0, 1 << 40)
        if self.max_waiting is not None:
            whole_number(self.max_waiting, "max_waiting", 1, 1 << 40)
        _check_share("watermark", self.watermark, 0.9)
        _check_share("loading_share", self.loading_share, 1)


def _check_share(name: str, value: float, most: float) -> None:
    check_plain(value, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WrongType(f"{name} must be a number, not {type(value).__name__}")
    if not 0 <= value <= most:
        raise InvalidArgument(f"{name} must be a share of the device's blocks, 0..{most}, not {value}")
