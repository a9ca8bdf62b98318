"""What a first-time user gets wrong is said in words that help."""

from __future__ import annotations

import copy
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.attention import PagedAttention, places
from pagedkv.cache import tiered

SPEC = pk.KVSpec(1, 1, 8, "float32", block_size=16, model="toy")


def test_a_folder_of_sources_without_compiled_modules_says_what_to_do(tmp_path: Path) -> None:
    """As in the clone after ``pip install .``: the sources there hide the installed package."""
    sources = Path(pk.__file__).parent
    copied = shutil.copytree(sources, tmp_path / "pagedkv", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    found = subprocess.run(
        [sys.executable, "-c", "import pagedkv"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert found.returncode == 1
    last = found.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: {copied} holds the sources of pagedkv")
    assert "leave this folder" in last
    assert "pip install -e ." in last


def test_the_names_of_the_package_are_those_that_it_offers() -> None:
    assert set(dir(pk)) == {*pk.__all__, "__version__", "events"}
    assert not {"logging", "importlib", "cache", "tiers", "spec", "annotations"} & set(dir(pk))
    assert {"KVCache", "KVSpec", "Disk", "errors", "Scheduler", "Tier", "InvalidArgument"} <= set(pk.__all__)
    for name in pk.__all__:
        assert hasattr(pk, name)


def test_a_sequence_cannot_be_pickled_and_says_why() -> None:
    with pk.KVCache(SPEC, memory="1MiB") as cache, cache.sequence(range(5)) as seq:
        for way in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(pk.WrongType, match=r"belongs to its process and cache.*send its tokens"):
                way(seq)


def test_a_cache_and_a_step_cannot_be_pickled_and_say_why() -> None:
    with pk.KVCache(SPEC, memory="1MiB") as cache, cache.sequence(range(5)) as seq:
        for way in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(pk.WrongType, match=r"KVCache belongs to its process.*open another"):
                way(cache)
            with pytest.raises(pk.WrongType, match=r"Step belongs to its process.*send its tokens"):
                way(cache.step([seq]))


def test_a_dtype_that_is_refused_is_told_what_there_is_once() -> None:
    with pk.KVCache(SPEC, memory="1MiB") as cache, cache.sequence(range(5)) as seq:
        whole = np.zeros((5, 1, 8), np.int64)
        wanted = "int64: one of float32, float16, float64 is needed"
        with pytest.raises(pk.LayoutMismatch, match=wanted), cache.step([seq]) as step:
            step.write(0, whole, whole)


def test_the_short_name_of_fp8_is_answered_with_the_long_one() -> None:
    with pytest.raises(pk.InvalidArgument, match="write 'float8_e4m3'"):
        pk.KVSpec(1, 1, 8, "fp8")


def test_a_traced_array_is_told_to_stay_outside_of_jit() -> None:
    class DynamicJaxprTracer:
        """What JAX hands to a function that it traces."""

        def __dlpack__(self, **options: object) -> None:
            raise AttributeError("DynamicJaxprTracer has no attribute __dlpack_device__")

    with pk.KVCache(SPEC, memory="1MiB") as cache, cache.sequence(range(5)) as seq:
        k = v = DynamicJaxprTracer()
        with pytest.raises(pk.LayoutMismatch, match="outside of jit"), cache.step([seq]) as step:
            step.write(0, k, v)


def test_queries_of_integers_are_told_to_be_floats() -> None:
    with pk.KVCache(SPEC, memory="1MiB") as cache, cache.sequence(range(5)) as seq, cache.step([seq]) as step:
        step.write(0, np.zeros((5, 1, 8)), np.zeros((5, 1, 8)))
        with pytest.raises(pk.LayoutMismatch, match="q is int8, and must be floating point"):
            step.attend(0, np.zeros((5, 1, 8), np.int8))


def test_a_mask_without_its_offsets_is_told_what_makes_both() -> None:
    with pk.KVCache(SPEC, memory="1MiB") as cache, cache.sequence(range(5)) as seq, cache.step([seq]) as step:
        step.write(0, np.zeros((5, 1, 8)), np.zeros((5, 1, 8)))
        with pytest.raises(pk.InvalidArgument, match=r"mask and mask_indptr are given together: .*pack_mask makes"):
            step.attend(0, np.zeros((5, 1, 8), np.float32), mask=np.ones(5, np.uint8))


def test_an_array_of_another_dtype_is_told_the_one_that_is_needed() -> None:
    options = {"num_qo_heads": 1, "num_kv_heads": 1, "head_dim": 8, "max_sequences": 1}
    attention = PagedAttention(dtype="float32", device="cpu", **options)
    attention.plan(np.zeros((1, 1), np.int32), np.array([3], np.int32))
    k = np.zeros((1, 16, 1, 8), np.float32)
    with pytest.raises(pk.WrongType, match="q must hold float32, got dtype float16"):
        attention.run(np.zeros((1, 1, 8), np.float16), k, k)


@pytest.mark.parametrize("tokens", [2, 16, 256, 257, 2048])
def test_fewer_tokens_in_a_batch_run_fewer_sequences(tokens: int) -> None:
    options = pk.SchedulerOptions(max_batch_tokens=tokens)
    assert options.max_running == min(256, tokens - 1)
    with pytest.raises(pk.InvalidArgument):
        pk.SchedulerOptions(max_batch_tokens=tokens, max_running=tokens)


def test_a_cache_on_a_gpu_without_a_driver_says_so_before_it_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's own error of the first allocation would not say what to do."""

    def missing(number: int) -> None:
        raise pk.errors.KernelsUnavailable("no NVIDIA driver here")

    def allocates(*arguments: object, **options: object) -> None:
        pytest.fail("memory was asked for first")

    monkeypatch.setattr(places, "cuda_backend", missing)
    monkeypatch.setattr(tiered, "DeviceTier", allocates)
    with pytest.raises(pk.errors.KernelsUnavailable, match="no NVIDIA driver here"):
        pk.KVCache(pk.KVSpec(1, 1, 64, "float16"), pk.Blocks(4), device="cuda")
