from typing import Any

import numpy as np
from numpy.typing import NDArray

def gather(
    k: NDArray[Any],
    v: NDArray[Any],
    blocks: NDArray[np.int32],
    start: int,
    stop: int,
    k_out: NDArray[Any],
    v_out: NDArray[Any],
    threads: int,
) -> None: ...
