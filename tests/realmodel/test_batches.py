"""Tokens and logits are those of a run alone, whatever the chunks and the batch.

A prompt may be cut anywhere and share its steps with any other requests.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import pagedkv as pk
from tests.realmodel.bed import STEPS, Bed

Open = Callable[..., pk.KVCache]


def test_chunks_of_every_size_in_the_same_steps(bed: Bed, opened: Open) -> None:
    """Sequence i of the batch computes i tokens of the prompt a step.

    So no two sequences are at the same place.
    """
    name = "code"
    ids = bed.so_far(name)
    cache = opened(bed, len(ids) * (len(ids) + bed.block_size))
    seqs = {size: cache.sequence(ids, pk.Namespace(tenant=str(size))) for size in range(1, len(ids) + 1)}
    first_logits = 0
    while seqs:
        q_lens = [min(size, len(ids) - seq.num_computed) for size, seq in seqs.items()]
        with cache.step(seqs.values(), q_lens=q_lens) as step:
            logits = bed.model.forward(step)
        for (size, seq), row in zip(list(seqs.items()), logits, strict=True):
            if seq.num_computed == len(ids):
                bed.check(name, 0, row)
                first_logits += 1
                seqs.pop(size).release()
    assert first_logits == len(ids)


@pytest.mark.parametrize("chunk", [17, 64, 100])
def test_a_long_prompt_in_chunks_is_the_prompt_at_once(bed: Bed, opened: Open, chunk: int) -> None:
    name = "shared_a"
    cache = opened(bed, 200)
    with cache.sequence(bed.so_far(name)) as seq:
        while seq.num_tokens - seq.num_computed > chunk:
            with cache.step([seq], q_lens=[chunk]) as step:
                bed.model.forward(step)
        bed.decode(cache, seq, name, count=2)


def test_prompt_chunks_and_decoding_share_steps(bed: Bed, opened: Open) -> None:
    """A request decodes while another's prompt comes in chunks.

    A third request joins in between.
    """
    cache = opened(bed, 600)
    old, long, late = (cache.sequence(bed.so_far(name)) for name in ("code", "mixed", "single"))
    bed.decode(cache, old, "code", count=1)
    places = {"code": 1, "mixed": 0, "single": 0}
    while any(place < STEPS for place in places.values()):
        batch = {"code": old, "mixed": long, **({"single": late} if places["code"] > 2 else {})}
        batch = {name: seq for name, seq in batch.items() if places[name] < STEPS}
        q_lens = [min(25, seq.num_tokens - seq.num_computed) for seq in batch.values()]
        with cache.step(batch.values(), q_lens=q_lens) as step:
            logits = bed.model.forward(step)
        for (name, seq), row in zip(batch.items(), logits, strict=True):
            if seq.num_computed == seq.num_tokens:
                bed.check(name, places[name], row)
                seq.append(bed.goldens[name].greedy[places[name]])
                places[name] += 1
    for seq in (old, long, late):
        seq.release()


@pytest.mark.slow
@pytest.mark.realmodel
@pytest.mark.parametrize("size", [1, 8, 64])
def test_block_sizes(smollm2_bed: Bed, size: int) -> None:
    """Five prompts of the real model in the same steps, at block sizes other than 16.

    With 16 golden tokens behind each; first with nothing cached, then on what the first run has left. The tiny model
    runs everything at these sizes, the real one everything at 16.
    """
    bed, count = smollm2_bed, 16
    names = ("france", "chat", "code", "mixed", "single")
    spec = bed.model.config.kv_spec("smollm2", block_size=size)
    lengths = [len(bed.goldens[name].ids) + count for name in names]
    with pk.KVCache(spec, pk.Blocks(sum(-(-length // size) for length in lengths) + len(names))) as cache:
        for again in (False, True):
            seqs = {name: cache.sequence(bed.so_far(name)) for name in names}
            for name, seq in seqs.items():
                found, before = sum(seq.hit_tokens.values()), len(bed.goldens[name].ids) - 1
                assert found >= before // size * size if again else found == 0, name
            for place in range(count):
                with cache.step(seqs.values()) as step:
                    logits = bed.model.forward(step)
                for (name, seq), row in zip(seqs.items(), logits, strict=True):
                    bed.check(name, place, row)
                    seq.append(bed.goldens[name].greedy[place])
            for seq in seqs.values():
                seq.release()
        cache.check_integrity()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_narrower_cache_changes_the_logits_little(tiny_beds: dict[int, Bed], dtype: str) -> None:
    bed = tiny_beds[16]
    ids = bed.so_far("mixed")
    with pk.KVCache(bed.model.config.kv_spec("tiny", dtype=dtype), pk.Blocks(16)) as cache:
        for _ in range(2):
            with cache.sequence(ids) as seq, cache.step([seq]) as step:
                logits = bed.model.forward(step)[0]
        off = np.abs(logits - bed.cold["mixed"].logits[0]).max()
    assert 1e-6 < off < {"float16": 0.05, "bfloat16": 0.5}[dtype]
