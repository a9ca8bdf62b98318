"""Reads a model's ``config.json``: the KV of each layer.

Field names, defaults and meanings are those of the configuration classes of transformers 5.24. A field that may change
the KV and is not known here is an error: a guess would be a cache of the wrong size.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.spec.layers import Attention, Latent, Layer, Recurrent, SameAs, check_layers
from pagedkv.spec.paths import path_text
from pagedkv.spec.sizes import whole_number

MOST_BYTES = 16 << 20  # of a config.json
MOST_LAYERS = 1024
CHANGES_KV = re.compile(
    r"window|chunk|kv_|kv$|latent|lora_rank|mamba|ssm|(^|_)conv|^linear_|^index_|_state(s|_size)?$|layer_types|cross|compress"
    r"|bidirectional|recurrent|block_type|attn_layer|attn_type|no_rope|head_dim|num_key|attention_(pattern|type)"
)
UNCHANGED = frozenset({  # the expression above finds them, and none changes the KV
    "query_pre_attn_scalar", "output_hidden_states", "q_lora_rank", "v_head_dim", "qk_nope_head_dim", "qk_head_dim",
    "mamba_conv_bias", "mamba_proj_bias", "mamba_chunk_size", "mamba_dt_rank", "use_mamba_kernels", "use_mambapy",
    "num_key_value_heads", "head_dim",
})  # fmt: skip
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
WINDOWS = ("layer_types", "sliding_window")

Fields: TypeAlias = Mapping[str, Any]


class ModelConfig(NamedTuple):
    """The part of a ``config.json`` that is about KV.

    Attributes
    ----------
    model_type : the family's name.
    layers : in the model's order.
    dtype : of the weights, as the file has it; "" where it does not say.
    context : tokens that the model takes; 0 where it does not say.
    query_heads : of a layer; 0 where it does not say.
    experts : of a mixture, of which a token meets a few; 0 where the file names none.
    """

    model_type: str
    layers: tuple[Layer, ...]
    dtype: str
    context: int
    query_heads: int = 0
    experts: int = 0


@dataclass(frozen=True, slots=True)
class Family:
    """How to read the files of one family.

    Parameters
    ----------
    layers : makes the layers of a file's fields.
    fields : those that `layers` reads, beside the heads.
    defaults : values of fields that a file may leave out.
    """

    layers: Callable[[Fields], list[Layer]]
    fields: tuple[str, ...] = ()
    defaults: Mapping[str, Any] | None = None


def read_config(config: Mapping[str, Any] | str | os.PathLike[str]) -> ModelConfig:
    """Read a model's ``config.json``, or a mapping with its content.

    Raises
    ------
    WrongType, InvalidArgument
        It is no such file, of a family that is not known here, or has a field that may change the KV and is not known.
        The message names the field.
    """
    whole = config if isinstance(config, Mapping) else _loaded(path_text(config, "config"))
    text = whole.get("text_config", whole)
    if not isinstance(text, Mapping):
        raise WrongType(f"text_config must be an object, not {type(text).__name__}")
    name = text.get("model_type", whole.get("model_type"))
    if not isinstance(name, str):
        raise InvalidArgument("the config has no model_type: is it a model's config.json?")
    family = FAMILIES.get(name)
    if family is None:
        raise InvalidArgument(f"model_type {name[:40]!r} is not known; known are {', '.join(sorted(FAMILIES))}")
    merged = {**(family.defaults or {}), **text}
    fields = {field: value for field, value in merged.items() if value is not None}
    _check_known(name, fields, family)
    _check_quantisation(whole, text)
    dtype = text.get("dtype") or text.get("torch_dtype") or whole.get("dtype") or whole.get("torch_dtype") or ""
    context = _count(fields.get("max_position_embeddings", 0), "context", 0)
    heads = _count(fields.get("num_attention_heads", 0), "num_attention_heads", 0)
    experts = max(_count(fields.get(field, 0), field, 0) for field in EXPERTS)
    return ModelConfig(name, check_layers(tuple(family.layers(fields))), str(dtype), context, heads, experts)


def _loaded(path: str) -> Mapping[str, Any]:
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        found = json.loads(content) if len(content) <= MOST_BYTES else None
    except OSError as problem:
        raise InvalidArgument(f"config: {path} cannot be read: {problem.strerror}") from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidArgument(f"config: {path} is no JSON object: a model's config.json is needed")
    return found


def _check_known(name: str, fields: Fields, family: Family) -> None:
    """Raise where a field may change the KV and nothing here reads it."""
    known = UNCHANGED.union(family.fields)
    for field, value in fields.items():
        if CHANGES_KV.search(field) and field not in known and value not in (None, False, 0, [], {}):
            raise InvalidArgument(f"{field} may change the KV of a {name} model, and is not known: give the layers")


def _check_quantisation(whole: Fields, text: Fields) -> None:
    for one in (whole, text):
        quantised = one.get("quantization_config")
        if isinstance(quantised, Mapping) and quantised.get("kv_cache_scheme"):
            raise InvalidArgument("quantization_config.kv_cache_scheme asks for quantised KV, which is not read here")


# ---- fields


def _count(value: Any, name: str, least: int = 1) -> int:
    return whole_number(value, name, least, 2**31 - 1)


def _given(fields: Fields, name: str) -> int:
    if name not in fields:
        raise InvalidArgument(f"the config has no {name}")
    return _count(fields[name], name)


def _num_layers(fields: Fields) -> int:
    return whole_number(_given(fields, "num_hidden_layers"), "num_hidden_layers", 1, MOST_LAYERS)


def _heads(fields: Fields) -> tuple[int, int]:
    """KV heads and their size."""
    queries = _given(fields, "num_attention_heads")
    heads = _count(fields.get("num_key_value_heads", queries), "num_key_value_heads")
    if "head_dim" in fields:
        return heads, _count(fields["head_dim"], "head_dim")
    return heads, max(1, _given(fields, "hidden_size") // queries)


def _types(fields: Fields, by_default: Callable[[int], str], *known: str) -> list[str]:
    """The kind of each layer: as the file lists them, or by the family's rule."""
    count = _num_layers(fields)
    types = fields.get("layer_types", [by_default(i) for i in range(count)])
    if not isinstance(types, list | tuple) or len(types) != count:
        raise InvalidArgument(f"layer_types must be a list of {count} names, one for each layer")
    for number, kind in enumerate(types):
        if kind not in known:
            raise InvalidArgument(f"layer_types[{number}] is {str(kind)[:40]!r}; known are {', '.join(known)}")
    return list(types)


