"""A stand-in for llama_cpp: a Llama with a NumPy KV, and the C functions on it.

The row of a token depends on all rows before it, and the next token on all rows, so a wrong KV gives wrong tokens. Each
call that an adapter makes is logged, and may be made to fail.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

LAYERS, ITEMS, VOCAB = 2, 4, 997


class Injected(Exception):
    """A call that was told to fail."""


class Context:
    """K and V [layer, cell, item] of float16 bits, and the positions of the cells."""

    def __init__(self, llm: Llama) -> None:
        self._llm, self.ctx = llm, self
        self.k, self.v = (np.zeros((LAYERS, 0, ITEMS), np.uint16) for _ in range(2))
        self.positions: list[int] = []

    def kv_cache_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
        self._llm.told("kv_cache_seq_rm")
        self.cut(p0)
        return True

    def cut(self, length: int) -> None:
        self.k, self.v, self.positions = self.k[:, :length], self.v[:, :length], self.positions[:length]

    def state(self) -> bytes:
        how, cells = self._llm.how, len(self.positions)
        state = struct.pack("<Ii", 0xAF143CD8, 0) if how.magic else b""
        state += struct.pack("<II", how.streams, cells)
        state += np.array([(pos, 1, 0) for pos in self.positions], "<i4").tobytes()
        if cells:
            state += struct.pack("<II", how.v_trans, LAYERS)
            for layer in range(LAYERS):
                state += struct.pack("<iQ", 1, 2 * ITEMS) + self.k[layer].tobytes()
            for layer in range(LAYERS):
                if how.v_trans:
                    state += struct.pack("<iII", 1, 2, ITEMS) + np.ascontiguousarray(self.v[layer].T).tobytes()
                else:
                    state += struct.pack("<iQ", 1, 2 * ITEMS) + self.v[layer].tobytes()
        return state + how.behind

    def take(self, state: bytes) -> bool:
        """Read a state, field by field."""
        self.cut(0)
        how, at = self._llm.how, 8 if self._llm.how.magic else 0
        _, cells = struct.unpack_from("<II", state, at)
        at += 8
        positions = np.frombuffer(state, "<i4", 3 * cells, at).reshape(cells, 3)[:, 0].tolist()
        at += 12 * cells + 8
        sides = []
        for trans in (False, how.v_trans):
            layers = []
            for _ in range(LAYERS):
                at += 12
                values = np.frombuffer(state, np.uint16, cells * ITEMS, at)
                layers.append(values.reshape(ITEMS, cells).T if trans else values.reshape(cells, ITEMS))
                at += 2 * cells * ITEMS
            sides.append(np.stack(layers))
        if at + len(how.behind) != len(state) or cells > self._llm.n_ctx():
            return False
        self.k, self.v, self.positions = sides[0].copy(), sides[1].copy(), positions
        return True


class Llama:
    """The part of a llama_cpp.Llama that an adapter sees.

    Parameters
    ----------
    model_path : of a file that stands for the weights.
    seed : of the weights themselves, which the file may not tell.
    """

    def __init__(
        self, model_path: Path | str, *, n_ctx: int = 2048, n_batch: int = 64, seed: int = 1, v_trans: bool = True,
        magic: bool = True, **options: Any,
    ) -> None:  # fmt: skip
        self.how = SimpleNamespace(v_trans=v_trans, magic=magic, streams=1, behind=b"")
        self.model_path, self._n_ctx, self._n_batch, self._seed = str(model_path), n_ctx, n_batch, seed
        names = (
            *("rope_scaling_type", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor"),
            *("yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx"),
        )
        self.context_params = SimpleNamespace(embeddings=False, n_seq_max=1, **dict.fromkeys(names, 0))
        self._logits_all, self.chat_handler, self.draft_model = False, None, None
        self.lora_path, self.lora_scale, self.kv_overrides, self.metadata = None, 1.0, None, {}
        self._model = SimpleNamespace(model=SimpleNamespace(kind="", swa=0, rope=0))
        for name, value in options.items():
            setattr(self, name, value)
        self._ctx = Context(self)
        self.input_ids = np.zeros(n_ctx, np.intc)
        self.n_tokens, self._requires_eval = 0, True
        self.decoded = 0
        self.calls: list[str] = []
        self.fail_at: int | str | None = None  # the number or the name of a call

    def told(self, name: str) -> None:
        self.calls.append(name)
        if self.fail_at in (len(self.calls) - 1, name):
            raise Injected(name)

    # ---- as an adapter calls it

    def n_ctx(self) -> int:
        return self._n_ctx

    def n_vocab(self) -> int:
        return VOCAB

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        return [1] * add_bos + [byte % VOCAB for byte in text]

    def reset(self) -> None:
        self.told("reset")
        self.n_tokens, self._requires_eval = 0, True

    def eval(self, tokens: Sequence[int]) -> None:
        self.told("eval")
        self._eval(tokens)

    def generate(
        self, tokens: Sequence[int], top_k: int = 40, temp: float = 0.8, reset: bool = True, seed: int | None = None
    ) -> Iterator[int]:
        tokens = list(tokens)
        if reset:
            there = self.input_ids[: self.n_tokens].tolist()
            common = next((i for i, (a, b) in enumerate(zip(there, tokens, strict=False)) if a != b), None)
            common = min(len(there), len(tokens)) if common is None else common
            exact = common == len(tokens) == self.n_tokens and not self._requires_eval
            self.n_tokens = common if exact else min(common, len(tokens) - 1)
            tokens = tokens[self.n_tokens :]
        while True:
            self._eval(tokens)
            token = self._sample()
            sent = yield token
            tokens = [token, *(sent or [])]

    # ---- inside

    def _eval(self, tokens: Sequence[int]) -> None:
        self._ctx.cut(self.n_tokens)
        for at in range(0, len(tokens), self._n_batch):
            batch = list(tokens[at : at + self._n_batch])
            if self.n_tokens + len(batch) > self._n_ctx:
                raise ValueError("the context is full")
            for token in batch:
                self._compute(token, alone=len(tokens) == 1)
            self.decoded += len(batch)
            self._requires_eval = False

    def _compute(self, token: int, alone: bool) -> None:
        ctx, pos = self._ctx, self.n_tokens
        assert len(ctx.positions) == pos, "the KV does not hold the tokens that the Llama says"
        before = int(ctx.k[0, -1, 0]) if pos else 0
        number = (before * 31 + token * self._seed + 7 * pos + 1) % 30_000
        rows = (number + 11 * np.arange(LAYERS * ITEMS * 2)).astype(np.uint16).reshape(2, LAYERS, 1, ITEMS)
        rows[1, -1, 0, -1] = alone  # bits that only tokens computed one by one have
        ctx.k, ctx.v = np.concatenate([ctx.k, rows[0]], 1), np.concatenate([ctx.v, rows[1]], 1)
        ctx.positions = [*ctx.positions, pos]
        self.input_ids[pos] = token
        self.n_tokens += 1

    def _sample(self) -> int:
        """The next token: of all rows, but for the bits that tell how they were computed."""
        total = int(self._ctx.k.astype(np.int64).sum()) + 3 * int(self._ctx.v[:, :, :-1].astype(np.int64).sum())
        return (total + self.n_tokens) % VOCAB


def module(version: str = "0.3.36") -> ModuleType:
    """The module as it is imported."""
    runtime: Any = ModuleType("llama_cpp")
    runtime.__version__, runtime.Llama = version, Llama
    runtime.LLAMA_ROPE_TYPE_NONE, runtime.LLAMA_ROPE_TYPE_NORM, runtime.LLAMA_ROPE_TYPE_NEOX = -1, 0, 2
    for kind in ("is_recurrent", "is_hybrid", "has_encoder", "is_diffusion"):
        setattr(runtime, f"llama_model_{kind}", lambda model, kind=kind: model.kind == kind)
    runtime.llama_model_n_swa = lambda model: model.swa
    runtime.llama_model_rope_type = lambda model: model.rope

    def get_size(ctx: Context, seq_id: int) -> int:
        ctx._llm.told("get_size")
        return len(ctx.state())

    def get_data(ctx: Context, pointer: Any, size: int, seq_id: int) -> int:
        ctx._llm.told("get_data")
        state = ctx.state()
        if len(state) > size:
            return 0
        np.ctypeslib.as_array(pointer, (size,))[: len(state)] = np.frombuffer(state, np.uint8)
        return len(state)

    def set_data(ctx: Context, pointer: Any, size: int, seq_id: int) -> int:
        with contextlib.suppress(Injected):  # the C function says it by a number
            ctx._llm.told("set_data")
            return size if ctx.take(np.ctypeslib.as_array(pointer, (size,)).tobytes()) else 0
        ctx.cut(0)
        return 0

    runtime.llama_state_seq_get_size, runtime.llama_state_seq_get_data = get_size, get_data
    runtime.llama_state_seq_set_data = set_data
    return runtime
