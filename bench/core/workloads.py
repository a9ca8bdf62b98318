"""What is measured: the six workloads' sizes, tokens and trace, the same for every system.

===  =====================================================================================================
a    allocate n blocks and free them, pool of 100,000 blocks
b    decode: 256 running sequences, one token each per step
c    prefix hit of a whole prompt, and inserting a new prompt of 8,192 tokens
d    eviction: a full cache, every new 64-block request evicts 64 blocks
e    memory: growth of resident memory per cached block, runs of 64 blocks and of 1 block
f    replay of 20,000 requests: chat with system prompts and continued conversations
===  =====================================================================================================
"""

from __future__ import annotations

import random
from dataclasses import dataclass

BLOCK_SIZE = 16  # tokens
VOCABULARY = 128_000
MAX_PROMPT = 8192  # tokens; no conversation of the trace grows past it
RUN_BLOCKS = 64  # blocks of one request in workloads d and e
SPLIT_TOKENS = 64  # node length of a prompt cut by earlier branching, workload c
WORKLOADS = "abcdef"


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of one run.

    Blocks are of :data:`BLOCK_SIZE` tokens; rounds and warm-ups count timed calls.
    """

    pool_blocks: int
    batch_sizes: tuple[int, ...]  # a: blocks per call
    rounds: int  # a, c
    warmup: int
    decode_sequences: tuple[int, ...]  # b; the peers run the first
    decode_steps: int
    decode_warmup: int
    hit_lengths: tuple[int, ...]  # c: tokens
    insert_tokens: int
    insert_prompts: int
    insert_warmup: int
    evict_requests: int  # d
    evict_warmup: int
    evict_pools: tuple[int, ...]  # d: blocks; the peers run the first
    memory_blocks: int  # e: runs of RUN_BLOCKS
    memory_single_blocks: int  # e: runs of one block
    trace_requests: int  # f
    running: int  # f: requests that run at once


FULL = Scale(
    pool_blocks=100_000,
    batch_sizes=(1, 16, 256),
    rounds=15,
    warmup=3,
    decode_sequences=(256, 4096),
    decode_steps=192,
    decode_warmup=32,
    hit_lengths=(1024, 8192, 32_768, 131_072),
    insert_tokens=8192,
    insert_prompts=40,
    insert_warmup=8,
    evict_requests=400,
    evict_warmup=50,
    evict_pools=(100_000, 1_000_000, 10_000_000),
    memory_blocks=1_000_000,
    memory_single_blocks=200_000,
    trace_requests=20_000,
    running=128,
)

QUICK = Scale(
    pool_blocks=4096,
    batch_sizes=(1, 16, 256),
    rounds=3,
    warmup=1,
    decode_sequences=(32,),
    decode_steps=24,
    decode_warmup=4,
    hit_lengths=(1024, 8192),
    insert_tokens=8192,
    insert_prompts=4,
    insert_warmup=1,
    evict_requests=20,
    evict_warmup=4,
    evict_pools=(4096,),
    memory_blocks=64_000,
    memory_single_blocks=10_000,
    trace_requests=100,
    running=16,
)


def random_tokens(count: int, seed: int) -> list[int]:
    """`count` token ids, uniform in ``[0, VOCABULARY)``.

    As the Python list a tokenizer hands over.
    """
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def decode_prompt(seq_idx: int) -> list[int]:
    """Prompt of sequence `seq_idx` in workload b.

    512 to 527 tokens, so that block ends are spread.
    """
    return random_tokens(512 + seq_idx % BLOCK_SIZE, seq_idx)


def insert_prompts(scale: Scale) -> list[list[int]]:
    """The new prompts of workload c's insert."""
    return [random_tokens(scale.insert_tokens, 10_000 + i) for i in range(scale.insert_prompts)]


def calls_per_round(num_tokens: int) -> int:
    """Calls timed as one round of a hit, so that short prompts are not lost in the clock."""
    return max(1, 131_072 // num_tokens)


def make_trace(num_requests: int, seed: int = 1234) -> list[tuple[list[int], list[int]]]:
    """Requests of workload f, as (prompt, output) token lists.

    64 system prompts of 256 to 2,048 tokens, popularity Zipf(1.1). 70 % of the requests are new conversations
    (system prompt and 64 to 1,024 user tokens); 30 % continue one of the last 512 conversations (its prompt,
    its output, 32 to 256 new tokens) unless that could pass :data:`MAX_PROMPT`. Outputs are 16 to 256 tokens.
    All uniform.
    """
    rng = random.Random(seed)

    def draw(low: int, high: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(rng.randrange(low, high + 1))]

    systems = [draw(256, 2048) for _ in range(64)]
    weights = [1 / (rank + 1) ** 1.1 for rank in range(64)]
    history: list[list[int]] = []
    trace = []
    for _ in range(num_requests):
        prompt: list[int] = []
        if history and rng.random() < 0.30:
            earlier = history[rng.randrange(len(history))]
            if len(earlier) + 256 <= MAX_PROMPT:
                prompt = earlier + draw(32, 256)
        if not prompt:
            system = rng.choices(systems, weights)[0]
            prompt = system + draw(64, 1024)
        output = draw(16, 256)
        trace.append((prompt, output))
        history.append(prompt + output)
        if len(history) > 512:
            history.pop(0)
    return trace
