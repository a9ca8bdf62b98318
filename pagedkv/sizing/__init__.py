"""The arithmetic of KV: bytes per token, blocks, waste, batch sizes, sharing, times, and a planner over machines.

Pure functions; nothing here touches a cache. Tokens, blocks and bytes are whole numbers, times are seconds, rates are
bytes or operations per second. docs/sizing.md checks the worked examples of five texts with them: "the texts" here.
"""

from pagedkv.sizing.blocks import blocks_needed as blocks_needed
from pagedkv.sizing.blocks import contiguous_utilisation as contiguous_utilisation
from pagedkv.sizing.blocks import expected_utilisation as expected_utilisation
from pagedkv.sizing.blocks import expected_waste as expected_waste
from pagedkv.sizing.blocks import mean_waste as mean_waste
from pagedkv.sizing.blocks import table_bytes as table_bytes
from pagedkv.sizing.blocks import total_blocks as total_blocks
from pagedkv.sizing.blocks import utilisation as utilisation
from pagedkv.sizing.blocks import waste_ratio as waste_ratio
from pagedkv.sizing.blocks import wasted_tokens as wasted_tokens
from pagedkv.sizing.capacity import MemorySavings as MemorySavings
from pagedkv.sizing.capacity import batch_size as batch_size
from pagedkv.sizing.capacity import memory_savings as memory_savings
from pagedkv.sizing.capacity import paged_batch_size as paged_batch_size
from pagedkv.sizing.capacity import users_on_gpus as users_on_gpus
from pagedkv.sizing.machines import GPUS as GPUS
from pagedkv.sizing.machines import Gpu as Gpu
from pagedkv.sizing.machines import Machines as Machines
from pagedkv.sizing.machines import find_gpu as find_gpu
from pagedkv.sizing.models import MODELS as MODELS
from pagedkv.sizing.models import Model as Model
from pagedkv.sizing.models import find_model as find_model
from pagedkv.sizing.planner import plan as plan
from pagedkv.sizing.result import Plan as Plan
from pagedkv.sizing.result import TierPlan as TierPlan
from pagedkv.sizing.shape import KVFormat as KVFormat
from pagedkv.sizing.shape import LayerGroup as LayerGroup
from pagedkv.sizing.shape import block_bytes as block_bytes
from pagedkv.sizing.shape import mla as mla
from pagedkv.sizing.shape import sequence_bytes as sequence_bytes
from pagedkv.sizing.shape import token_bytes as token_bytes
from pagedkv.sizing.sharing import Saving as Saving
from pagedkv.sizing.sharing import fork_sharing as fork_sharing
from pagedkv.sizing.sharing import prefix_sharing as prefix_sharing
from pagedkv.sizing.sharing import shareable_blocks as shareable_blocks
from pagedkv.sizing.sharing import tree_blocks_per_sequence as tree_blocks_per_sequence
from pagedkv.sizing.timing import PagedCost as PagedCost
from pagedkv.sizing.timing import decode_seconds as decode_seconds
from pagedkv.sizing.timing import paged_cost as paged_cost
from pagedkv.sizing.timing import prefill_seconds as prefill_seconds
from pagedkv.sizing.timing import request_seconds as request_seconds
from pagedkv.sizing.timing import tokens_per_second as tokens_per_second
from pagedkv.sizing.timing import transfer_seconds as transfer_seconds
from pagedkv.sizing.users import Users as Users
