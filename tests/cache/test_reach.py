"""Windows and chunks of a spec's layers, to which attend keeps by itself.

Every output is compared with attention that is computed token by token from the positions that the layer sees.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.errors import InvalidArgument, LayoutMismatch, UnsupportedVariant, WrongType
from tests.ptxsim.fixture import interpreted_backend

HEADS, KV_HEADS, DIM, SIZE = 4, 2, 8, 4
FULL, LOCAL = pk.Attention(KV_HEADS, DIM), pk.Attention(KV_HEADS, DIM, window=5)
SHORT, LONG = pk.Attention(KV_HEADS, DIM, chunk=8), pk.Attention(KV_HEADS, DIM, chunk=20)
LAYERS = [SHORT, LOCAL, FULL, LONG, SHORT]
SPEC = pk.KVSpec.of(LAYERS, dtype="float32", block_size=SIZE, model="toy@1")

backend = interpreted_backend()


def projected(tokens: Any, positions: Any, layer: int, what: str, dim: int = DIM) -> np.ndarray:
    """Made-up projections of tokens: the same for the same token at the same position."""
    heads = HEADS if what == "q" else KV_HEADS
    found = [
        np.random.default_rng([int(token), int(position), layer, ord(what)]).standard_normal((heads, dim))
        for token, position in zip(tokens, positions, strict=True)
    ]
    return np.array(found, np.float32).reshape(-1, heads, dim)


def first_seen(layer: pk.Attention, position: int) -> int:
    """The first position that a query at `position` sees."""
    if layer.window is not None:
        return max(0, position - layer.window + 1)
    return 0 if layer.chunk is None else position // layer.chunk * layer.chunk


def expected(layers: list[pk.Attention], number: int, tokens: list[int], begin: int, dim: int = DIM) -> np.ndarray:
    """Attention of the tokens from `begin` on, query by query."""
    positions = range(len(tokens))
    q, k, v = (projected(tokens, positions, number, what, dim).astype(np.float64) for what in "qkv")
    out = np.empty((len(tokens) - begin, HEADS, dim))
    for position in range(begin, len(tokens)):
        seen = slice(first_seen(layers[number], position), position + 1)
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            weights = np.exp(k[seen, kv] @ q[position, head] / np.sqrt(dim))
            out[position - begin, head] = weights @ v[seen, kv] / weights.sum()
    return out


def check_step(cache: pk.KVCache, layers: list[pk.Attention], seqs: list[pk.Sequence], lens: list[int],
               dtype: Any = np.float32, close: float = 2e-5) -> None:  # fmt: skip
    """One step over the sequences; each layer's output is right."""
    dim = cache.spec.head_dim
    with cache.step(seqs, q_lens=lens) as step:
        edges = step.q_indptr.tolist()
        for number in range(len(layers)):
            q, k, v = (projected(step.tokens, step.positions, number, what, dim).astype(dtype) for what in "qkv")
            step.write(number, k, v)
            found = np.array(step.attend(number, q), np.float64)
            for seq, first, last in zip(seqs, edges, edges[1:], strict=False):
                begin = seq.num_computed
                tokens = seq.tokens[: begin + last - first].tolist()
                assert np.abs(found[first:last] - expected(layers, number, tokens, begin, dim)).max(initial=0) < close


@pytest.mark.parametrize("seed", range(5))
def test_attend_keeps_to_the_reach_of_each_layer_in_random_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    with pk.KVCache(SPEC, pk.Blocks(120)) as cache:
        seqs = [cache.sequence(rng.integers(0, 50, rng.integers(1, 60)).tolist()) for _ in range(3)]
        for _ in range(12):
            lens = [int(rng.integers(0, 1 + min(30, len(seq.tokens) - seq.num_computed))) for seq in seqs]
            check_step(cache, LAYERS, seqs, lens)
            for seq in seqs:
                if seq.num_computed == len(seq.tokens):
                    seq.append(rng.integers(0, 50, rng.integers(1, 4)).tolist())
        cache.check_integrity()


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 7, 8, 9, 15, 16, 19, 20])
def test_a_hit_goes_on_in_the_middle_of_windows_and_chunks(cut: int) -> None:
    prompt = list(range(41))
    with pk.KVCache(SPEC, pk.Blocks(60)) as cache:
        with cache.sequence(prompt) as seq:
            check_step(cache, LAYERS, [seq], [41])
        with cache.sequence(prompt[: 20 + cut] + [99] * 5) as seq:
            assert seq.num_computed >= (20 + cut) // SIZE * SIZE
            check_step(cache, LAYERS, [seq], [len(seq.tokens) - seq.num_computed])


def test_float64_queries_of_chunked_layers_are_computed_exactly() -> None:
    with pk.KVCache(SPEC, pk.Blocks(60)) as cache, cache.sequence(list(range(30))) as seq:
        check_step(cache, LAYERS, [seq], [19], np.float64, 1e-6)
        check_step(cache, LAYERS, [seq], [11], np.float64, 1e-6)


