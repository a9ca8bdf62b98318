from typing import Any

import numpy as np
from numpy.typing import NDArray

SOURCES: dict[str, int]
CACHES: dict[str, int]
BYTES: str

def plainly_fits(k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any) -> bool: ...
def write(
    k: NDArray[Any],
    v: NDArray[Any],
    k_cache: NDArray[Any],
    v_cache: NDArray[Any],
    slots: NDArray[np.int64],
    k_scale: NDArray[np.float32] | None,
    v_scale: NDArray[np.float32] | None,
    k_dtype: str,
    v_dtype: str,
    kv_dtype: str,
    computed: bool,
    threads: int,
) -> bool: ...
def merge(
    states: NDArray[Any],
    lses: NDArray[np.float32],
    out: NDArray[Any],
    lse: NDArray[np.float32] | None,
    states_dtype: str,
    out_dtype: str,
    threads: int,
) -> None: ...
