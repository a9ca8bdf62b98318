"""The tokens of ``engine.h``: the same toy model in NumPy, over a large ``KVCache``.

Prints the lines that the engine prints before its last one.
"""

from __future__ import annotations

import numpy as np

import pagedkv as pk

LAYERS, HEADS, DIM, VOCABULARY, GENERATED, USERS = 2, 2, 8, 64, 12, 6
WIDTH = HEADS * DIM


def weights(first: int, rows: int, columns: int) -> np.ndarray:
    """float64 [rows, columns] from splitmix64, from number `first` on."""
    x = (np.arange(first + 1, first + 1 + rows * columns, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    numbers = ((x ^ (x >> np.uint64(31))) >> np.uint64(40)).astype(np.float64) / 2**23 - 1
    return (numbers * 1.7320508075688772).reshape(rows, columns)


def matrix(layer: int, number: int, columns: int = WIDTH) -> np.ndarray:
    """Matrix of a layer: 0 to 3 for q, k, v and the output, 4 the head."""
    return weights(1_000_000 + (layer * 5 + number) * 10_000, WIDTH, columns) / np.sqrt(WIDTH)


EMBEDDING, HEAD = weights(0, VOCABULARY, WIDTH), matrix(0, 4, VOCABULARY)
MATRICES = [[matrix(layer, number) for number in range(4)] for layer in range(LAYERS)]


def forward(step: pk.Step) -> np.ndarray:
    """Write K and V of the new tokens; the logits behind each sequence's last token."""
    x = EMBEDDING[step.tokens] + np.sin(step.positions[:, None] / 3 + np.arange(WIDTH))
    for layer, (q, k, v, o) in enumerate(MATRICES):
        step.write(layer, *((x @ m).reshape(-1, HEADS, DIM).astype(np.float32) for m in (k, v)))
        seen = step.attend(layer, (x @ q).reshape(-1, HEADS, DIM).astype(np.float32))
        x = np.tanh(x + seen.reshape(-1, WIDTH) @ o)
    return x[step.q_indptr[1:] - 1] @ HEAD


def answer(cache: pk.KVCache, prompt: list[int], rank: int) -> list[int]:
    """The tokens after `prompt`, the first of them the best one but `rank`."""
    with cache.sequence(prompt) as seq:
        while len(seq) < len(prompt) + GENERATED:
            with cache.step([seq]) as step:
                (logits,) = forward(step)
            seq.append(int(np.argsort(-logits, kind="stable")[rank if len(seq) == len(prompt) else 0]))
        return seq.tokens[len(prompt) :].tolist()


def main() -> None:
    with pk.KVCache(pk.KVSpec(LAYERS, HEADS, DIM, "float32", block_size=8), memory="4MiB") as cache:
        for _ in range(2):
            for user in range(0, USERS, 2):
                for rank, name in enumerate(("best", "second")):
                    for each in (user, user + 1):
                        prompt = [(7 * t + 3) % VOCABULARY for t in range(24)]
                        prompt += [((each + 1) * (t + 5)) % VOCABULARY for t in range(27)]
                        print(f"user {each} {name}:", *answer(cache, prompt, rank))


if __name__ == "__main__":
    main()
