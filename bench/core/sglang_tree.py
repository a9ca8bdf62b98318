"""SGLang's UnifiedRadixCache and allocator, by short names.

The Rust core, from the wheel at ``PEER_SGLANG``.
"""

from __future__ import annotations

import os
import sys
import warnings
from array import array
from typing import Any

from bench.core import stubs
from bench.core.workloads import BLOCK_SIZE

sys.path.insert(0, os.environ["PEER_SGLANG"])
warnings.filterwarnings("ignore")
stubs.install("torchvision", "triton", "sgl_kernel", "flashinfer", "gguf", "compressed_tensors", "decord")

import torch  # noqa: E402
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402

torch.set_num_threads(1)
VARIANT = "rust"


def make_allocator(num_tokens: int) -> PagedTokenToKVPoolAllocator:
    allocator = PagedTokenToKVPoolAllocator(num_tokens, BLOCK_SIZE, torch.bfloat16, "cpu", None, False)
    allocator.use_triton_kernels = False
    return allocator


class Tree:
    """The calls a scheduler makes on the cache, by short names."""

    def __init__(self, num_tokens: int) -> None:
        self.allocator = make_allocator(num_tokens)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.allocator,
            page_size=BLOCK_SIZE,
        )
        params.tree_components = (ComponentType.FULL,)
        params.tree_core_backend = VARIANT
        self.cache = UnifiedRadixCache(params)

    def key(self, tokens: list[int]) -> array[int]:
        return array("q", tokens)

    def match(self, key: array[int]) -> tuple[int, Any]:
        result = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(key)))
        return result.device_prefix_len, result.last_device_node

    def slots(self, node: Any) -> torch.Tensor:
        return self.cache.path_device_indices(node)

    def insert(self, key: array[int], slots: torch.Tensor, num_owned: int = 0) -> tuple[int, Any]:
        whole = len(key) // BLOCK_SIZE * BLOCK_SIZE
        result = self.cache.insert(
            InsertParams(key=RadixKey(key[:whole]), value=slots[:whole], prev_prefix_len=num_owned)
        )
        return result.prefix_len, result.last_device_node

    def lock(self, node: Any) -> tuple[Any, Any]:
        return node, self.cache.inc_lock_ref(node).to_dec_params()

    def unlock(self, lock: tuple[Any, Any]) -> None:
        self.cache.dec_lock_ref(*lock)

    def evict(self, num_tokens: int) -> None:
        self.cache.evict(EvictParams(num_tokens=num_tokens))

    def evictable(self) -> int:
        return int(self.cache.full_evictable_size())

    def allocate(self, num_tokens: int) -> torch.Tensor:
        """Slots for `num_tokens`, evicting what is missing."""
        missing = num_tokens - self.allocator.available_size()
        if missing > 0:
            self.evict(missing)
        return self.allocator.alloc(num_tokens)
