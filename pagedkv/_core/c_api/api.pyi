from pagedkv._core.block_pool import BlockPool
from pagedkv._core.block_table import BlockTable
from pagedkv._core.placement import Placement

CAPSULE: object
ADDRESS: int

def handle_of(thing: BlockPool | Placement | BlockTable) -> int: ...
