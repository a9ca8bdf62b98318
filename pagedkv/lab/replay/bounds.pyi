import numpy as np
from numpy.typing import NDArray

NEVER: int

def next_uses(paths: NDArray[np.int32], offsets: NDArray[np.int64], num_unique: int) -> NDArray[np.int32]: ...
def held_prefixes(
    paths: NDArray[np.int32], offsets: NDArray[np.int64], num_unique: int, events: NDArray[np.int32], capacity: int
) -> NDArray[np.int32]: ...
def lru_hits(
    paths: NDArray[np.int32],
    offsets: NDArray[np.int64],
    parents: NDArray[np.int32],
    capacity: int,
    events: NDArray[np.int32] | None = None,
) -> NDArray[np.int32]: ...
def min_hits(
    paths: NDArray[np.int32],
    offsets: NDArray[np.int64],
    parents: NDArray[np.int32],
    next_use: NDArray[np.int32],
    capacity: int,
    events: NDArray[np.int32] | None = None,
) -> NDArray[np.int32]: ...
def min_bypass_hits(
    paths: NDArray[np.int32],
    offsets: NDArray[np.int64],
    parents: NDArray[np.int32],
    next_use: NDArray[np.int32],
    capacity: int,
) -> NDArray[np.int32]: ...
