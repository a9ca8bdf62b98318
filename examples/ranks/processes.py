"""The processes: ranks that compute their parts, and an engine that decides for them."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import pagedkv as pk
from examples.llama_numpy.weight_cache import load_model
from examples.ranks.split import SplitLlama

ARRAYS = ("tokens", "positions", "q_indptr", "seq_lens", "block_tables", "slot_mapping")


@dataclasses.dataclass(frozen=True)
class Plan:
    """The arguments of all processes.

    Attributes
    ----------
    model : path of the GGUF.
    spec : of the whole KV.
    budgets : of all ranks together.
    ranks : how the processes find each other.
    """

    model: str
    spec: pk.KVSpec
    budgets: dict[str, Any]
    ranks: pk.Ranks


@dataclasses.dataclass
class Told:
    """A step as a rank is told of it: its arrays, and the rank's own K and V."""

    tokens: Any
    positions: Any
    q_indptr: Any
    write: Any
    attend: Any


def compute(plan: Plan, rank: int, pipe: Connection) -> None:
    """A rank's process: computes its part of every step, until the pipe is closed."""

    def add_up(part: Any) -> Any:
        pipe.send_bytes(part.tobytes())
        return np.frombuffer(pipe.recv_bytes(), np.float32).reshape(part.shape)

    llama = SplitLlama(load_model(Path(plan.model)).weights, rank, plan.ranks.size, add_up)
    with pk.Rank(plan.spec, **plan.budgets, ranks=plan.ranks, rank=rank) as mine, contextlib.suppress(EOFError):
        while True:
            sizes = np.frombuffer(pipe.recv_bytes(), np.int64)
            numbers = np.split(np.frombuffer(pipe.recv_bytes(), np.int64), np.cumsum(sizes)[:-1])
            told = dict(zip(ARRAYS, numbers, strict=True))
            told["block_tables"] = told["block_tables"].reshape(len(told["seq_lens"]), -1)
            part = mine.step(*(told[name] for name in ("slot_mapping", "block_tables", "seq_lens", "q_indptr")))
            step = Told(told["tokens"], told["positions"], told["q_indptr"], part.write, part.attend)
            logits = llama.forward(step)  # type: ignore[arg-type]  # it has all that a forward pass reads of a Step
            if rank == 0:
                pipe.send_bytes(logits.tobytes())


class Engine:
    """The deciding process's model: it lets the ranks compute.

    Parameters
    ----------
    cache : KVCache of the ranks.
    pipes : to the ranks.
    """

    def __init__(self, cache: pk.KVCache, pipes: list[Connection]) -> None:
        self.cache, self._pipes = cache, pipes

    def step(self, seqs: list[pk.Sequence]) -> Any:
        """Compute the uncomputed tokens of sequences.

        Returns the logits of each one's last, float32 [num_seqs, vocab_size].
        """
        layers = self.cache.spec.num_layers
        with self.cache.step(seqs) as step:
            arrays = [np.asarray(getattr(step, name), np.int64).reshape(-1) for name in ARRAYS]
            for pipe in self._pipes:
                pipe.send_bytes(np.array([len(array) for array in arrays], np.int64).tobytes())
                pipe.send_bytes(np.concatenate(arrays).tobytes())
            for _ in range(2 * layers):  # after attention, and after the gated layer
                parts = [np.frombuffer(pipe.recv_bytes(), np.float32) for pipe in self._pipes]
                total = np.sum(parts, axis=0, dtype=np.float32).tobytes()
                for pipe in self._pipes:
                    pipe.send_bytes(total)
            logits = np.frombuffer(self._pipes[0].recv_bytes(), np.float32).reshape(len(seqs), -1)
            for layer in range(layers):
                step.mark_written(layer)
        return logits

    def ask(self, prompts: list[list[int]], follow: list[list[int]], count: int) -> list[dict[str, Any]]:
        """Continue prompts together, with the likeliest tokens or with those to follow.

        Returns
        -------
        For each prompt its likeliest token at each place, and where its cached tokens were found.
        """
        with contextlib.ExitStack() as held:
            seqs = [held.enter_context(self.cache.sequence(prompt)) for prompt in prompts]
            hits = [dict(seq.hit_tokens) for seq in seqs]
            found: list[list[int]] = [[] for _ in seqs]
            going = list(range(len(seqs)))
            while going:
                for place, row in zip(going, self.step([seqs[place] for place in going]), strict=True):
                    best = int(np.argmax(row))
                    said = follow[place][len(found[place])] if follow[place] else best
                    found[place].append(best)
                    seqs[place].append(said)
                going = [place for place in going if len(found[place]) < (len(follow[place]) or count)]
        return [{"tokens": tokens, "hits": each} for tokens, each in zip(found, hits, strict=True)]


@contextlib.contextmanager
def started(plan: Plan) -> Iterator[Engine]:
    """The ranks' processes and their cache, until the end of the block."""
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(plan.ranks.size)]
    processes = [context.Process(target=compute, args=(plan, rank, pair[1])) for rank, pair in enumerate(pairs)]
    for process, (_, far) in zip(processes, pairs, strict=True):
        process.start()
        far.close()
    try:
        with pk.KVCache(plan.spec, **plan.budgets, ranks=plan.ranks) as cache:
            yield Engine(cache, [near for near, _ in pairs])
    finally:
        for process, (near, _) in zip(processes, pairs, strict=True):
            near.close()
            process.join()
