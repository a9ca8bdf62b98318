"""bench_read against NumPy.

It sums every word of the pages once, whichever way it reads them.
"""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.errors import InvalidArgument, LayoutMismatch, WrongType
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.bench_read import PageRead, num_sums, read_pages


def words_of(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 2**32, count, np.uint32)


def total(backend: Backend, how: PageRead, data: np.ndarray, **pages: object) -> int:
    sums = backend.asarray(np.full(num_sums(backend), 0xFFFFFFFF, np.uint32))
    read_pages(backend, how, backend.asarray(data), sums, **pages)  # type: ignore[arg-type]
    return int(backend.to_host(sums).sum(dtype=np.uint64)) % 2**32


@pytest.mark.parametrize("num_pages", [0, 1, 5, 67])
def test_contiguous_pages_are_summed_to_their_end_and_no_further(backend: Backend, num_pages: int) -> None:
    data = words_of(70 * 256)
    found = total(backend, PageRead(1024, paged=False), data, num_pages=num_pages)
    assert found == int(data[: num_pages * 256].sum(dtype=np.uint64)) % 2**32


@pytest.mark.parametrize("how", [PageRead(1024), PageRead(1024, 4, 64), PageRead(768, 3, 16)])
def test_pages_of_a_table_are_summed_once_each_whole_or_head_by_head(backend: Backend, how: PageRead) -> None:
    words = how.page_bytes // 4
    data = words_of(90 * words)
    pages = np.random.default_rng(1).permutation(90)[:83].astype(np.int32)
    found = total(backend, how, data, pages=backend.asarray(pages))
    assert found == int(data.reshape(90, words)[pages].sum(dtype=np.uint64)) % 2**32


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="page_bytes = 1000"):
        PageRead(1000)
    with pytest.raises(InvalidArgument, match="heads"):
        PageRead(1024, 3, 16)


def test_arrays_that_do_not_fit_are_refused_before_a_launch(backend: Backend) -> None:
    data, sums = backend.asarray(words_of(1024)), backend.zeros((num_sums(backend),), np.uint32)
    with pytest.raises(InvalidArgument, match="pages must be given"):
        read_pages(backend, PageRead(1024), data, sums)
    with pytest.raises(WrongType, match="sums"):
        read_pages(backend, PageRead(1024, paged=False), data, sums[1:])
    with pytest.raises(InvalidArgument, match=r"0\.\.4"):
        read_pages(backend, PageRead(1024, paged=False), data, sums, num_pages=5)
    with pytest.raises(WrongType, match="pages"):
        read_pages(backend, PageRead(1024), data, sums, pages=backend.zeros((2,), np.int64))
    with pytest.raises(LayoutMismatch, match="contiguous"):
        read_pages(backend, PageRead(16, paged=False), data[::2], sums)
