"""Attention through the cache equals a dense softmax computed from scratch.

It does so however the KV got where it is.
"""

from __future__ import annotations

import numpy as np
import pytest

import pagedkv as pk
import pagedkv.spec.kv_spec

from .conftest import BLOCK, prompt, where

HEADS, DIM, LAYERS = 2, 8, 2


class Model:
    """Layers whose q, k and v follow from token and position alone.

    That makes the dense answer easy to state.
    """

    def __init__(self, cache, group=2):
        self.cache, self.spec, self.num_qo_heads = cache, cache.spec, group * cache.spec.num_kv_heads

    def draw(self, kind, layer, tokens, heads):
        """float32 [num_tokens, heads, head_dim]."""
        rows = [
            np.random.default_rng([kind, layer, int(token) % 2**31, place]).standard_normal((heads, self.spec.head_dim))
            for place, token in enumerate(tokens)
        ]
        return np.array(rows, np.float32).reshape(len(tokens), heads, self.spec.head_dim)

    def qkv(self, layer, tokens):
        heads = self.spec.num_kv_heads
        return (
            self.draw(0, layer, tokens, self.num_qo_heads), self.draw(1, layer, tokens, heads), self.draw(2, layer,
            tokens, heads),
        )  # fmt: skip

    def stored(self, values):
        """What the cache's dtype makes of values, float64."""
        dtype = self.spec.dtype
        if dtype == "bfloat16":
            bits = values.view(np.uint32).astype(np.uint64)
            return (
                (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16)
                .astype(np.uint32)
                .view(np.float32)
                .astype(np.float64)
            )
        return values.astype(dtype).astype(np.float64)

    def dense(self, layer, tokens, scale=None, causal=True, window=None, soft_cap=None):
        """The expected attention, by a dense softmax.

        o is float64 [num_tokens, num_qo_heads, head_dim] and lse is [num_tokens, num_qo_heads].
        """
        q, k, v = self.qkv(layer, tokens)
        group = self.num_qo_heads // self.spec.num_kv_heads
        k, v = (np.repeat(self.stored(values), group, axis=1) for values in (k, v))
        scores = np.einsum("ihd,jhd->hij", q.astype(np.float64), k) * (
            self.spec.head_dim**-0.5 if scale is None else scale
        )
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        i, j = np.indices(scores.shape[1:])
        hidden = np.zeros(scores.shape[1:], bool)
        if causal:
            hidden |= j > i
        if window is not None:
            hidden |= j <= i - window
        scores = np.where(hidden, -np.inf, scores)
        top = scores.max(axis=2, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=2, keepdims=True)
        return np.einsum("hij,jhd->ihd", weights / total, v), (top + np.log(total))[:, :, 0].T

    def run(self, *seqs, q_lens=None, **options):
        """A step; o and lse of every layer for the tokens it computed, by sequence."""
        results = []
        with self.cache.step(seqs, q_lens=q_lens) as step:
            spans = list(zip(step.q_indptr[:-1].tolist(), step.q_indptr[1:].tolist(), strict=True))
            for layer in range(self.spec.num_layers):
                parts = [self.qkv(layer, seq.tokens) for seq in seqs]
                news = [
                    [array[seq.num_computed : seq.num_computed + b - a] for array in part]
                    for seq, part, (a, b) in zip(seqs, parts, spans, strict=True)
                ]
                q, k, v = (np.concatenate(arrays) for arrays in zip(*news, strict=True))
                step.write(layer, k, v)
                out = np.empty(q.shape, np.float64)
                o, lse = step.attend(layer, q, return_lse=True, out=out, **options)
                assert o is out
                results.append([(o[a:b], lse[a:b]) for a, b in spans])
        return list(zip(*results, strict=True))  # [seq][layer] -> (o, lse)

    def check(self, seq, results, first, **options):
        """A step's results for a sequence are the dense answer for its tokens from `first` on."""
        for layer, (o, lse) in enumerate(results if first < seq.num_computed else []):
            wanted_o, wanted_lse = self.dense(layer, seq.tokens[: seq.num_computed], **options)
            np.testing.assert_allclose(o, wanted_o[first : first + len(o)], rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(lse, wanted_lse[first : first + len(o)], rtol=1e-6, atol=1e-6)

    def step(self, *seqs, q_lens=None, **options):
        """Run and check all at once; the tokens each sequence computed."""
        before = [seq.num_computed for seq in seqs]
        for seq, result, first in zip(seqs, self.run(*seqs, q_lens=q_lens, **options), before, strict=True):
            renamed = {{"softmax_scale": "scale"}.get(name, name): value for name, value in options.items()}
            self.check(seq, result, first, **renamed)
        return [seq.num_computed - first for seq, first in zip(seqs, before, strict=True)]


def spec_of(dtype="float32", block_size=BLOCK, **changes):
    return pk.KVSpec(LAYERS, HEADS, DIM, dtype, block_size, model="toy", **changes)


@pytest.fixture
def model(open_cache):
    return Model(open_cache(64, spec_of()))


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 2])
def test_a_cold_prompt(model, length):
    with model.cache.sequence(prompt(1, length)) as seq:
        assert model.step(seq) == [length]


