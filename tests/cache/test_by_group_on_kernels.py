"""A cache by groups of layers computes the same on the CUDA kernels and on the CPU.

The PTX interpreter runs the kernels. Not covered: CuPy itself, for which an array stands that is as strict as its own.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import pagedkv as pk
from pagedkv.cache.gpu_group_kv import GpuGroupKV
from pagedkv.cache.group_kv import GroupKV
from pagedkv.errors import InvalidArgument, LayoutMismatch, UnsupportedVariant
from pagedkv.kernels.recorder import Recorder
from pagedkv.spec.groups import groups_of, layout_of
from tests.cache.test_by_group import DIM, FULL, HEADS, SIZE, SPECS, compute, prompt
from tests.ptxsim.fixture import interpreted_backend

backend = interpreted_backend()
FP8 = [dataclasses.replace(FULL, dtype="float8_e4m3", scales="token_head", window=w) for w in (None, 9)]
KINDS = {name: SPECS[name] for name in ("windows", "chunks", "both", "shared", "int8")}
KINDS |= {"NHD": dataclasses.replace(SPECS["both"], layout="NHD"), "e4m3": pk.KVSpec.of(FP8, block_size=SIZE)}
QUICK = ("chunks", "int8")  # of them all, the rest in the slow run
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in KINDS]
TOLERANCES = {"int8": 3e-3, "e4m3": 3e-3}


def served(cache: pk.KVCache, tokens: NDArray[np.int32], more: int = 2) -> tuple[NDArray[Any], dict[str, int]]:
    """Outputs of a prompt and of some steps after it, and the tokens that it found."""
    with cache.sequence(tokens) as seq:
        hits = dict(seq.hit_tokens)
        out = [compute(cache, seq)]
        for token in range(more):
            seq.append(token)
            out.append(compute(cache, seq))
    cache.check_integrity()
    return np.concatenate(out, axis=1), hits


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_over_groups_compute_what_the_cpu_does_over_all_tokens(name: str, backend: Any) -> None:
    spec, first = KINDS[name], prompt(1, 26)
    with (
        pk.KVCache(spec, pk.Blocks(120)) as whole,
        pk.KVCache(spec, pk.Blocks(120), by_group=True, backend=backend) as cache,
    ):
        for tokens in (first, np.append(first, prompt(2, 5))):
            (wanted, _), (found, hits) = served(whole, tokens), served(cache, tokens)
            both = min(wanted.shape[1], found.shape[1])
            assert both >= 5
            np.testing.assert_allclose(found[:, -both:], wanted[:, -both:], atol=TOLERANCES.get(name, 2e-5))
        assert hits["device"] > 0


def test_layers_in_groups_have_sinks_of_their_own(backend: Any) -> None:
    spec, tokens = KINDS["windows"], prompt(1, 14)
    draw = np.random.default_rng(0)
    sinks = draw.standard_normal((spec.num_layers, 2 * HEADS)).astype(np.float32)
    numbers = draw.standard_normal((3, spec.num_layers, len(tokens), 2 * HEADS, DIM)).astype(np.float32)
    found: list[list[NDArray[Any]]] = []
    for options in ({}, {"by_group": True, "backend": backend}):
        with (
            pk.KVCache(spec, pk.Blocks(60), **options) as cache,
            cache.sequence(tokens) as seq,
            cache.step([seq]) as step,
        ):
            found.append([])
            for layer in range(spec.num_layers):
                step.write(layer, *numbers[:2, layer, :, :HEADS])
                found[-1].append(np.array(step.attend(layer, numbers[2, layer], sinks=sinks[layer].copy())))
    np.testing.assert_allclose(found[1], found[0], atol=2e-5)


@pytest.mark.parametrize(
    "name", ["windows", *(pytest.param(name, marks=pytest.mark.slow) for name in ("both", "int8"))]
)
def test_pages_go_to_the_host_and_the_disk_and_come_back(name: str, backend: Any, tmp_path: Path) -> None:
    spec, tokens = dataclasses.replace(KINDS[name], model="test@1"), prompt(1, 26)
    disk = pk.Disk(tmp_path / "kv", pk.Blocks(200), write="all", admission="all", segment_size="256KiB")
    with pk.KVCache(spec, pk.Blocks(400), by_group=True) as exact:
        wanted, _ = served(exact, tokens, more=0)
    for host, tier in ((pk.Blocks(30), "host"), (None, "disk")):
        with pk.KVCache(spec, pk.Blocks(24), host, disk, by_group=True, backend=backend) as cache:
            if tier == "host":
                served(cache, tokens, more=0)
                pool = cache.placement.pools[0]
                assert pool is not None
                room = np.zeros(len(groups_of(spec)), np.int64)
                room[0] = pool.num_obtainable
                cache.moves.make_room(room)  # everything leaves
            found, hits = served(cache, tokens, more=0)
            assert hits[tier] > 0, hits
            np.testing.assert_allclose(found, wanted[:, -found.shape[1] :], atol=TOLERANCES.get(name, 2e-5))


@pytest.mark.parametrize(("name", "layout"), [("windows", "NHD"), ("both", "HND"), ("int8", "HND")])
def test_gathers_of_all_groups_are_those_of_the_cpu(name: str, layout: str, backend: Any) -> None:
    spec, tokens = KINDS[name], prompt(1, 22)
    gathered = []
    for options in ({}, {"backend": backend}):
        with pk.KVCache(spec, pk.Blocks(120), by_group=True, **options) as cache, cache.sequence(tokens) as seq:
            compute(cache, seq)
            start = 20 if name == "both" else 16
            gathered.append(seq.gather(start, 22, layout=layout))
            out = tuple(np.empty_like(array) for array in gathered[-1])
            seq.gather(start, 22, out=out, layout=layout)
            for array, same in zip(out, gathered[-1], strict=True):
                np.testing.assert_array_equal(array, same)
            with pytest.raises(InvalidArgument, match="keeps only its last tokens"):
                seq.gather(0, 22)
            with pytest.raises(LayoutMismatch):
                seq.gather(start, 22, out=(out[0], out[1][1:]))
    for one, other in zip(*gathered, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_fork_writes_into_pages_of_its_own(backend: Any) -> None:
    results = []
    for options in ({}, {"backend": backend}):
        with pk.KVCache(SPECS["windows"], pk.Blocks(120), by_group=True, **options) as cache:
            seq = cache.sequence(prompt(1, 22))
            compute(cache, seq)
            (fork,) = seq.fork()
            out = []
            for each, token in ((seq, 1), (fork, 2), (seq, 3)):
                each.append(token)
                out.append(compute(cache, each))
            results.append(np.concatenate(out, axis=1))
            seq.release()
            fork.release()
            cache.check_integrity()
    np.testing.assert_allclose(results[1], results[0], atol=2e-5)


def test_views_of_a_layer_are_its_groups_pages(backend: Any) -> None:
    spec = SPECS["int8"]
    with pk.KVCache(spec, pk.Blocks(120), by_group=True, backend=backend) as cache:
        assert cache.spec.layout == "HND", "as any cache on a GPU"
        for layer in range(spec.num_layers):
            k, v = cache.layer(layer)
            assert k.shape == v.shape == (len(k), SIZE, HEADS, DIM)
            assert k.strides[0] >= cache.spec.block_bytes // spec.num_layers


class LikeCupy(np.ndarray[Any, Any]):
    """Changes the size of its elements only where it is contiguous, as CuPy's arrays do."""

    def view(self, *kind: Any) -> Any:
        if kind and np.dtype(kind[0]).itemsize != self.itemsize and not self.flags.c_contiguous:
            raise ValueError("To change to a dtype of a different size, the array must be C-contiguous")
        return super().view(*kind)