def test_the_cuda_wrappers_keep_to_the_reach_of_each_layer(backend: Any) -> None:
    """By the interpreter.

    The layers alternate, so each part of a step and each window has its own tables and plan on the device.
    """
    layers = [dataclasses.replace(layer, head_dim=32) for layer in (SHORT, LOCAL, FULL, SHORT, LOCAL)]
    spec = pk.KVSpec.of(layers, dtype="float16", block_size=SIZE)
    with pk.KVCache(spec, pk.Blocks(40), backend=backend) as cache:
        one, two = cache.sequence(list(range(19))), cache.sequence(list(range(50, 56)))
        check_step(cache, layers, [one, two], [11, 6], np.float16, 1e-2)
        two.append([7])
        check_step(cache, layers, [one, two], [8, 1], np.float16, 1e-2)


def test_a_step_that_is_used_again_has_chunks_of_its_own() -> None:
    with pk.KVCache(SPEC, pk.Blocks(60)) as cache, cache.sequence(list(range(30))) as seq:
        step = cache.step([seq])
        for tokens in ([], [31, 32]):
            seq.append(tokens)
            begin = seq.num_computed
            with step:
                for number in range(len(LAYERS)):
                    q, k, v = (projected(step.tokens, step.positions, number, what) for what in "qkv")
                    step.write(number, k, v)
                    wanted = expected(LAYERS, number, seq.tokens.tolist(), begin)
                    assert np.abs(step.attend(number, q) - wanted).max() < 2e-5


SHARING = [LOCAL, FULL, pk.SameAs(0), SHORT, pk.SameAs(1), pk.SameAs(0), pk.SameAs(3)]
READ = [0, 1, 0, 3, 1, 0, 3]  # the model's layer whose KV each reads


def test_layers_that_share_kv_read_the_layer_that_has_it() -> None:
    spec = pk.KVSpec.of(SHARING, dtype="float32", block_size=SIZE)
    assert (spec.num_layers, spec.num_model_layers) == (3, 7)
    assert spec.reads == (0, 1, 0, 2, 1, 0, 2)
    assert spec.windows == (5, None, None)
    with pk.KVCache(spec, pk.Blocks(60)) as cache, cache.sequence(list(range(30))) as seq:
        for size in (21, 9):
            begin = seq.num_computed
            with cache.step([seq], q_lens=[size]) as step:
                for number, read in enumerate(READ):
                    q, k, v = (projected(step.tokens, step.positions, read, what) for what in "qkv")
                    if read == number:
                        step.write(number, k, v)
                    else:
                        for write in (lambda number=number, k=k, v=v: step.write(number, k, v),
                                      lambda number=number: step.mark_written(number)):  # fmt: skip
                            with pytest.raises(InvalidArgument, match=f"layer {number} shares the KV of layer {read}"):
                                write()
                    wanted = expected([SHARING[read]] * 4, read, seq.tokens[: begin + size].tolist(), begin)
                    assert np.abs(step.attend(number, q) - wanted).max() < 2e-5
        assert cache.layer(6)[0] is cache.layer(3)[0]
        assert len(seq.gather()[0]) == 3


def test_errors_name_the_models_layers_where_some_share() -> None:
    cache, step = open_step(pk.KVSpec.of(SHARING, dtype="float32", block_size=SIZE))
    zeros, q = np.zeros((12, KV_HEADS, DIM), np.float32), np.zeros((12, HEADS, DIM), np.float32)
    with cache:
        step.__enter__()
        with pytest.raises(InvalidArgument, match=r"attend\(6\) came before write\(3\)"):
            step.attend(6, q)
        with pytest.raises(InvalidArgument, match="layer must be"):
            step.attend(7, q)
        step.write(0, zeros, zeros)
        with pytest.raises(InvalidArgument, match="layer 5 has a window of 5"):
            step.attend(5, q, window=6)
        with pytest.raises(InvalidArgument, match=r"layers \[1, 3\] unwritten"):
            step.__exit__(None, None, None)


def open_step(spec: pk.KVSpec = SPEC) -> tuple[pk.KVCache, Any]:
    cache = pk.KVCache(spec, pk.Blocks(20))
    return cache, cache.step([cache.sequence(list(range(12)))])


def test_a_window_that_is_not_the_layers_own_is_refused_and_the_step_goes_on() -> None:
    cache, step = open_step()
    with cache, step:
        zeros = np.zeros((12, KV_HEADS, DIM), np.float32)
        q = np.zeros((12, HEADS, DIM), np.float32)
        for number in range(len(LAYERS)):
            step.write(number, zeros, zeros)
        for layer, window, has in ((1, 4, "a window of 5"), (2, 5, "no window"), (0, 8, "chunks of 8")):
            with pytest.raises(InvalidArgument, match=f"window = {window}, but layer {layer} has {has}"):
                step.attend(layer, q, window=window)
        assert np.array_equal(step.attend(1, q, window=5), step.attend(1, q))
        for options in ({"causal": False}, {"mask": np.ones(144, np.uint8), "mask_indptr": np.array([0, 144])}):
            with pytest.raises(UnsupportedVariant, match="layer 3 has chunks of 20"):
                step.attend(3, q, **options)


