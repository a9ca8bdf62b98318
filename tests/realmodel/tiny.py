"""A llama of two layers with random weights.

It comes as the tensors and the GGUF file that tests alter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from examples.llama_numpy.tokenizer import printable_bytes

LAYERS, WIDTH, FF_WIDTH, HEADS, KV_HEADS, HEAD_DIM = 2, 64, 96, 4, 2, 16
CONTEXT, BASE, EPS = 1024, 10000.0, 1e-5
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "Ġ the", "i n", "a n", "an d", "Ġ and", "e r", "s t", "o u", "Ġ s"]
TOKENS = [*SPECIALS, *printable_bytes(), *(merge.replace(" ", "") for merge in MERGES)]
EOS = 2

Tensors = dict[str, NDArray[np.float32]]


def random_tensors(seed: int = 0, *, tied: bool = True) -> Tensors:
    """Tensors under GGUF's names, float32 [out, in]."""
    draw = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return (draw.standard_normal((rows, columns)) * 1.5 / np.sqrt(columns)).astype(np.float32)

    def norm() -> NDArray[np.float32]:
        return (1 + 0.2 * draw.standard_normal(WIDTH)).astype(np.float32)

    tensors = {"token_embd.weight": matrix(len(TOKENS), WIDTH) * 4, "output_norm.weight": norm()}
    if not tied:
        tensors["output.weight"] = matrix(len(TOKENS), WIDTH) * 4
    for layer in range(LAYERS):
        shapes = {
            "attn_q": (HEADS * HEAD_DIM, WIDTH), "attn_k": (KV_HEADS * HEAD_DIM, WIDTH),
            "attn_v": (KV_HEADS * HEAD_DIM, WIDTH), "attn_output": (WIDTH, HEADS * HEAD_DIM),
            "ffn_gate": (FF_WIDTH, WIDTH), "ffn_up": (FF_WIDTH, WIDTH), "ffn_down": (WIDTH, FF_WIDTH),
        }  # fmt: skip
        tensors |= {f"blk.{layer}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        tensors |= {f"blk.{layer}.{name}.weight": norm() for name in ("attn_norm", "ffn_norm")}
    return tensors


def write_gguf(
    path: Path,
    tensors: Mapping[str, NDArray[Any]],
    *,
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType | None = None,
    change: Callable[[dict[str, Any]], object] | None = None,
) -> Path:
    """Write a GGUF file.

    Parameters
    ----------
    path, tensors, architecture
    kind : quantise matrices to this. Default: float32.
    change : alters the metadata before it is written.
    """
    fields: dict[str, Any] = {
        "general.name": "tiny",
        f"{architecture}.block_count": LAYERS, f"{architecture}.context_length": CONTEXT,
        f"{architecture}.embedding_length": WIDTH, f"{architecture}.feed_forward_length": FF_WIDTH,
        f"{architecture}.attention.head_count": HEADS, f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.rope.freq_base": BASE, f"{architecture}.attention.layer_norm_rms_epsilon": EPS,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)),
        "tokenizer.ggml.merges": MERGES, "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.add_bos_token": False,
    }  # fmt: skip
    if change is not None:
        change(fields)
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add.get(type(value), writer.add_array)(name, value)
    for name, array in tensors.items():
        if kind is None or array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