def test_a_prefix_hit_attends_to_what_another_request_wrote(model):
    with model.cache.sequence(prompt(1, 14)) as seq:
        model.step(seq)
    with model.cache.sequence([*prompt(1, 10), 7, 8, 9]) as seq:
        assert seq.hit_tokens["device"] == 2 * BLOCK
        assert seq.hit_tokens["partial"] == 2
        assert model.step(seq) == [3]


def test_decoding_token_by_token(model):
    with model.cache.sequence(prompt(1, 3)) as seq:
        model.step(seq)
        for token in range(10):
            seq.append(token)
            assert model.step(seq) == [1]


def test_forked_sequences_each_attend_to_their_own(model):
    seq = model.cache.sequence(prompt(1, 6))
    model.step(seq)
    seqs = [seq, *seq.fork(2)]
    for turn in range(5):
        for i, one in enumerate(seqs):
            one.append(10 * i + turn)
        model.step(*seqs)


@pytest.mark.parametrize("budgets", [{"host": 40}, {"disk": 40}, {"host": 4, "disk": 40}], ids=str)
def test_a_promoted_prefix(open_cache, budgets):
    model = Model(open_cache(8, spec_of(), **budgets))
    with model.cache.sequence(prompt(1, 14)) as seq:
        model.step(seq)
    with model.cache.sequence(prompt(2, 7 * BLOCK)) as seq:
        model.step(seq)
    assert {tier for tier, _ in where(model.cache, prompt(1, 14))} - {"device"}
    with model.cache.sequence(prompt(1, 15)) as seq:
        assert seq.num_computed >= 3 * BLOCK
        model.step(seq)


@pytest.mark.parametrize("chunks", [[14], [1] * 14, [4, 4, 4, 2], [3, 7, 4], [13, 1]], ids=str)
def test_a_prompt_in_chunks_gives_what_the_whole_prompt_gives(model, chunks):
    with model.cache.sequence(prompt(1, 14)) as seq:
        for chunk in chunks:
            assert model.step(seq, q_lens=[chunk]) == [chunk]


def test_chunks_agree_with_the_whole_to_the_last_digits(model):
    with model.cache.sequence(prompt(1, 14)) as seq:
        (whole,) = model.run(seq)
    model.cache.purge(None)
    parts = []
    with model.cache.sequence(prompt(1, 14)) as seq:
        for chunk in (5, 1, 8):
            parts += model.run(seq, q_lens=[chunk])
    for layer in range(LAYERS):
        joined = np.concatenate([part[layer][0] for part in parts])
        np.testing.assert_allclose(joined, whole[layer][0], rtol=1e-13, atol=1e-14)


