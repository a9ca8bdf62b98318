"""What pagedkv's attention is checked against: the same in float64 NumPy.

Written to be read, not to be fast. It imports nothing else of pagedkv, so it cannot share its mistakes.
"""

from .attention import online_softmax_attention, paged_attention
from .mask import pack_mask
from .online import OnlineState, merge_states

__all__ = ["OnlineState", "merge_states", "online_softmax_attention", "pack_mask", "paged_attention"]
