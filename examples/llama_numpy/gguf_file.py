"""Reads a GGUF file: config, vocabulary and weights of a llama model.

Everything else is refused with its reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from examples.llama_numpy.config import LlamaConfig
from examples.llama_numpy.errors import ModelFileError
from examples.llama_numpy.folders import sha256_of
from examples.llama_numpy.tokenizer import PRE_TOKENIZERS
from examples.llama_numpy.vocabulary import Vocabulary
from examples.llama_numpy.weights import Floats, LlamaWeights, stored_shapes
from pagedkv import extras

GLOBAL_TENSORS = {"embedding": "token_embd", "output_norm": "output_norm", "output": "output"}
LAYER_TENSORS = {  # what is stacked side by side, by our name
    "attn_norm": ("attn_norm",),
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "attn_output": ("attn_output",),
    "ffn_norm": ("ffn_norm",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "ffn_down": ("ffn_down",),
}
DAMAGE = (ValueError, IndexError, KeyError, TypeError, ArithmeticError, MemoryError, RecursionError, RuntimeWarning)


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """What a model file holds, and the SHA-256 of its bytes."""

    name: str
    sha256: str
    vocabulary: Vocabulary
    weights: LlamaWeights


def read_gguf(path: Path) -> Model:
    """Read and check a whole GGUF file; quantised weights are expanded to float32.

    Raises
    ------
    ModelFileError
        The file is damaged, or not of a llama model with a byte-level BPE tokenizer.
    ImportError
        The package ``gguf`` is not installed.
    OSError
        The file cannot be read.
    """
    fields, tensors = contents(path)
    with told_of(path, "its metadata cannot be used"):
        vocabulary = _vocabulary(fields)
        config = _config(fields, "output.weight" in tensors, len(vocabulary.tokens))
    with told_of(path, "its tensors cannot be used"):
        _check_names(config, tensors)
        arrays = {}
        for name, shape in stored_shapes(config).items():
            arrays[name] = joined([tensors[part] for part in _tensors_of(name, config)], shape)
            if not np.isfinite(arrays[name]).all():
                raise ValueError(f"{' or '.join(_short_names(name))} holds NaN or infinity")
        weights = LlamaWeights.from_arrays(config, arrays)
        return Model(str(fields.get("general.name", path.stem)), sha256_of(path), vocabulary, weights)


def contents(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata of a GGUF file, and its tensors by name.

    Raises
    ------
    ModelFileError
        The file is damaged.
    ImportError
        The package ``gguf`` is not installed.
    OSError
        The file cannot be read.
    """
    try:
        from examples.llama_numpy.gguf_reader import Reader
    except ImportError as error:
        raise ImportError(f"reading GGUF files needs the package gguf: {extras.command('examples')}") from error
    if path.stat().st_size == 0:
        raise ModelFileError(path, "the file is empty: give a .gguf file")
    try:
        reader = Reader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        return fields, {tensor.name: tensor for tensor in reader.tensors}
    except DAMAGE as error:
        from examples.llama_numpy.gguf_damage import why_unreadable

        raise ModelFileError(path, why_unreadable(path)) from error


@contextmanager
def told_of(path: Path, what: str) -> Iterator[None]:
    """Whatever a file's content can make a reader raise, as an error that names the file."""
    try:
        yield
    except DAMAGE as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ModelFileError(path, f"{what}: {reason or type(error).__name__}") from error


