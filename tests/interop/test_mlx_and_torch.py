"""MLX and PyTorch themselves.

Their arrays in our calls, and what they do with ours where `fit` refuses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.errors import ExchangeRefused, LayoutMismatch
from pagedkv.interop import as_array, as_view, empty, export, fit


def test_mlx_arrays_are_read_where_they_lie_once_they_are_computed(mx: Any):
    array = mx.ones((4, 8)) * 3  # lazy until asked for
    view = as_view(array)
    assert view.ptr == np.asarray(memoryview(array)).ctypes.data
    assert as_array(array).tolist() == np.full((4, 8), 3.0).tolist()
    half = (mx.arange(8) / 2).astype(mx.bfloat16)
    assert as_view(half).dtype == "bfloat16"
    assert as_array(half).astype(np.float32).tolist() == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]


def test_mlx_copies_whatever_it_is_given_and_narrows_float64_and_so_it_has_to_be_said(mx: Any):
    view = empty((4,), "float32", alignment=4096)
    view.numpy()[...] = 1
    taken = mx.from_dlpack(view)
    view.numpy()[...] = 2
    assert taken.tolist() == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="copy"):
        mx.from_dlpack(view, copy=False)
    with pytest.raises(ExchangeRefused, match="copies all"):
        fit(view, "mlx")
    with pytest.raises(ExchangeRefused, match="float64"):
        fit(empty((4,), "float64"), "mlx", copy=True)


def test_torch_tensors_are_read_where_they_lie_and_refusals_are_passed_on(torch: Any):
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        tensor = (torch.arange(24).reshape(4, 6) % 3).to(dtype)
        for part in (tensor, tensor.T, tensor[::2, 1:]):
            view = as_view(part)
            assert view.ptr == part.data_ptr()
            assert not view.read_only
            assert as_array(part).astype(np.float32).tolist() == part.float().tolist()
    with pytest.raises(ExchangeRefused, match="detach"):
        as_view(torch.ones(3, requires_grad=True))
    with pytest.raises(ExchangeRefused, match="strided"):
        as_view(torch.ones(3).to_sparse())


def test_torch_writes_to_what_is_read_only_and_so_it_is_refused(torch: Any):
    array = empty((4,), "float32").numpy()
    array[...] = 1
    torch.from_dlpack(export(array))[0] = 5
    assert array[0] == 5
    with pytest.raises(ExchangeRefused, match="read-only"):
        fit(export(array), "torch")
    torch.from_dlpack(fit(export(array), "torch", copy=True))[1] = 5
    assert array[1] == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_step_with_torch_tensors_shares_their_memory(torch: Any, dtype: str):
    kind = getattr(torch, dtype)
    spec = pk.KVSpec(1, 2, 8, dtype, 4)
    with pk.KVCache(spec, pk.Blocks(8)) as cache, cache.sequence(range(6)) as seq:
        k, v = torch.randn(2, 6, 2, 8, generator=torch.Generator().manual_seed(0)).to(kind)
        q, out = torch.randn(6, 4, 8), torch.zeros(6, 4, 8)
        with cache.step([seq]) as step:
            step.write(0, k, v)
            assert step.attend(0, q, out=out) is out
            assert np.array_equal(out.numpy(), step.attend(0, q.numpy()))
            with pytest.raises(LayoutMismatch, match="detach"):
                step.attend(0, q.requires_grad_())
        found = tuple(torch.empty(1, 6, 2, 8, dtype=kind) for _ in "kv")
        assert seq.gather(out=found) is found
        assert torch.equal(found[0][0], k)
        assert torch.equal(found[1][0], v)