def test_prefills_chunks_and_decodes_of_different_lengths_in_one_step(model):
    seqs = [model.cache.sequence(prompt(i, 3 * i + 1)) for i in range(5)]
    model.step(*seqs[:2])
    for seq in seqs[:2]:
        seq.append(5)
    assert model.step(*seqs, q_lens=[1, 1, 7, 4, 0]) == [1, 1, 7, 4, 0]
    model.step(*seqs)


@pytest.mark.parametrize("group", [1, 2, 3, 8])
def test_grouped_queries(open_cache, group):
    model = Model(open_cache(16, spec_of()), group)
    with model.cache.sequence(prompt(1, 11)) as seq:
        model.step(seq)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "bits"])
def test_every_dtype_layout_and_block_size(open_cache, monkeypatch, dtype, block_size, layout):
    if dtype == "bits":
        monkeypatch.setattr(pagedkv.spec.kv_spec, "numpy_dtype", lambda name: np.dtype(np.uint16))
        dtype = "bfloat16"
    elif dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    model = Model(open_cache(64, spec_of(dtype, block_size, layout=layout), host=8))
    with model.cache.sequence(prompt(1, 11)) as seq:
        model.step(seq, q_lens=[6])
        model.step(seq)
    with model.cache.sequence(prompt(1, 12)) as seq:
        model.step(seq)


@pytest.mark.parametrize(
    "options", [{"softmax_scale": 0.3}, {"causal": False}, {"window": 1}, {"window": 5}, {"soft_cap": 2.0},
    {"window": 100, "soft_cap": 9.0}],
    ids=str,
)  # fmt: skip
def test_scale_mask_window_and_soft_cap(model, options):
    with model.cache.sequence(prompt(1, 11)) as seq:
        model.step(seq, **options)
        seq.append(3)
        model.step(seq, **options)


def test_the_output_has_the_queries_dtype_and_lse_is_float32(model):
    with model.cache.sequence(prompt(1, 5)) as seq, model.cache.step([seq]) as step:
        for layer in range(LAYERS):
            q, k, v = model.qkv(layer, seq.tokens)
            step.write(layer, k, v)
            for dtype in (np.float16, np.float32, np.float64):
                o, lse = step.attend(layer, q.astype(dtype), return_lse=True)
                assert (o.dtype, lse.dtype, lse.shape) == (dtype, np.float32, (5, 4))
                assert step.attend(layer, q.astype(dtype)).shape == q.shape


def test_what_lies_in_other_blocks_or_behind_the_end_never_shows(model):
    for view in (*model.cache.layer(0), *model.cache.layer(1)):
        view[:] = np.nan
    seqs = [model.cache.sequence(prompt(i, 6)) for i in range(3)]
    for seq in seqs:
        model.step(seq)
    for seq in seqs:
        seq.append(1)
    model.step(*seqs)


def test_two_layers_do_not_mix(model):
    with model.cache.sequence(prompt(1, 9)) as seq:
        (results,) = model.run(seq)
        assert not np.allclose(results[0][0], results[1][0])


WRONG_Q = {
    "no array": [[1.0]], "two axes": np.ones((5, 8), np.float32), "tokens": np.ones((4, 4, 8), np.float32),
    "head_dim": np.ones((5, 4, 7), np.float32), "no heads": np.ones((5, 0, 8), np.float32),
    "heads": np.ones((5, 3, 8), np.float32), "integers": np.ones((5, 4, 8), np.int64), "objects": np.ones((5, 4, 8),
    object),
    "complex": np.ones((5, 4, 8), complex), "none": None,
}  # fmt: skip


@pytest.mark.parametrize("q", WRONG_Q.values(), ids=WRONG_Q)
def test_queries_that_do_not_fit_are_refused(model, q):
    with model.cache.sequence(prompt(1, 5)) as seq:
        with pytest.raises(pk.LayoutMismatch), model.cache.step([seq]) as step:  # noqa: PT012
            step.write(0, *model.qkv(0, seq.tokens)[1:])
            step.attend(0, q)
        model.step(seq)


Q = np.ones((5, 4, 8), np.float32)