# ---- families


def _alike(fields: Fields) -> list[Layer]:
    """All layers alike, with a window if there is one."""
    window = fields.get("sliding_window")
    window = None if window is None else _count(window, "sliding_window")
    return [Attention(*_heads(fields), window=window)] * _num_layers(fields)


def _qwen(fields: Fields) -> list[Layer]:
    window = _qwen_window(fields)
    first = _count(fields.get("max_window_layers", 28), "max_window_layers", 0)
    default = "full_attention" if window is None else "sliding_attention"
    return _windowed(fields, lambda i: default if i >= first else "full_attention", window)


def _qwen_window(fields: Fields) -> int | None:
    """The window, where the file has one and switches it on."""
    if not fields.get("use_sliding_window") or "sliding_window" not in fields:
        return None
    return _count(fields["sliding_window"], "sliding_window")


def _qwen3_moe(fields: Fields) -> list[Layer]:
    """All layers alike: this family's `max_window_layers` is not read."""
    return [Attention(*_heads(fields), window=_qwen_window(fields))] * _num_layers(fields)


def _every(number: int) -> Callable[[Fields], list[Layer]]:
    """All layers have a window but every `number`-th, beginning behind the first ones."""

    def layers(fields: Fields) -> list[Layer]:
        period = fields.get("sliding_window_pattern", fields.get("_sliding_window_pattern", number))
        period = _count(period, "sliding_window_pattern")
        window = _given(fields, "sliding_window")
        return _windowed(fields, lambda i: "sliding_attention" if (i + 1) % period else "full_attention", window)

    return layers


