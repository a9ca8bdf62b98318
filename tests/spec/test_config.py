"""``config.json`` files: the layers they describe, and fields that must not be guessed."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import pagedkv as pk
from pagedkv.cli import main
from pagedkv.lab.sizing import KVFormat, LayerGroup, StateGroup, groups_of, mla, sequence_bytes
from pagedkv.spec.config import FAMILIES, read_config
from pagedkv.spec.layers import Attention, Latent, Recurrent, SameAs, check_layers
from tests.spec.published import CONFIGS, LENGTHS, SOURCES

BF16 = KVFormat("bfloat16")
GROUPS = {
    "Llama-3.1-8B": [LayerGroup(32, 8, 128)],
    "Qwen2.5-7B-Instruct": [LayerGroup(28, 4, 128)],
    "Qwen3-8B": [LayerGroup(36, 8, 128)],
    "Mistral-7B-v0.1": [LayerGroup(32, 8, 128, window=4096)],
    "Mistral-7B-v0.3": [LayerGroup(32, 8, 128)],
    "gemma-2-9b": [LayerGroup(21, 8, 256, window=4096), LayerGroup(21, 8, 256)],
    "gemma-3-27b-it": [LayerGroup(52, 16, 128, window=1024), LayerGroup(10, 16, 128)],
    "gemma-3-270m": [LayerGroup(15, 1, 256, window=512), LayerGroup(3, 1, 256)],
    "gemma-3n-E4B-it": [LayerGroup(16, 2, 256, window=512), LayerGroup(4, 2, 256)],
    "gpt-oss-120b": [LayerGroup(18, 8, 64, window=128), LayerGroup(18, 8, 64)],
    "Llama-4-Scout-17B-16E": [LayerGroup(36, 8, 128, chunk=8192), LayerGroup(12, 8, 128)],
    "DeepSeek-V2-Lite": [mla(27, 512, 64)],
    "DeepSeek-V3": [mla(61, 512, 64)],
    "Kimi-K2-Instruct": [mla(61, 512, 64)],
    "Qwen3-Next-80B-A3B": [StateGroup(36, 3 * 8192 * 2 + 32 * 128 * 128 * 4), LayerGroup(12, 2, 256)],
    "Jamba-v0.1": [StateGroup(28, 3 * 8192 * 2 + 8192 * 16 * 4), LayerGroup(4, 8, 128)],
    "granite-4.0-h-small": [StateGroup(36, 3 * 8448 * 2 + 128 * 64 * 128 * 4), LayerGroup(4, 8, 128)],
    "phi-4": [LayerGroup(40, 10, 128)],
    "GLM-4-9B-0414": [LayerGroup(40, 2, 128)],
    "GLM-4.5": [LayerGroup(92, 8, 128)],
}
LEAST = {  # bytes per token that the newest query can read, by length: figures of the models' own papers' arithmetic
    "gemma-3-27b-it": (188_416, 95_232, 85_248),
    "gpt-oss-120b": (38_016, 37_008, 36_900),
    "DeepSeek-V3": (70_272, 70_272, 70_272),
    "Llama-4-Scout-17B-16E": (196_608, 86_016, 58_368),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_published_models_have_their_groups(name: str) -> None:
    assert set(groups_of(read_config(CONFIGS[name]).layers)) == set(GROUPS[name])


@pytest.mark.parametrize("name", LEAST)
def test_published_models_need_so_many_bytes(name: str) -> None:
    groups = groups_of(read_config(CONFIGS[name]).layers)
    assert tuple(sequence_bytes(groups, length, None, BF16) // length for length in LENGTHS) == LEAST[name]


def test_the_order_of_layers_is_the_models() -> None:
    gemma = read_config(CONFIGS["gemma-3-27b-it"]).layers
    assert [i for i, layer in enumerate(gemma) if layer == Attention(16, 128)] == list(range(5, 62, 6))
    listed = read_config(CONFIGS["gpt-oss-120b"])
    unlisted = {name: value for name, value in CONFIGS["gpt-oss-120b"].items() if name != "layer_types"}
    assert read_config(unlisted) == listed
    assert listed.layers[0] == Attention(8, 64, window=128)
    qwen = read_config(CONFIGS["Qwen3-Next-80B-A3B"]).layers
    assert [i for i, layer in enumerate(qwen) if isinstance(layer, Attention)] == list(range(3, 48, 4))
    jamba = read_config(CONFIGS["Jamba-v0.1"]).layers
    assert [i for i, layer in enumerate(jamba) if isinstance(layer, Attention)] == [4, 12, 20, 28]
    scout = read_config(CONFIGS["Llama-4-Scout-17B-16E"]).layers
    assert [i for i, layer in enumerate(scout) if layer == Attention(8, 128)] == list(range(3, 48, 4))


def test_shared_layers_read_the_last_layer_that_sees_as_far() -> None:
    layers = read_config(CONFIGS["gemma-3n-E4B-it"]).layers
    assert layers[19] == Attention(2, 256)
    assert layers[20:25] == (SameAs(18), SameAs(18), SameAs(18), SameAs(18), SameAs(19))
    assert not any(isinstance(layer, SameAs) for layer in layers[:20])


def test_windows_of_qwen_count_only_where_they_are_on() -> None:
    on = {**CONFIGS["Qwen2.5-7B-Instruct"], "use_sliding_window": True, "max_window_layers": 20}
    layers = read_config(on).layers
    assert layers[19] == Attention(4, 128)
    assert layers[20] == Attention(4, 128, window=131_072)


@pytest.mark.parametrize(("length", "kept"), [(1, 1), (8192, 8192), (8193, 1), (20_000, 3616)])
def test_a_chunk_keeps_the_tokens_since_its_beginning(length: int, kept: int) -> None:
    assert LayerGroup(1, 1, 1, chunk=8192).kept_tokens(length) == kept


# ---- needs of a boundary


@pytest.mark.parametrize(
    "layer", [Attention(1, 1), *(Attention(1, 1, window=w) for w in (1, 2, 3, 4, 5, 9, 40)),
              *(Attention(1, 1, chunk=c) for c in (4, 8, 16)), Latent(1)],
)  # fmt: skip
def test_a_boundary_needs_the_blocks_that_later_tokens_read(layer: Attention | Latent) -> None:
    size = 4
    for blocks, token in product(range(12), range(120)):
        at = blocks * size + token
        window, chunk = getattr(layer, "window", None), getattr(layer, "chunk", None)
        begin = max(0, at - window + 1) if window else at // chunk * chunk if chunk else 0
        read = {position // size for position in range(begin, min(at + 1, blocks * size))}
        assert read <= set(range(blocks - layer.need(blocks, size), blocks))
        if not token:
            assert len(read) == layer.need(blocks, size)


def test_a_state_is_that_behind_the_last_block() -> None:
    state = Recurrent((("conv", (3, 8), "bfloat16"), ("ssm", (2, 4), "float32")))
    assert [state.need(blocks, 16) for blocks in (0, 1, 9)] == [0, 1, 1]
    assert state.state_bytes == 3 * 8 * 2 + 2 * 4 * 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: Attention(0, 1), lambda: Attention(1, 1, window=0), lambda: Attention(1, 1, chunk=0),
        lambda: Attention(1, 1, window=4, chunk=4), lambda: Latent(0), lambda: Recurrent(()),
        lambda: Recurrent((("x", (0,), "float32"),)), lambda: Recurrent((("x", (1,), "int8"),)), lambda: SameAs(-1),
        lambda: check_layers((SameAs(0),)), lambda: check_layers((SameAs(1), Attention(1, 1))),
        lambda: check_layers((Attention(1, 1), SameAs(0), SameAs(1))),
        lambda: check_layers((Recurrent((("x", (1,), "float32"),)), SameAs(0))),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_are_refused(make: Any) -> None:
    with pytest.raises((pk.InvalidArgument, pk.WrongType)):
        make()


def test_what_contradicts_itself_is_named_by_its_layer() -> None:
    with pytest.raises(pk.InvalidArgument, match=r"window of Attention\(2, 64, window=0\) must be in 1\.\."):
        pk.KVSpec.of([Attention(2, 64), Attention(2, 64, window=0)])
    with pytest.raises(pk.InvalidArgument, match=r"Attention\(2, 64, window=8, chunk=8\) has a window and a chunk"):
        Attention(2, 64, window=8, chunk=8)
    with pytest.raises(pk.InvalidArgument, match=r"of layer 0 alone 4\.00 GiB; at most 2 GiB: take a smaller"):
        pk.KVSpec.of([Attention(2**16, 1024)] * 2)
    with pytest.raises(pk.InvalidArgument, match="sliding_window must be in 1"):
        read_config({**CONFIGS["Mistral-7B-v0.1"], "sliding_window": 0})


# ---- specs


REACH: dict[str, Any] = {
    "gemma-3-27b-it": {"windows": [1024 if i % 6 < 5 else None for i in range(62)]},
    "gpt-oss-120b": {"windows": [128, None] * 18}, "gemma-2-9b": {"windows": [4096, None] * 21},
    "Llama-4-Scout-17B-16E": {"chunks": [8192, 8192, 8192, None] * 12},
    "gemma-3n-E4B-it": {
        "windows": [512, 512, 512, 512, None] * 4, "reads": [*range(20), *[18, 18, 18, 18, 19] * 3],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "numbers"),
    [("Llama-3.1-8B", (32, 8, 128, "bfloat16")), ("gemma-3-27b-it", (62, 16, 128, "bfloat16")),
     ("gpt-oss-120b", (36, 8, 64, "bfloat16")), ("gemma-2-9b", (42, 8, 256, "float32")),
     ("Llama-4-Scout-17B-16E", (48, 8, 128, "bfloat16")), ("gemma-3n-E4B-it", (20, 2, 256, "bfloat16"))],
)  # fmt: skip
def test_a_spec_is_made_of_a_file(name: str, numbers: tuple[Any, ...], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[name]))
    spec = pk.KVSpec.from_config(path, block_size=32, model=f"{name}@1")
    assert spec == pk.KVSpec(*numbers, 32, model=f"{name}@1", **REACH.get(name, {}))
    assert pk.KVSpec.from_config(CONFIGS[name], dtype="float16").dtype == "float16"


def test_a_spec_of_latents_is_made_of_a_file() -> None:
    spec = pk.KVSpec.from_config(CONFIGS["DeepSeek-V3"], scales=pk.Scales(0.1, 0.1), dtype="float8_e4m3")
    assert spec == pk.KVSpec(61, 1, 576, "float8_e4m3", head_dim_v=512, v_in_k=True, scales=pk.Scales(0.1, 0.1))


SMALL = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
SWITCHED = {**SMALL, "use_sliding_window": True, "max_window_layers": 2, "sliding_window": 100}


@pytest.mark.parametrize(
    ("config", "windows", "chunks"),
    [
        ({"model_type": "llama4_text", **SMALL}, None, (8192, 8192, 8192, None)),
        ({"model_type": "llama4_text", **SMALL, "attention_chunk_size": None}, None, None),
        ({"model_type": "qwen2", **SWITCHED}, (None, None, 100, 100), None),
        ({"model_type": "qwen3", **SWITCHED}, (None, None, 100, 100), None),
        ({"model_type": "qwen3_moe", **SWITCHED}, (100, 100, 100, 100), None),
        ({"model_type": "qwen2", **SWITCHED, "sliding_window": None}, None, None),
        ({"model_type": "qwen3_moe", **SWITCHED, "sliding_window": None}, None, None),
        ({"model_type": "qwen3_moe", **SWITCHED, "use_sliding_window": False}, None, None),
        ({"model_type": "mistral", **SMALL}, (4096, 4096, 4096, 4096), None),
        ({"model_type": "mistral", **SMALL, "sliding_window": None}, None, None),
    ],
)  # fmt: skip
def test_a_field_that_is_null_is_no_field_that_is_missing(config: Any, windows: Any, chunks: Any) -> None:
    spec = pk.KVSpec.from_config(config)
    assert (spec.windows, spec.chunks) == (windows, chunks)


@pytest.mark.parametrize("name", ["Qwen3-Next-80B-A3B", "Jamba-v0.1"])
def test_models_that_a_cache_does_not_hold_are_refused_with_the_layer(name: str) -> None:
    with pytest.raises(pk.errors.UnsupportedVariant, match=r"layer \d+ of this"):
        pk.KVSpec.from_config(CONFIGS[name])


# ---- fields that must not be guessed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "unheard_of"}, "known are"), ({"model_type": None}, "model_type"),
        ({"num_hidden_layers": None}, "num_hidden_layers"), ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers"), ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"sliding_window": 4096}, "sliding_window"), ({"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"), ({"index_topk": 2048}, "index_topk"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers"), ({"cross_attention_layers": [3]}, "cross_attention"),
        ({"layer_types": ["full_attention"] * 32}, "layer_types"), ({"use_bidirectional_attention": True}, "bidirect"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "kv_cache_scheme"),
    ],
)  # fmt: skip
def test_a_field_that_changes_the_kv_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises((pk.InvalidArgument, pk.WrongType), match=said):
        read_config({**CONFIGS["Llama-3.1-8B"], **change})


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("gpt-oss-120b", {"layer_types": ["full_attention"] * 35}, "list of 36"),
        ("gpt-oss-120b", {"layer_types": ["full_attention"] * 35 + ["sparse_attention"]}, r"layer_types\[35\]"),
        ("gpt-oss-120b", {"sliding_window": None}, "sliding_window"),
        ("gpt-oss-120b", {"sliding_window": 0}, "sliding_window"),
        ("granite-4.0-h-small", {"layer_types": None}, "layer_types"),
        ("Jamba-v0.1", {"attn_layer_period": 0}, "attn_layer_period"),
        ("DeepSeek-V3", {"kv_lora_rank": -1}, "kv_lora_rank"),
    ],
)
def test_a_field_that_makes_no_sense_is_named(name: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises((pk.InvalidArgument, pk.WrongType), match=said):
        read_config({**CONFIGS[name], **change})


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b'{"a": 1}', b"[" * 100_000, b"\xff\xfe"])
def test_a_file_that_is_no_config_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(pk.InvalidArgument):
        read_config(path)
    with pytest.raises(pk.InvalidArgument, match="cannot be read"):
        read_config(tmp_path / "none.json")


# ---- the command and the page


def test_plan_takes_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["Qwen3-Next-80B-A3B"]))
    assert main(["plan", "--config", str(path), "--params", "80B", "--active-params", "3B"]) == 0
    said = capsys.readouterr().out
    assert "36 layers with a state of 2.05 MiB" in said
    assert "12 layers of 2 KV heads x 256" in said
    for wrong in (["--config", str(path)], ["--config", str(path), "--params", "1B", "--layers", "3"],
                  ["--config", str(path / "none"), "--params", "1B"], ["--config", str(path), "llama-7b"]):  # fmt: skip
        assert main(["plan", *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def held_by_a_cache(config: dict[str, Any]) -> str:
    try:
        return f"{pk.KVSpec.from_config(config, dtype='bfloat16').bytes_per_token:,}"
    except pk.errors.UnsupportedVariant:
        return "no"


@pytest.mark.checkout
def test_the_page_of_models_has_each_family_and_its_bytes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    rows = {row[0]: row for row in (re.split(r" *\| *", line.strip("| ")) for line in page.splitlines() if "|" in line)}
    for name, config in CONFIGS.items():
        found = read_config(config)
        groups = groups_of(found.layers)
        least = [round(sequence_bytes(groups, length, None, BF16) / length) for length in LENGTHS]
        assert rows[name][1] == f"`{found.model_type}`"
        assert rows[name][3] == " / ".join(f"{each:,}" for each in least)
        assert rows[name][4] == held_by_a_cache(config)
        repository, reader = SOURCES[name]
        address = f"https://huggingface.co/{repository}/blob/main/config.json"
        assert rows[name][5] == f"[{repository}]({address}), `{reader}`"
    named = {read_config(config).model_type for config in CONFIGS.values()}
    assert named | {"gemma3", "mixtral", "glm", "qwen3_moe"} == set(FAMILIES)
