"""A Gemma 3 of six layers with random weights and a window of 24.

Its tensors, its GGUF, and its oracle, which is float64 and has no cache. It was written apart from the example.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.realmodel.plain_llama import normed

LAYERS, WIDTH, FF_WIDTH, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 6, 48, 64, 4, 2, 16, 24
CONTEXT, BASE, LOCAL_BASE, EPS = 1024, 1e6, 1e4, 1e-6
LETTERS = [chr(code) for code in range(32, 127) if code != 32]
MERGED = ["th", "the", "▁t", "▁the", "in", "an", "and", "er", "st"]
TOKENS = [
    "<pad>", "<eos>", "<bos>", "<unk>", "<turn>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS, *MERGED,
]  # fmt: skip
FIRST_PLAIN = 5 + 256  # the tokens from here on are text

Tensors = dict[str, NDArray[np.float32]]


def random_tensors(seed: int = 0) -> Tensors:
    """Tensors under GGUF's names, float32 [out, in]."""
    draw = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return (draw.standard_normal((rows, columns)) * 1.5 / np.sqrt(columns)).astype(np.float32)

    def norm(width: int = WIDTH) -> NDArray[np.float32]:
        return (1 + 0.2 * draw.standard_normal(width)).astype(np.float32)

    tensors = {"token_embd.weight": matrix(len(TOKENS), WIDTH) * 2, "output_norm.weight": norm()}
    for layer in range(LAYERS):
        shapes = {
            "attn_q": (HEADS * HEAD_DIM, WIDTH), "attn_k": (KV_HEADS * HEAD_DIM, WIDTH),
            "attn_v": (KV_HEADS * HEAD_DIM, WIDTH), "attn_output": (WIDTH, HEADS * HEAD_DIM),
            "ffn_gate": (FF_WIDTH, WIDTH), "ffn_up": (FF_WIDTH, WIDTH), "ffn_down": (WIDTH, FF_WIDTH),
        }  # fmt: skip
        norms = {"attn_norm": WIDTH, "post_attention_norm": WIDTH, "ffn_norm": WIDTH, "post_ffw_norm": WIDTH}
        norms |= {"attn_q_norm": HEAD_DIM, "attn_k_norm": HEAD_DIM}
        tensors |= {f"blk.{layer}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        tensors |= {f"blk.{layer}.{name}.weight": norm(width) for name, width in norms.items()}
        for name in ("post_attention_norm", "post_ffw_norm"):  # or the next token would always be the same one again
            tensors[f"blk.{layer}.{name}.weight"] *= 3
    return tensors


def write_gguf(path: Path, tensors: Tensors, **changed: Any) -> Path:
    """Write a GGUF file.

    Parameters
    ----------
    path, tensors
    changed : fields of the metadata, with "__" for "." in their names; None leaves one out.
    """
    kinds = [3, 3, 3, 2, 4] + [6] * 256 + [1] * (len(TOKENS) - FIRST_PLAIN)
    fields: dict[str, Any] = {
        "general.name": "tiny gemma", "gemma3.block_count": LAYERS, "gemma3.context_length": CONTEXT,
        "gemma3.embedding_length": WIDTH, "gemma3.feed_forward_length": FF_WIDTH, "gemma3.attention.head_count": HEADS,
        "gemma3.attention.head_count_kv": KV_HEADS, "gemma3.attention.key_length": HEAD_DIM,
        "gemma3.attention.value_length": HEAD_DIM, "gemma3.attention.sliding_window": WINDOW,
        "gemma3.attention.layer_norm_rms_epsilon": EPS, "gemma3.rope.freq_base": BASE,
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.scores": [float(-place) for place in range(len(TOKENS))],
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_space_prefix": False,
    }  # fmt: skip
    fields |= {name.replace("__", "."): value for name, value in changed.items()}
    writer = gguf.GGUFWriter(path, fields.pop("general.architecture", "gemma3"))
    for name, value in fields.items():
        if value is not None:
            add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
            add.get(type(value), writer.add_array)(name, value)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_of(tensors: Tensors, tokens: Sequence[int]) -> NDArray[np.float64]:
    """Logits of every position [num_tokens, vocab_size]; the whole sequence at once."""
    w = {name.removesuffix(".weight"): array.astype(np.float64) for name, array in tensors.items()}
    count = len(tokens)
    ages = np.arange(count)[:, None] - np.arange(count)
    x = w["token_embd"][np.asarray(tokens)] * np.sqrt(WIDTH)
    for layer in range(LAYERS):
        sees_all = (layer + 1) % 6 == 0
        blk = f"blk.{layer}."
        h = normed(x, w[blk + "attn_norm"], EPS)
        q, k, v = (
            (h @ w[f"{blk}attn_{name}"].T).reshape(count, heads, HEAD_DIM)
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        base = BASE if sees_all else LOCAL_BASE
        q = turned(normed(q, w[blk + "attn_q_norm"], EPS), base)
        k = turned(normed(k, w[blk + "attn_k_norm"], EPS), base)
        k, v = (np.repeat(one, HEADS // KV_HEADS, axis=1) for one in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM)
        scores[:, (ages < 0) | ((ages >= WINDOW) & (not sees_all))] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        o = np.einsum("hqk,khd->qhd", weights, v).reshape(count, -1) @ w[blk + "attn_output"].T
        x = x + normed(o, w[blk + "post_attention_norm"], EPS)
        h = normed(x, w[blk + "ffn_norm"], EPS)
        gate = h @ w[blk + "ffn_gate"].T
        gate = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        h = (gate * (h @ w[blk + "ffn_up"].T)) @ w[blk + "ffn_down"].T
        x = x + normed(h, w[blk + "post_ffw_norm"], EPS)
    return np.asarray(normed(x, w["output_norm"], EPS) @ w["token_embd"].T)


def turned(x: NDArray[np.float64], base: float) -> NDArray[np.float64]:
    """Rotate the pairs (i, i + head_dim / 2) of the head at position p, as complex numbers."""
    count, _, dim = x.shape
    pairs = x[..., : dim // 2] + 1j * x[..., dim // 2 :]
    angles = np.arange(count)[:, None] * base ** (-2 * np.arange(dim // 2) / dim)
    pairs = pairs * np.exp(1j * angles)[:, None]
    return np.concatenate([pairs.real, pairs.imag], axis=-1)
