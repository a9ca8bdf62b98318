"""Steps of two threads on a GPU compute with their own arrays in buffers that they share.

The PTX interpreter runs the kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.cache.gpu_kv import GpuKV
from tests.ptxsim.fixture import interpreted_backend

SPEC = pk.KVSpec(1, 1, 64, "float16", 16)
NUM_TOKENS = 5

backend = interpreted_backend()


def rows(value: float) -> np.ndarray:
    return np.full((NUM_TOKENS, 1, 64), value, np.float16)


def meanwhile(patch: pytest.MonkeyPatch, backend: Any, kernel: str, act: Callable[[], object]) -> threading.Thread:
    """A thread that acts at the first launch of a kernel, which gives it some time."""
    thread, launch = threading.Thread(target=act), backend.launch

    def launched(variant: Any, *arguments: Any, **options: Any) -> None:
        if variant.kernel == kernel and thread.ident is None:
            thread.start()
            thread.join(0.2)
        launch(variant, *arguments, **options)

    patch.setattr(backend, "launch", launched)
    return thread


def test_a_write_beside_another_thread_s_goes_to_its_own_slots(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pk.KVCache(SPEC, pk.Blocks(8), backend=backend) as cache:
        first, second = cache.sequence(range(5)), cache.sequence(range(100, 105))
        with cache.step([first]) as own, cache.step([second]) as other:
            thread = meanwhile(monkeypatch, backend, "write_kv", lambda: other.write(0, rows(2), rows(2)))
            own.write(0, rows(1), rows(1))
            thread.join()
        for seq, value in ((first, 1), (second, 2)):
            k, v = (np.asarray(array, np.float32) for array in seq.gather())
            assert (k == value).all()
            assert (v == value).all()


def test_an_attention_beside_another_thread_s_sees_its_own_keys(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pk.KVCache(SPEC, pk.Blocks(8), backend=backend) as cache:
        seqs = cache.sequence(range(5)), cache.sequence(range(100, 105))
        with cache.step([seqs[0]]) as own, cache.step([seqs[1]]) as other:
            own.write(0, rows(1), rows(1))
            other.write(0, rows(2), rows(2))
            own.attend(0, rows(0))  # what follows repeats it
            kernel = next(iter(cache._engine.kv._attentions.values())).kernel
            found: list[Any] = []
            thread = meanwhile(monkeypatch, backend, kernel, lambda: found.append(other.attend(0, rows(0))))
            found.insert(0, own.attend(0, rows(0)))
            thread.join()
        assert [np.unique(np.asarray(o, np.float32)).tolist() for o in found] == [[1.0], [2.0]]


def test_no_other_call_comes_between_an_upload_and_its_launch(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, free = backend.launch, []

    def tried(kv: GpuKV) -> None:
        if kv.lock.acquire(blocking=False):
            kv.lock.release()
            free.append(True)

    with pk.KVCache(SPEC, pk.Blocks(8), backend=backend) as cache:
        seen = []

        def launched(variant: Any, *arguments: Any, **options: Any) -> None:
            seen.append(variant.kernel)
            thread = threading.Thread(target=tried, args=(cache._engine.kv,))
            thread.start()
            thread.join()
            launch(variant, *arguments, **options)

        monkeypatch.setattr(backend, "launch", launched)
        with cache.sequence(range(5)) as seq:
            with cache.step([seq]) as step:
                step.write(0, rows(1), rows(1))
                step.attend(0, rows(0))
            (fork,) = seq.fork()
            fork.append([9])
            with fork, cache.step([fork]) as step:  # the last block is copied first
                step.write(0, rows(1)[:1], rows(1)[:1])
            seq.gather()
    assert {"write_kv", "copy_blocks", "gather_kv"} <= set(seen)
    assert not free


@pytest.mark.parametrize("kernel", ["write_kv", "decode_mma", "prefill_mma", "gather_kv"])
def test_a_call_within_a_call_is_refused_and_the_outer_one_stays_right(
    backend: Any, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    launch, refused = backend.launch, []
    with pk.KVCache(SPEC, pk.Blocks(8), backend=backend) as cache:
        seqs = cache.sequence(range(5)), cache.sequence(range(100, 105))
        with cache.step([seqs[0]]) as own, cache.step([seqs[1]]) as other:
            other.write(0, rows(2), rows(2))

            def launched(variant: Any, *arguments: Any, **options: Any) -> None:
                if variant.kernel == kernel:  # as a finalizer that the collector runs here
                    steps = [lambda: other.write(0, rows(3), rows(3)), lambda: other.attend(0, rows(0))]
                    for act in [seqs[1].gather] if kernel == "gather_kv" else steps:
                        with pytest.raises(pk.errors.InvalidArgument, match="within a call"):
                            act()
                    refused.append(kernel)
                launch(variant, *arguments, **options)

            monkeypatch.setattr(backend, "launch", launched)
            own.write(0, rows(1), rows(1))
            assert (np.asarray(own.attend(0, rows(0), kernel="decode_mma"), np.float32) == 1).all()
            assert (np.asarray(own.attend(0, rows(0), kernel="prefill_mma"), np.float32) == 1).all()
        for seq, value in zip(seqs, (1, 2), strict=True):
            assert (np.asarray(seq.gather()[0], np.float32) == value).all()
    assert refused


def test_moves_wait_for_the_uploads_of_a_write_that_is_refused(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pk.KVCache(SPEC, pk.Blocks(8), backend=backend) as cache:
        told: list[Any] = []
        monkeypatch.setattr(cache._engine.kv, "on_work", told.append)
        with cache.sequence(range(5)) as seq, cache.step([seq]) as step:
            with pytest.raises(pk.errors.LayoutMismatch):
                step.write(0, rows(1)[:, :, :32], rows(1))
            assert told == [None]
            step.write(0, rows(1), rows(1))


def test_buffers_that_a_step_outgrew_stay_for_the_graphs_over_them(backend: Any) -> None:
    with pk.KVCache(SPEC, pk.Blocks(64), backend=backend) as cache:
        kv = cache._engine.kv
        first = kv.device_copy("slot_mapping 0", np.arange(64), None)
        kv.device_copy("slot_mapping 0", np.arange(65), None)
        assert any(np.shares_memory(first, kept) for kept in kv._outgrown)