@pytest.mark.parametrize("reads", [None, (0, 0)])
def test_where_the_spec_has_no_windows_the_caller_says_them(reads: Any) -> None:
    cache, step = open_step(pk.KVSpec(1, KV_HEADS, DIM, "float32", SIZE, reads=reads))
    with cache, step:
        q, k, v = (projected(step.tokens, step.positions, 1, what) for what in "qkv")
        step.write(0, k, v)
        found = step.attend(0, q, window=5)
        assert np.abs(found - expected(LAYERS, 1, list(range(12)), 0)).max() < 2e-5


def test_errors_of_a_spec_name_the_models_layers_and_defaults_may_be_spelled_out() -> None:
    with pytest.raises(InvalidArgument, match="layer 3 has a chunk of 6"):
        pk.KVSpec.of([FULL, pk.SameAs(0), pk.SameAs(0), pk.Attention(KV_HEADS, DIM, chunk=6)], block_size=4)
    for own in (-1, 2, True):
        with pytest.raises((InvalidArgument, WrongType), match="own"):
            pk.KVSpec(2, 1, 4, reads=(0, 1, 1)).model_layer(own)
    whole = [pk.Attention(2, 8, dtype="float16"), pk.Attention(2, 8), pk.Attention(2, 8, dtype=np.float16)]  # type: ignore[arg-type]
    assert pk.KVSpec.of(whole) == pk.KVSpec(3, 2, 8)
    scaled = [pk.Attention(2, 8, scales="token_head"), pk.Attention(2, 8)]
    assert pk.KVSpec.of(scaled, dtype="int8") == pk.KVSpec(2, 2, 8, "int8")
    with pytest.raises(InvalidArgument, match="dtype"):
        pk.KVSpec.of([pk.Rows(4, 4)], dtype="nope")
    with pytest.raises((WrongType, InvalidArgument), match="dtype"):
        pk.Attention(2, 8, dtype=5)  # type: ignore[arg-type]
    for planes in ((5,), (("s", 5, "float32"),), (("s", (2,), [1]),)):
        with pytest.raises(WrongType, match="a plane is"):
            pk.Recurrent(planes)  # type: ignore[arg-type]


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a window of nothing": ({"windows": [0, None]}, InvalidArgument, r"windows\[0\]"),
    "a window of half a token": ({"windows": [None, 1.5]}, WrongType, r"windows\[1\]"),
    "one number for all": ({"windows": 5}, WrongType, "for each layer"),
    "too few": ({"chunks": [8]}, InvalidArgument, "each of 2 layers, got 1"),
    "a chunk inside a block": ({"chunks": [8, 6]}, InvalidArgument, "layer 1 has a chunk of 6 .* multiple .* 4"),
    "shared before it is there": ({"reads": [1, 0]}, InvalidArgument, r"reads\[0\] = 1.* only 0 of"),
    "one that has no KV": ({"reads": [0, 0, 0]}, InvalidArgument, "names 1 layers"),
    "a layer of none": ({"reads": [0, 1, 2]}, InvalidArgument, r"reads\[2\]"),
    "layers by name": ({"reads": "01"}, WrongType, "number for each layer"),
    "both": ({"chunks": [8, None], "windows": [3, None]}, InvalidArgument, "layer 0 has a window and a chunk"),
}


@pytest.mark.parametrize(("reach", "kind", "said"), WRONG.values(), ids=WRONG)
def test_windows_and_chunks_that_contradict_the_spec_are_refused(reach: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        pk.KVSpec(2, KV_HEADS, DIM, "float32", SIZE, **reach)


def test_a_spec_knows_its_layers_and_one_without_limits_is_the_old_one() -> None:
    assert SPEC.windows == (None, 5, None, None, None)
    assert SPEC.chunks == (8, None, None, 20, 8)
    plain = pk.KVSpec(5, KV_HEADS, DIM, "float32", SIZE, model="toy@1")
    assert pk.KVSpec.of([FULL] * 5, dtype="float32", block_size=SIZE, model="toy@1") == plain
    assert dataclasses.replace(SPEC, windows=None, chunks=[None] * 5).fingerprint() == plain.fingerprint()
    others = [
        plain, SPEC, dataclasses.replace(SPEC, windows=None), dataclasses.replace(SPEC, chunks=None),
        dataclasses.replace(SPEC, chunks=None, windows=(5, None, None, None, None)),
        dataclasses.replace(SPEC, windows=None, chunks=(8, None, None, 20, None)),
        dataclasses.replace(SPEC, reads=(0, 1, 2, 3, 4, 0)), dataclasses.replace(SPEC, reads=(0, 1, 2, 3, 4, 1)),
    ]  # fmt: skip
    assert len({spec.fingerprint() for spec in others}) == len(others)


def test_a_directory_of_other_windows_is_refused(tmp_path: Any) -> None:
    disk = pk.Disk(tmp_path / "kv", pk.Blocks(40), write="all")
    pk.KVCache(SPEC, pk.Blocks(20), disk=disk).close()
    other = dataclasses.replace(SPEC, windows=(None, 6, None, None, None))
    with pytest.raises(LayoutMismatch):
        pk.KVCache(other, pk.Blocks(20), disk=disk)
