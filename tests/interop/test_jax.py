"""JAX itself.

Arrays in both directions, what JAX would do silently, and what a JAX array keeps alive.
"""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.errors import ExchangeRefused
from pagedkv.interop import as_array, as_view, empty, export, fit
from tests.collecting import collect_until


def test_its_arrays_are_read_where_they_lie_and_are_waited_for(jax: Any):
    jnp = jax.numpy
    for dtype in ("float32", "float16", "bfloat16", "float8_e4m3fn", "int32"):
        array = (jnp.arange(32).reshape(4, 8) % 5).astype(dtype)
        view = as_view(array)
        assert (view.dtype, view.ptr) == (dtype, array.unsafe_buffer_pointer())
        assert view.read_only  # JAX speaks DLPack before 1.0, which does not say
        assert as_array(array).astype(np.float32).tolist() == array.astype("float32").tolist()

    @jax.jit
    def slow(x: Any) -> Any:
        for _ in range(40):
            x = x @ x / 500
        return x

    x = jnp.ones((500, 500))
    wanted = np.array(slow(x))
    later = slow(x)  # JAX computes in the background
    assert np.array_equal(as_array(later), wanted)


def test_what_was_imported_from_it_keeps_its_memory(jax: Any):
    array = jax.numpy.arange(1000.0)
    taken = as_array(array)
    del array
    gc.collect()
    others = [jax.numpy.zeros(1000) for _ in range(20)]
    assert taken.tolist() == list(range(1000))
    assert len(others) == 20


def test_it_copies_below_64_bytes_without_a_word_and_so_it_is_refused(jax: Any):
    memory = empty((20,), "float32").numpy()
    memory[...] = 1
    view = export(memory[4:], read_only=False)  # 16 bytes further
    silent = jax.dlpack.from_dlpack(view)
    assert silent.unsafe_buffer_pointer() != view.ptr
    with pytest.raises(ExchangeRefused, match="64 bytes"):
        fit(view, "jax")
    said = fit(view, "jax", copy=True)
    assert jax.dlpack.from_dlpack(said).unsafe_buffer_pointer() == said.ptr != view.ptr


def test_it_narrows_64_bits_without_a_word_and_so_they_are_refused(jax: Any, monkeypatch: pytest.MonkeyPatch):
    view = empty((8,), "int64")
    assert jax.dlpack.from_dlpack(view).dtype == np.int32
    with pytest.raises(ExchangeRefused, match="jax_enable_x64"):
        fit(view, "jax", copy=True)
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(config=SimpleNamespace(jax_enable_x64=True)))  # type: ignore[arg-type]
    assert fit(view, "jax").ptr == view.ptr


def test_it_is_refused_read_only_arrays_unless_they_were_fitted_to_it(jax: Any):
    view = export(empty((16,), "float32"))
    with pytest.raises(ExchangeRefused, match="fit"):
        jax.dlpack.from_dlpack(view)
    assert jax.dlpack.from_dlpack(fit(view, "jax")).unsafe_buffer_pointer() == view.ptr


def test_the_hazard_is_real_a_later_write_changes_an_immutable_array(jax: Any):
    view = empty((16,), "float32")
    view.numpy()[...] = 1
    array = jax.dlpack.from_dlpack(view)
    view.numpy()[...] = 2
    assert float(array[0]) == 2


def test_it_does_not_write_to_what_it_was_given_even_when_it_is_donated(jax: Any):
    view = empty((256, 256), "float32")
    view.numpy()[...] = 1
    result = jax.jit(lambda x: x + 1, donate_argnums=0)(jax.dlpack.from_dlpack(fit(export(view), "jax")))
    assert float(result[0, 0]) == 2
    assert view.numpy().min() == view.numpy().max() == 1


def test_a_jax_array_over_a_sealed_block_keeps_the_block(jax: Any):
    spec = pk.KVSpec(2, 2, 32, "bfloat16", 16)
    with pk.KVCache(spec, pk.Blocks(4)) as cache:
        seq = cache.sequence(range(17))
        with cache.step([seq]) as step:
            for layer in range(2):
                step.write(layer, *np.random.default_rng(layer).standard_normal((2, 17, 2, 32)).astype(np.float32))
        (view,) = seq.export_blocks()
        wanted = view.numpy().astype(np.float32)
        block = jax.dlpack.from_dlpack(fit(view, "jax"), copy=False)
        assert block.unsafe_buffer_pointer() == view.ptr
        assert block.shape == spec.block_shape
        seq.release()
        del view, seq, step
        gc.collect()
        assert cache.stats().blocks["device"]["live"] == 1
        assert np.array_equal(np.asarray(jax.jit(lambda x: x.astype("float32"))(block)), wanted)
        del block  # whose buffer a thread of JAX may still hold
        collect_until(lambda: cache.stats().blocks["device"]["live"] == 0)
