"""The arithmetic of KV: bytes, blocks, waste, batch sizes, sharing, times, and a planner.

Pure functions; nothing here touches a cache. Tokens, blocks and bytes are whole numbers, times are seconds, rates are
bytes or operations per second. docs/sizing.md checks the worked examples of five texts with them: "the texts" here.
"""

from pagedkv.lab.sizing.blocks import blocks_needed as blocks_needed
from pagedkv.lab.sizing.blocks import contiguous_utilisation as contiguous_utilisation
from pagedkv.lab.sizing.blocks import expected_utilisation as expected_utilisation
from pagedkv.lab.sizing.blocks import expected_waste as expected_waste
from pagedkv.lab.sizing.blocks import mean_waste as mean_waste
from pagedkv.lab.sizing.blocks import table_bytes as table_bytes
from pagedkv.lab.sizing.blocks import total_blocks as total_blocks
from pagedkv.lab.sizing.blocks import utilisation as utilisation
from pagedkv.lab.sizing.blocks import waste_ratio as waste_ratio
from pagedkv.lab.sizing.blocks import wasted_tokens as wasted_tokens
from pagedkv.lab.sizing.capacity import MemorySavings as MemorySavings
from pagedkv.lab.sizing.capacity import batch_size as batch_size
from pagedkv.lab.sizing.capacity import memory_savings as memory_savings
from pagedkv.lab.sizing.capacity import paged_batch_size as paged_batch_size
from pagedkv.lab.sizing.capacity import users_on_gpus as users_on_gpus
from pagedkv.lab.sizing.machines import GPUS as GPUS
from pagedkv.lab.sizing.machines import Gpu as Gpu
from pagedkv.lab.sizing.machines import Machines as Machines
from pagedkv.lab.sizing.machines import find_gpu as find_gpu
from pagedkv.lab.sizing.models import MODELS as MODELS
from pagedkv.lab.sizing.models import Model as Model
from pagedkv.lab.sizing.models import find_model as find_model
from pagedkv.lab.sizing.models import groups_of as groups_of
from pagedkv.lab.sizing.models import model_of_config as model_of_config
from pagedkv.lab.sizing.planner import plan as plan
from pagedkv.lab.sizing.result import Plan as Plan
from pagedkv.lab.sizing.result import TierPlan as TierPlan
from pagedkv.lab.sizing.shape import KVFormat as KVFormat
from pagedkv.lab.sizing.shape import LayerGroup as LayerGroup
from pagedkv.lab.sizing.shape import StateGroup as StateGroup
from pagedkv.lab.sizing.shape import block_bytes as block_bytes
from pagedkv.lab.sizing.shape import mla as mla
from pagedkv.lab.sizing.shape import sequence_bytes as sequence_bytes
from pagedkv.lab.sizing.shape import token_bytes as token_bytes
from pagedkv.lab.sizing.sharing import Saving as Saving
from pagedkv.lab.sizing.sharing import fork_sharing as fork_sharing
from pagedkv.lab.sizing.sharing import prefix_sharing as prefix_sharing
from pagedkv.lab.sizing.sharing import shareable_blocks as shareable_blocks
from pagedkv.lab.sizing.sharing import tree_blocks_per_sequence as tree_blocks_per_sequence
from pagedkv.lab.sizing.timing import PagedCost as PagedCost
from pagedkv.lab.sizing.timing import decode_seconds as decode_seconds
from pagedkv.lab.sizing.timing import paged_cost as paged_cost
from pagedkv.lab.sizing.timing import prefill_seconds as prefill_seconds
from pagedkv.lab.sizing.timing import request_seconds as request_seconds
from pagedkv.lab.sizing.timing import tokens_per_second as tokens_per_second
from pagedkv.lab.sizing.timing import transfer_seconds as transfer_seconds
from pagedkv.lab.sizing.users import Users as Users