def _windowed(fields: Fields, by_default: Callable[[int], str], window: int | None) -> list[Layer]:
    full, local = Attention(*_heads(fields)), Attention(*_heads(fields), window=window)
    types = _types(fields, by_default, "full_attention", "sliding_attention")
    return [local if kind == "sliding_attention" else full for kind in types]


def _gemma3n(fields: Fields) -> list[Layer]:
    """The last layers read the KV of the last layer before them that sees as far."""
    layers = _every(5)(fields)
    shared = _count(fields.get("num_kv_shared_layers", 15), "num_kv_shared_layers", 0)
    own = len(layers) - shared
    if shared and own < 1:
        raise InvalidArgument(f"num_kv_shared_layers = {shared}, but there are {len(layers)} layers")
    last = {layer: number for number, layer in enumerate(layers[:own])}
    for number in range(own, len(layers)):
        if layers[number] not in last:
            raise InvalidArgument(f"layer {number} shares KV, and no layer with its own sees as far")
        layers[number] = SameAs(last[layers[number]])
    return layers


def _llama4(fields: Fields) -> list[Layer]:
    count, chunk = _num_layers(fields), fields.get("attention_chunk_size")  # null: none
    period = _count(fields.get("no_rope_layer_interval", 4), "no_rope_layer_interval")
    positions = fields.get("no_rope_layers") or [int((i + 1) % period != 0) for i in range(count)]
    if not isinstance(positions, list | tuple) or len(positions) != count:
        raise InvalidArgument(f"no_rope_layers must be a list of {count} numbers, one for each layer")
    full = Attention(*_heads(fields))
    local = full if not chunk else Attention(*_heads(fields), chunk=_count(chunk, "attention_chunk_size"))
    types = _types(
        fields, lambda i: "chunked_attention" if positions[i] else "full_attention",
        "full_attention", "chunked_attention",
    )  # fmt: skip
    return [local if kind == "chunked_attention" else full for kind in types]


def _latent(fields: Fields) -> list[Layer]:
    rank, rope = _given(fields, "kv_lora_rank"), _count(fields.get("qk_rope_head_dim", 0), "qk_rope_head_dim", 0)
    return [Latent(rank, rope)] * _num_layers(fields)


def _qwen3_next(fields: Fields) -> list[Layer]:
    """Gated delta rule: the last inputs of a convolution, and a matrix for each head of V."""
    keys, values = _given(fields, "linear_num_key_heads"), _given(fields, "linear_num_value_heads")
    key_dim, value_dim = _given(fields, "linear_key_head_dim"), _given(fields, "linear_value_head_dim")
    width = _given(fields, "linear_conv_kernel_dim")
    state = Recurrent((
        ("conv", (width - 1, 2 * keys * key_dim + values * value_dim), "bfloat16"),
        ("delta", (values, key_dim, value_dim), "float32"),
    ))  # fmt: skip
    period = _count(fields.get("full_attention_interval", 4), "full_attention_interval")
    types = _types(
        fields, lambda i: "linear_attention" if (i + 1) % period else "full_attention",
        "full_attention", "linear_attention",
    )  # fmt: skip
    full = Attention(*_heads(fields))
    return [state if kind == "linear_attention" else full for kind in types]


def _jamba(fields: Fields) -> list[Layer]:
    """Mamba: the last inputs of a convolution, and a state for each channel."""
    width = _given(fields, "mamba_expand") * _given(fields, "hidden_size")
    state = Recurrent((
        ("conv", (_given(fields, "mamba_d_conv") - 1, width), "bfloat16"),
        ("ssm", (width, _given(fields, "mamba_d_state")), "float32"),
    ))  # fmt: skip
    period, offset = _given(fields, "attn_layer_period"), _count(fields["attn_layer_offset"], "attn_layer_offset", 0)
    full = Attention(*_heads(fields))
    return [full if i % period == offset else state for i in range(_num_layers(fields))]


