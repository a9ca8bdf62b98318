"""What pagedkv is checked against: attention in float64 NumPy, and a model of the cache in plain Python.

Written to be read, not to be fast. It imports nothing else of pagedkv, so it cannot share its mistakes.
"""

from .attention import online_softmax_attention, paged_attention
from .cache_model import CacheModel
from .mask import pack_mask
from .online import OnlineState, merge_states

__all__ = ["CacheModel", "OnlineState", "merge_states", "online_softmax_attention", "pack_mask", "paged_attention"]
