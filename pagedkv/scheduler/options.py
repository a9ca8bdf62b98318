"""How a scheduler schedules; checked once, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.spec.budgets import check_choice
from pagedkv.spec.sizes import whole_number

ORDERS = ("first_come", "longest_prefix")
ADMISSIONS = ("prompt", "worst_case")
PREEMPTIONS = ("measured", "swap", "recompute")


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Options of a :class:`Scheduler`.

    Attributes
    ----------
    max_running : int
        Sequences that run at once; a request with beams or parallel samples counts as that many.
    max_batch_tokens : int
        Tokens of one step, more than `max_running`: every running sequence gets its token, and what is left goes to
        prompts, in chunks.
    order : ``"first_come"`` or ``"longest_prefix"``
        Which waiting request to take next. ``"longest_prefix"``: of the first `window`, the one with most cached
        tokens; no request is overtaken more than `window` times.
    window : int
    admission : ``"prompt"`` or ``"worst_case"``
        What must fit before a request begins: its prompt, and then a request may have to be suspended later; or all
        it can ever need, and then none ever is.
    watermark : float
        Share of the device's blocks, 0..0.9, that admission leaves free for the sequences that run. A request that runs
        alone may have them all.
    lookahead : int
        Token slots that each step allocates beyond each sequence's tokens, for drafts that the model writes itself.
    preemption : ``"measured"``, ``"swap"`` or ``"recompute"``
        How a request that has to be suspended gets its KV back where there is a colder tier: by what is cheaper as
        measured (swap, as long as nothing was), or always from that tier, or always by computing it again.
    priority_tokens : int
        How far a level of priority lets a request pass others: as if it had come so many tokens of service earlier.
    """

    max_running: int = 256
    max_batch_tokens: int = 2048
    order: str = "first_come"
    window: int = 16
    admission: str = "prompt"
    preemption: str = "measured"
    watermark: float = 0.01
    lookahead: int = 0
    priority_tokens: int = 65536

    def __post_init__(self) -> None:
        whole_number(self.max_running, "max_running", 1, 1 << 20)
        whole_number(self.max_batch_tokens, "max_batch_tokens", 1, 1 << 24)
        if self.max_batch_tokens <= self.max_running:
            raise InvalidArgument(
                f"max_batch_tokens = {self.max_batch_tokens} leaves no room for prompts beside max_running = "
                f"{self.max_running} sequences of one token each: it must be larger"
            )
        check_choice("order", self.order, ORDERS)
        check_choice("admission", self.admission, ADMISSIONS)
        check_choice("preemption", self.preemption, PREEMPTIONS)
        whole_number(self.window, "window", 1, 1 << 16)
        whole_number(self.lookahead, "lookahead", 0, 1 << 10)
        whole_number(self.priority_tokens, "priority_tokens", 0, 1 << 40)
        if isinstance(self.watermark, bool) or not isinstance(self.watermark, int | float):
            raise WrongType(f"watermark must be a number, not {type(self.watermark).__name__}")
        if not 0 <= self.watermark <= 0.9:
            raise InvalidArgument(f"watermark must be a share of the device's blocks, 0..0.9, not {self.watermark}")