def _granite(fields: Fields) -> list[Layer]:
    """Mamba 2: one state for each head."""
    heads, size = _given(fields, "mamba_n_heads"), _given(fields, "mamba_d_state")
    width = _given(fields, "mamba_expand") * _given(fields, "hidden_size")
    dim = width // heads if fields["mamba_d_head"] == "auto" else _given(fields, "mamba_d_head")
    state = Recurrent((
        ("conv", (_given(fields, "mamba_d_conv") - 1, width + 2 * _given(fields, "mamba_n_groups") * size), "bfloat16"),
        ("ssm", (heads, dim, size), "float32"),
    ))  # fmt: skip
    listed = {**fields, "layer_types": fields.get("layer_types", fields.get("layers_block_type"))}
    if listed["layer_types"] is None:
        raise InvalidArgument("the config has no layer_types")
    types = _types(listed, lambda i: "", "attention", "full_attention", "mamba", "linear_attention")
    full = Attention(*_heads(fields))
    return [full if kind in ("attention", "full_attention") else state for kind in types]


_UNIFORM = Family(_alike)
_WINDOW = Family(_alike, ("sliding_window",))
_LATENT = Family(_latent, ("kv_lora_rank", "qk_rope_head_dim"), {"kv_lora_rank": 512, "qk_rope_head_dim": 64})
_QWEN = (*WINDOWS, "use_sliding_window", "max_window_layers")
_GEMMA3 = Family(
    _every(6), (*WINDOWS, "sliding_window_pattern", "_sliding_window_pattern"),
    {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
)  # fmt: skip
FAMILIES: dict[str, Family] = {
    "llama": _UNIFORM,
    "qwen2": Family(_qwen, _QWEN, {"sliding_window": 4096}),
    "qwen3": Family(_qwen, _QWEN, {"head_dim": 128, "sliding_window": 4096}),
    "qwen3_moe": Family(_qwen3_moe, _QWEN[1:], {"num_key_value_heads": 4, "sliding_window": 4096}),
    "mistral": Family(_alike, ("sliding_window",), {"num_key_value_heads": 8, "sliding_window": 4096}),
    "mixtral": Family(_alike, ("sliding_window",), {"num_key_value_heads": 8}),
    "phi3": _WINDOW,
    "glm": Family(_alike, (), {"num_key_value_heads": 2, "head_dim": 128}),
    "glm4": Family(_alike, (), {"num_key_value_heads": 2, "head_dim": 128}),
    "glm4_moe": Family(_alike, (), {"num_key_value_heads": 8}),
    "gemma2": Family(
        _every(2), (*WINDOWS, "sliding_window_size"),
        {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "gemma3n_text": Family(
        _gemma3n, (*WINDOWS, "num_kv_shared_layers"),
        {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512},
    ),
    "gpt_oss": Family(
        _every(2), WINDOWS,
        {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
    ),
    "llama4_text": Family(
        _llama4, ("layer_types", "attention_chunk_size", "no_rope_layers", "no_rope_layer_interval"),
        {"num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192},
    ),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "kimi_k2": _LATENT,
    "qwen3_next": Family(
        _qwen3_next,
        ("layer_types", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
         "linear_value_head_dim", "linear_conv_kernel_dim"),
        {"num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
         "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
    ),
    "jamba": Family(
        _jamba, ("mamba_d_state", "mamba_d_conv", "mamba_expand", "attn_layer_period", "attn_layer_offset"),
        {"num_key_value_heads": 8, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
         "attn_layer_period": 8, "attn_layer_offset": 4},
    ),
    "granitemoehybrid": Family(
        _granite,
        ("layer_types", "layers_block_type", "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head",
         "mamba_d_conv", "mamba_expand"),
        {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4,
         "mamba_expand": 2},
    ),
}  # fmt: skip
