"""Public names of the core.

Block pool, prefix tree, placement over tiers, sequences' block tables, durable keys.

Integers and tokens only. A runtime with kernels of its own needs no more than this module and :mod:`pagedkv.attention`.
"""

from pagedkv._core.block_pool import FUNCTIONS as FUNCTIONS
from pagedkv._core.block_pool import BlockPool as BlockPool
from pagedkv._core.block_pool import ExtentPool as ExtentPool
from pagedkv._core.block_table import BlockTable as BlockTable
from pagedkv._core.block_table import GroupArrays as GroupArrays
from pagedkv._core.block_table import StepArrays as StepArrays
from pagedkv._core.boundaries import Boundaries as Boundaries
from pagedkv._core.c_api import get_include as get_include
from pagedkv._core.chain_key import chain_key as chain_key
from pagedkv._core.chain_key import chain_keys as chain_keys
from pagedkv._core.events import KVEvent as KVEvent
from pagedkv._core.no_token import NO_TOKEN as NO_TOKEN
from pagedkv._core.placement import DEFAULT_PRIORITY as DEFAULT_PRIORITY
from pagedkv._core.placement import MOVE_DTYPE as MOVE_DTYPE
from pagedkv._core.placement import Placement as Placement
from pagedkv._core.policies.registry import POLICIES as POLICIES
from pagedkv._core.policies.registry import policies as policies
from pagedkv._core.policies.registry import policy_needs_chain as policy_needs_chain
from pagedkv._core.policies.requests import Requests as Requests
from pagedkv._core.policies.requests import requests_of as requests_of
from pagedkv._core.radix_tree import RadixTree as RadixTree
from pagedkv._core.row_info import RowInfo as RowInfo
from pagedkv._core.tier import TIER_NAMES as TIER_NAMES
from pagedkv._core.tier import Tier as Tier