@pytest.mark.parametrize("name", ["windows", "both", "int8"])
def test_views_of_pages_that_lie_apart_need_nothing_that_cupy_refuses(name: str) -> None:
    spec = KINDS[name]
    found = layout_of(spec)
    strides = tuple(2 * stride for stride in found.strides)
    layout = dataclasses.replace(found, extent_bytes=2 * found.extent_bytes, strides=strides)
    arena = np.zeros((3, layout.extent_bytes), np.uint8).view(LikeCupy)
    with pytest.raises(ValueError, match="C-contiguous"):
        arena[:, :16].view(np.float32)
    kv = GpuGroupKV(spec, layout, arena, Recorder((9, 0)), lambda stream: None, lambda stream: None)
    exact = GroupKV(spec, layout, np.asarray(arena))
    for layer in range(spec.num_layers):
        for ours, theirs in zip(kv.layer(layer), exact.layer(layer), strict=True):
            assert (ours.ctypes.data, ours.shape, ours.strides) == (theirs.ctypes.data, theirs.shape, theirs.strides)


def test_a_mask_over_a_short_group_is_refused_as_on_the_cpu(backend: Any) -> None:
    with pk.KVCache(SPECS["windows"], pk.Blocks(120), by_group=True, backend=backend) as cache:
        seq = cache.sequence(prompt(1, 5))
        with cache.step([seq]) as step:
            for layer in range(cache.spec.num_layers):
                step.mark_written(layer)
            q = np.zeros((5, 2 * HEADS, DIM), np.float32)
            with pytest.raises(UnsupportedVariant, match="a mask is over all of them"):
                step.attend(0, q, mask=np.zeros(4, np.uint8), mask_indptr=np.array([0, 25]))
        seq.release()
