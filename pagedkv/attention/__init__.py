"""Attention on arrays: plan once per step, run once per layer.

Also one-shot calls, shared prefixes (cascade), and writes into slots.

Public functions for runtimes that keep their own KV pools. CUDA kernels compute on CuPy arrays, C kernels on NumPy's.
"""

from pagedkv.attention.cascade import CascadeAttention
from pagedkv.attention.functions import forward
from pagedkv.attention.kv_writer import write_kv
from pagedkv.attention.merge import merge_states
from pagedkv.attention.paged_attention import PagedAttention
from pagedkv.reference import pack_mask

__all__ = ["CascadeAttention", "PagedAttention", "forward", "merge_states", "pack_mask", "write_kv"]