@pytest.mark.parametrize("hooked", [False, True])
def test_attending_a_layer_before_it_is_written_is_refused(model, hooked):
    """Until the layer is written, its slots hold old contents.

    Those are zeros, or the KV of the request that had the blocks before.
    """
    if hooked:  # a step with hooks is another class
        model.cache.hooks.add(Silent())
    with model.cache.sequence(prompt(1, 5)) as seq:
        with model.cache.step([seq]) as step:
            q, k, v = model.qkv(0, seq.tokens)
            for layer in range(LAYERS):
                with pytest.raises(pk.InvalidArgument, match=rf"Call step.write\({layer}, k, v\) first"):
                    step.attend(layer, q)
                with pytest.raises(pk.InvalidArgument, match=rf"Call step.write\({layer}, k, v\) first"):
                    step.attend(np.int64(layer), q)
                step.write(layer, k, v)
                assert step.attend(np.int64(layer), q).shape == q.shape
        seq.append([7])
        with model.cache.step([seq]) as step:  # what the step before wrote does not count
            q, k, v = model.qkv(0, [7])
            with pytest.raises(pk.InvalidArgument, match="attend\\(0\\) came before write\\(0\\)"):
                step.attend(0, q)
            for layer in range(LAYERS):
                step.write(layer, k, v)


def test_a_write_that_is_refused_does_not_count_as_written(model):
    with model.cache.sequence(prompt(1, 5)) as seq, model.cache.step([seq]) as step:
        q, k, v = model.qkv(0, seq.tokens)
        with pytest.raises(pk.LayoutMismatch):
            step.write(0, k[:4], v)
        with pytest.raises(pk.InvalidArgument, match="came before write"):
            step.attend(0, q)
        for layer in range(LAYERS):
            step.write(layer, k, v)


def test_a_layer_that_is_marked_as_written_can_be_attended(model):
    with model.cache.sequence(prompt(1, 5)) as seq, model.cache.step([seq]) as step:
        q, k, v = model.qkv(0, seq.tokens)
        step.write(0, k, v)
        wanted = step.attend(0, q)
        for kind, values in zip(model.cache.layer(1), (k, v), strict=True):  # as a kernel of the caller's own does it
            kind[step.slot_mapping // BLOCK, step.slot_mapping % BLOCK] = values
        step.mark_written(1)
        assert np.array_equal(step.attend(1, q), wanted)


def test_a_step_without_new_tokens_can_be_attended_and_gives_nothing(model):
    with model.cache.sequence(prompt(1, 5)) as seq:
        model.step(seq)
        with model.cache.step([seq]) as step:
            assert step.attend(0, np.ones((0, 4, 8), np.float32)).shape == (0, 4, 8)


class Silent:
    """A hook that does nothing."""

    def begin(self, span):
        return None

    def end(self, span, state):
        return None


WRONG_OPTIONS = [
    {"softmax_scale": float("nan")}, {"softmax_scale": "x"}, {"window": 0}, {"window": -1}, {"window": 1.5},
    {"window": "x"},
    {"window": 10**30}, {"soft_cap": 0}, {"soft_cap": float("inf")}, {"soft_cap": "x"}, {"out": 5}, {"out": [1]},
    {"out": Q[:4]},
    {"out": Q.astype(int)}, {"out": np.broadcast_to(np.float32(0), Q.shape)}, {"causal": np.zeros(3)},
]  # fmt: skip


@pytest.mark.parametrize("options", WRONG_OPTIONS, ids=lambda options: next(iter(options)))
def test_options_that_do_not_fit_are_refused(model, options):
    with model.cache.sequence(prompt(1, 5)) as seq:
        with model.cache.step([seq]) as step:
            for layer in range(LAYERS):
                step.write(layer, *model.qkv(layer, seq.tokens)[1:])
            with pytest.raises((pk.LayoutMismatch, pk.InvalidArgument, pk.WrongType)):
                step.attend(0, Q, **options)
        model.step(seq)