def _config(fields: Mapping[str, Any], has_output: bool, num_tokens: int) -> LlamaConfig:
    architecture = fields["general.architecture"]
    if architecture != "llama":
        raise ValueError(f"its architecture is {architecture!r}; this example computes 'llama' alone")

    def number(name: str, *default: Any) -> Any:
        return fields.get(f"llama.{name}", *default) if default else fields[f"llama.{name}"]

    if number("expert_count", 0):
        raise ValueError("it is a mixture of experts")
    scaling = number("rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(f"its rotary embedding is scaled ({scaling!r}), which this example does not compute")
    width, heads = number("embedding_length"), number("attention.head_count")
    head_dim = number("attention.key_length", width // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if number(name, head_dim) != head_dim:
            raise ValueError(f"llama.{name} is {number(name)}; this example needs it equal to head_dim, {head_dim}")
    if number("vocab_size", num_tokens) != num_tokens:
        raise ValueError(f"llama.vocab_size is {number('vocab_size')}, but the tokenizer has {num_tokens} tokens")
    return LlamaConfig(
        vocab_size=num_tokens,
        num_layers=number("block_count"),
        width=width,
        ff_width=number("feed_forward_length"),
        num_qo_heads=heads,
        num_kv_heads=number("attention.head_count_kv", heads),
        head_dim=head_dim,
        context_length=number("context_length"),
        rope_base=number("rope.freq_base", 10000.0),
        rms_eps=number("attention.layer_norm_rms_epsilon"),
        tied=not has_output,
    )


def _vocabulary(fields: Mapping[str, Any]) -> Vocabulary:
    if fields["tokenizer.ggml.model"] != "gpt2":
        raise ValueError(f"its tokenizer is {fields['tokenizer.ggml.model']!r}, not byte-level BPE ('gpt2')")
    if fields.get("tokenizer.ggml.add_bos_token", False):
        raise ValueError("it wants a token in front of every prompt, which this example does not add")
    if fields["tokenizer.ggml.pre"] not in PRE_TOKENIZERS:
        raise ValueError(
            f"its pre-tokenizer is {fields['tokenizer.ggml.pre']!r}, not one of {', '.join(PRE_TOKENIZERS)}"
        )
    return Vocabulary(
        tokens=tuple(fields["tokenizer.ggml.tokens"]),
        kinds=tuple(fields["tokenizer.ggml.token_type"]),
        merges=tuple(fields["tokenizer.ggml.merges"]),
        pre=fields["tokenizer.ggml.pre"],
        eos_id=fields["tokenizer.ggml.eos_token_id"],
    )


def _short_names(name: str) -> tuple[str, ...]:
    return LAYER_TENSORS.get(name) or (GLOBAL_TENSORS[name],)


def _tensors_of(name: str, config: LlamaConfig) -> list[str]:
    """The file's names of what one of our arrays is made of, in order."""
    if name in GLOBAL_TENSORS:
        return [f"{GLOBAL_TENSORS[name]}.weight"]
    return [f"blk.{layer}.{part}.weight" for layer in range(config.num_layers) for part in LAYER_TENSORS[name]]


def _check_names(config: LlamaConfig, tensors: Mapping[str, Any]) -> None:
    """All that the model needs is there, and nothing that would change what it computes."""
    wanted = {tensor for name in stored_shapes(config) for tensor in _tensors_of(name, config)}
    for problem, names in (("missing", wanted - set(tensors)), ("of another kind of model", set(tensors) - wanted)):
        if names:
            shown = ", ".join(sorted(names)[:4])
            raise ValueError(f"{len(names)} tensors are {problem}: {shown}{', ...' if len(names) > 4 else ''}")


def joined(tensors: Iterable[Any], shape: tuple[int, ...]) -> Floats:
    """Tensors below each other in one float32 array of `shape`, expanded one at a time.

    Raises
    ------
    ValueError
        They do not fill it exactly.
    """
    import gguf

    whole = np.empty(shape, np.float32)
    rows = whole.reshape(-1, shape[-1])
    filled = 0
    for tensor in tensors:
        part = np.atleast_2d(gguf.dequantize(tensor.data, tensor.tensor_type))
        if part.shape[1] != shape[-1] or filled + len(part) > len(rows):
            raise ValueError(f"a tensor of shape {part.shape[::-1]} does not fit into {shape}")
        rows[filled : filled + len(part)] = part
        filled += len(part)
    if filled != len(rows):
        raise ValueError(f"tensors fill {filled} of the {len(rows)} rows of {shape}")
    return whole
