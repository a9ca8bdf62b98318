"""The read ceiling: sums pages of memory at full speed.

For benchmarks; nothing in the library calls it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedkv.errors import InvalidArgument, LayoutMismatch, WrongType
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.params import address, fill
from pagedkv.kernels.variant import Variant, variant

THREADS = 256
CTAS_PER_SM = 6
VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class PageRead:
    """How pages are read.

    Parameters
    ----------
    page_bytes : of a page, a multiple of 16 (and of ``heads * row_bytes``).
    heads, row_bytes : with several heads a page is tokens of ``heads`` rows each; all pages' rows of head 0 are read
        first, then those of head 1, as attention does. Default: pages are read whole.
    paged : the pages' ids come from a table; otherwise they are read in the order of memory.

    Raises
    ------
    InvalidArgument
        The sizes do not divide each other.
    """

    page_bytes: int
    heads: int = 1
    row_bytes: int = 0
    paged: bool = True

    def __post_init__(self) -> None:
        row = self.row_bytes or self.page_bytes
        if row < VECTOR_BYTES or row % VECTOR_BYTES or self.heads < 1 or self.page_bytes % (self.heads * row):
            raise InvalidArgument(
                f"page_bytes = {self.page_bytes} must be a multiple of heads * row_bytes = {self.heads} * {row}, and "
                f"row_bytes of {VECTOR_BYTES}"
            )

    def variant(self) -> Variant:
        """The kernel that reads so."""
        row = self.row_bytes or self.page_bytes
        return variant(
            "bench_read",
            PAGED=self.paged,
            PAGE_VECS=self.page_bytes // VECTOR_BYTES,
            HEADS=self.heads,
            ROW_VECS=row // VECTOR_BYTES,
        )


def num_sums(backend: Backend) -> int:
    """Length of ``sums``: one for each CTA."""
    return backend.num_sms * CTAS_PER_SM


def read_pages(
    backend: Backend,
    how: PageRead,
    data: Any,
    sums: Any,
    *,
    pages: Any = None,
    num_pages: int | None = None,
    stream: Any = None,
) -> None:
    """Sum the 32-bit words of pages, wrapping; the total of ``sums`` is that of all words read.

    Parameters
    ----------
    data : contiguous array of any dtype, page 0 at its first element.
    sums : uint32 [num_sums(backend)], written.
    pages : int32 [num_pages] with ``how.paged``, contiguous: which pages, in which order.
    num_pages : without ``how.paged``: how many; default all that ``data`` holds.
    stream : of the backend; the call returns before the kernel has run.

    Raises
    ------
    InvalidArgument, LayoutMismatch, WrongType
        An array does not fit. Nothing was launched.
    """
    if (pages is not None) != how.paged:
        raise InvalidArgument(f"paged = {how.paged}: pages must {'' if how.paged else 'not '}be given")
    if not data.flags.c_contiguous or address(data) % VECTOR_BYTES:
        raise LayoutMismatch(f"data must be contiguous and begin at a multiple of {VECTOR_BYTES} bytes")
    held = data.nbytes // how.page_bytes
    if pages is not None and (pages.dtype != np.int32 or pages.ndim != 1 or not pages.flags.c_contiguous):
        raise WrongType(f"pages must be contiguous int32 [num_pages], got {pages.dtype} {pages.shape}")
    if isinstance(pages, np.ndarray) and pages.size and not 0 <= int(pages.min()) <= int(pages.max()) < held:
        raise InvalidArgument(f"pages has {int(pages.min())}..{int(pages.max())}, but data holds pages 0..{held - 1}")
    if sums.dtype != np.uint32 or sums.shape != (num_sums(backend),):
        raise WrongType(f"sums must be uint32 [{num_sums(backend)}], got {sums.dtype} {sums.shape}")
    count = len(pages) if pages is not None else held if num_pages is None else num_pages
    if not 0 <= count <= held and pages is None:
        raise InvalidArgument(f"num_pages must be in 0..{held} (what data holds), got {count}")
    params = fill(
        "BenchReadParams",
        data=data,
        pages=pages,
        sums=sums,
        page_stride=how.page_bytes // VECTOR_BYTES,
        num_pages=count,
    )
    backend.launch(how.variant(), (num_sums(backend), 1, 1), (THREADS, 1, 1), params, stream=stream)
