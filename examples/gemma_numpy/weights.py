"""The weights of a Gemma 3 model, read from its GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.gemma_numpy.config import GemmaConfig
from examples.gemma_numpy.tokenizer import Vocabulary
from examples.llama_numpy.folders import sha256_of
from examples.llama_numpy.gguf_file import contents, joined, told_of
from examples.llama_numpy.weights import Floats

LAYER_TENSORS = {  # the tensors stacked side by side, by our name
    "attn_norm": ("attn_norm",),
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "q_norm": ("attn_q_norm",),
    "k_norm": ("attn_k_norm",),
    "attn_output": ("attn_output",),
    "attn_post_norm": ("post_attention_norm",),
    "ffn_norm": ("ffn_norm",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "ffn_down": ("ffn_down",),
    "ffn_post_norm": ("post_ffw_norm",),
}


@dataclass(frozen=True, slots=True, eq=False)
class GemmaWeights:
    """All matrices as [out, in]; the output layer is the embedding.

    Attributes
    ----------
    embedding : float32 [vocab_size, width].
    output_norm : float32 [width].
    attn_norm, attn_post_norm, ffn_norm, ffn_post_norm : float32 [num_layers, width], the 1 that is added is in them.
    q_norm, k_norm : float32 [num_layers, head_dim].
    qkv : float32 [num_layers, qo_width + 2 * kv_width, width].
    attn_output, gate_up, ffn_down : as :class:`examples.llama_numpy.weights.LlamaWeights`.
    """

    config: GemmaConfig
    embedding: Floats
    output_norm: Floats
    attn_norm: Floats
    qkv: Floats
    q_norm: Floats
    k_norm: Floats
    attn_output: Floats
    attn_post_norm: Floats
    ffn_norm: Floats
    gate_up: Floats
    ffn_down: Floats
    ffn_post_norm: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """The content of a model file, and the SHA-256 of its bytes."""

    name: str
    sha256: str
    vocabulary: Vocabulary
    weights: GemmaWeights


def load_model(path: Path) -> Model:
    """Read and check a whole GGUF file; quantised weights are expanded to float32.

    Raises
    ------
    ModelFileError
        The file is damaged, or not of a Gemma 3 text model.
    ImportError
        The package ``gguf`` is not installed.
    OSError
        The file cannot be read.
    """
    fields, tensors = contents(path)
    with told_of(path, "its metadata cannot be used"):
        vocabulary = _vocabulary(fields)
        config = _config(fields, len(vocabulary.tokens))
    with told_of(path, "its tensors cannot be used"):
        shapes = array_shapes(config)
        wanted = {tensor for name in shapes for tensor in _tensors_of(name, config)}
        if wanted != set(tensors):
            raise ValueError(f"tensors that are missing or of another model: {sorted(wanted ^ set(tensors))[:4]}")
        arrays = {}
        for name, shape in shapes.items():
            arrays[name] = joined([tensors[part] for part in _tensors_of(name, config)], shape)
        weights = GemmaWeights(config, **arrays)
        return Model(str(fields.get("general.name", path.stem)), sha256_of(path), vocabulary, weights)


def array_shapes(config: GemmaConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every array of the weights, by attribute."""
    layers, width = config.num_layers, config.width
    return {
        "embedding": (config.vocab_size, width),
        "output_norm": (width,),
        "attn_norm": (layers, width),
        "qkv": (layers, config.qo_width + 2 * config.kv_width, width),
        "q_norm": (layers, config.head_dim),
        "k_norm": (layers, config.head_dim),
        "attn_output": (layers, width, config.qo_width),
        "attn_post_norm": (layers, width),
        "ffn_norm": (layers, width),
        "gate_up": (layers, 2 * config.ff_width, width),
        "ffn_down": (layers, width, config.ff_width),
        "ffn_post_norm": (layers, width),
    }


def _config(fields: Mapping[str, Any], num_tokens: int) -> GemmaConfig:
    architecture = fields["general.architecture"]
    if architecture != "gemma3":
        raise ValueError(f"its architecture is {architecture!r}; this example computes 'gemma3' alone")

    def number(name: str, *default: Any) -> Any:
        return fields.get(f"gemma3.{name}", *default) if default else fields[f"gemma3.{name}"]

    head_dim = number("attention.key_length")
    if number("attention.value_length", head_dim) != head_dim:
        raise ValueError("its V is not as wide as its K")
    if number("rope.scaling.type", "none") != "none":
        raise ValueError("its rotary embedding is scaled, which this example does not compute")
    return GemmaConfig(
        vocab_size=num_tokens,
        num_layers=number("block_count"),
        width=number("embedding_length"),
        ff_width=number("feed_forward_length"),
        num_qo_heads=number("attention.head_count"),
        num_kv_heads=number("attention.head_count_kv"),
        head_dim=head_dim,
        context_length=number("context_length"),
        rope_base=number("rope.freq_base", 1000000.0),
        rms_eps=number("attention.layer_norm_rms_epsilon"),
        window=number("attention.sliding_window"),
    )


def _vocabulary(fields: Mapping[str, Any]) -> Vocabulary:
    if fields["tokenizer.ggml.model"] != "llama":
        raise ValueError(f"its tokenizer is {fields['tokenizer.ggml.model']!r}, not SentencePiece's ('llama')")
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        raise ValueError("its tokenizer adds a space in front of every text, which this example does not")
    return Vocabulary(
        tokens=tuple(fields["tokenizer.ggml.tokens"]),
        scores=tuple(fields["tokenizer.ggml.scores"]),
        kinds=tuple(fields["tokenizer.ggml.token_type"]),
        bos_id=fields["tokenizer.ggml.bos_token_id"],
        eos_id=fields["tokenizer.ggml.eos_token_id"],
    )


def _tensors_of(name: str, config: GemmaConfig) -> list[str]:
    """The file's names of what one of our arrays is made of, in order."""
    if name in ("embedding", "output_norm"):
        return ["token_embd.weight" if name == "embedding" else "output_norm.weight"]
    return [f"blk.{layer}.{part}.weight" for layer in range(config.num_layers) for part in LAYER_TENSORS[name]]
