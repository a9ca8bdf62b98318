from typing import Any

from numpy.typing import NDArray

DTYPES: dict[str, int]

def isas() -> list[str]: ...
def plainly_fits(
    q: Any, k: Any, v: Any, seq_lens: Any, block_tables: Any, q_indptr: Any, out: Any, lse: Any
) -> bool: ...
def attend(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    out: NDArray[Any],
    seq_lens: NDArray[Any],
    block_tables: NDArray[Any] | None,
    q_indptr: NDArray[Any] | None,
    kv_indptr: NDArray[Any] | None,
    lse: NDArray[Any] | None,
    slopes: NDArray[Any] | None,
    sinks: NDArray[Any] | None,
    mask: NDArray[Any] | None,
    mask_indptr: NDArray[Any] | None,
    q_positions: NDArray[Any] | None,
    k_scale: NDArray[Any] | None,
    v_scale: NDArray[Any] | None,
    q_dtype: str,
    kv_dtype: str,
    block_size: int,
    scale: float,
    soft_cap: float,
    window: int,
    causal: bool,
    threads: int,
    isa: str,
) -> None: ...
