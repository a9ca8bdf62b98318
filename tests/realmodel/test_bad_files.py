"""GGUF files that cannot be used.

The error names the file and says why.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from examples.llama_numpy.errors import ModelFileError
from examples.llama_numpy.gguf_file import read_gguf
from examples.llama_numpy.gguf_reader import MAX_ELEMENTS
from tests.realmodel import tiny
from tests.slices import one_in

CUTS = 60  # places in the tensors where a file is cut


def refused(path: Path, *words: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        read_gguf(path)
    assert caught.value.path == str(path)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("first", one_in(4, range(4)))
def test_a_file_cut_anywhere_is_refused(tiny_path: Path, tmp_path: Path, first: int) -> None:
    whole = tiny_path.read_bytes()
    cut = tmp_path / "cut.gguf"
    tensors = range(7000, len(whole) - 64, (len(whole) - 7000) // CUTS)
    sizes = [*range(0, 7000, 61), *tensors, len(whole) - 40]  # the last tensor is padded by up to 31 bytes
    for size in sizes[first::4]:
        cut.write_bytes(whole[:size])
        refused(cut, *(["get the file again", f"{size:,} bytes"] if size else ["empty"]))
    refused(cut, f"cut short: it has {size:,} bytes, and its tensors end at byte {len(whole):,}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty: give a .gguf file"),
        (b"GGU", "its 3 bytes do not hold"),
        (b"not a model at all", "it begins with b'not ', not b'GGUF'; give a .gguf file"),
        (b"\0" * 4096, "not a GGUF file"),
        (b"GGUF" + b"\xff" * 4096, "its GGUF version is 4294967295, versions 2 and 3 can be read"),
        (b"GGUF\3\0\0\0" + b"\xff" * 4096, "cut short or damaged"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_gguf_is_refused_in_our_own_words(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    refused(path, words)


def test_a_file_that_is_not_there_is_an_os_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_gguf(tmp_path / "nowhere.gguf")


@pytest.mark.parametrize("architecture", ["qwen2", "gemma", "mamba"])
def test_another_architecture_is_refused_by_its_name(tmp_path: Path, tensors: tiny.Tensors, architecture: str) -> None:
    path = tiny.write_gguf(tmp_path / "other.gguf", tensors, architecture=architecture)
    refused(path, architecture, "'llama' alone")


@pytest.mark.parametrize(
    "name", ["token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight", "blk.1.ffn_up.weight"]
)
def test_a_missing_tensor_is_named(tmp_path: Path, tensors: tiny.Tensors, name: str) -> None:
    rest = {key: array for key, array in tensors.items() if key != name}
    refused(tiny.write_gguf(tmp_path / "less.gguf", rest), "missing", name)


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "rope_freqs.weight", "blk.0.ffn_gate_inp.weight"])
def test_a_tensor_that_this_model_would_ignore_is_refused(tmp_path: Path, tensors: tiny.Tensors, name: str) -> None:
    more = {**tensors, name: np.zeros(32, np.float32)}
    refused(tiny.write_gguf(tmp_path / "more.gguf", more), "another kind of model", name)


@pytest.mark.parametrize("shape", [(64, 32), (32, 64), (128, 64), (64,)])
def test_a_tensor_of_another_shape_is_refused(tmp_path: Path, tensors: tiny.Tensors, shape: tuple[int, ...]) -> None:
    wrong = {**tensors, "blk.0.attn_output.weight": np.zeros(shape, np.float32)}
    refused(tiny.write_gguf(tmp_path / "shape.gguf", wrong), "its tensors cannot be used")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.attn_k.weight", "output_norm.weight"])
def test_weights_that_are_no_numbers_are_refused(
    tmp_path: Path, tensors: tiny.Tensors, name: str, value: float
) -> None:
    bad = tensors[name].copy()
    bad.flat[3] = value
    refused(tiny.write_gguf(tmp_path / "nan.gguf", {**tensors, name: bad}), "NaN or infinity")


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no layers named": lambda fields: fields.pop("llama.block_count"),
    "no norm epsilon": lambda fields: fields.pop("llama.attention.layer_norm_rms_epsilon"),
    "no tokens": lambda fields: fields.pop("tokenizer.ggml.tokens"),
    "no merges": lambda fields: fields.pop("tokenizer.ggml.merges"),
    "no end token": lambda fields: fields.pop("tokenizer.ggml.eos_token_id"),
    "an end token that is none": lambda fields: fields.update({"tokenizer.ggml.eos_token_id": 9999}),
    "fewer kinds than tokens": lambda fields: fields["tokenizer.ggml.token_type"].pop(),
    "a merge that makes no token": lambda fields: fields["tokenizer.ggml.merges"].append("z z"),
    "a merge of one": lambda fields: fields["tokenizer.ggml.merges"].append("the"),
    "another tokenizer": lambda fields: fields.update({"tokenizer.ggml.model": "llama"}),
    "another pre-tokenizer": lambda fields: fields.update({"tokenizer.ggml.pre": "deepseek-llm"}),
    "a token in front": lambda fields: fields.update({"tokenizer.ggml.add_bos_token": True}),
    "experts": lambda fields: fields.update({"llama.expert_count": 8}),
    "scaled rope": lambda fields: fields.update({"llama.rope.scaling.type": "yarn"}),
    "rope on a part": lambda fields: fields.update({"llama.rope.dimension_count": 8}),
    "another vocabulary size": lambda fields: fields.update({"llama.vocab_size": 7}),
    "heads that do not divide": lambda fields: fields.update({"llama.attention.head_count_kv": 3}),
    "no heads": lambda fields: fields.update({"llama.attention.head_count": 0}),
    "no context": lambda fields: fields.update({"llama.context_length": 0}),
    "text for a number": lambda fields: fields.update({"llama.embedding_length": "wide"}),
    "a fraction for a number": lambda fields: fields.update({"llama.block_count": 2.5}),
    "an epsilon of nothing": lambda fields: fields.update({"llama.attention.layer_norm_rms_epsilon": 0.0}),
    "a base that is no number": lambda fields: fields.update({"llama.rope.freq_base": float("nan")}),
    "more layers than there are": lambda fields: fields.update({"llama.block_count": 3}),
    "fewer layers than there are": lambda fields: fields.update({"llama.block_count": 1}),
    "another width": lambda fields: fields.update({"llama.embedding_length": 128}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_metadata_that_does_not_fit_is_refused(
    tmp_path: Path, tensors: tiny.Tensors, change: Callable[[dict[str, Any]], object]
) -> None:
    path = tmp_path / "meta.gguf"

    def on_copies(fields: dict[str, Any]) -> None:
        for name, value in fields.items():
            if isinstance(value, list):
                fields[name] = list(value)
        change(fields)

    refused(tiny.write_gguf(path, tensors, change=on_copies))


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_written_is_what_is_read(tmp_path: Path, tied: bool) -> None:
    tensors = tiny.random_tensors(3, tied=tied)
    model = read_gguf(tiny.write_gguf(tmp_path / "m.gguf", tensors))
    weights = model.weights
    assert model.vocabulary.tokens == tuple(tiny.TOKENS)
    assert weights.config.tied == tied
    assert (weights.output is weights.embedding) == tied
    for layer in range(tiny.LAYERS):
        parts = [tensors[f"blk.{layer}.attn_{part}.weight"] for part in "qkv"]
        assert np.array_equal(weights.qkv[layer], np.concatenate(parts))
        parts = [tensors[f"blk.{layer}.ffn_{part}.weight"] for part in ("gate", "up")]
        assert np.array_equal(weights.gate_up[layer], np.concatenate(parts))
        assert np.array_equal(weights.ffn_down[layer], tensors[f"blk.{layer}.ffn_down.weight"])
    assert np.array_equal(weights.output, tensors["token_embd.weight" if tied else "output.weight"])


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0], ids=str)
def test_quantised_weights_are_expanded_to_float32(
    tmp_path: Path, tensors: tiny.Tensors, kind: gguf.GGMLQuantizationType
) -> None:
    weights = read_gguf(tiny.write_gguf(tmp_path / "q.gguf", tensors, kind=kind)).weights
    stored = gguf.quants.quantize(tensors["token_embd.weight"], kind)
    assert np.array_equal(weights.embedding, gguf.dequantize(stored, kind))
    assert 0 < np.abs(weights.embedding - tensors["token_embd.weight"]).max() < 0.5


def number(value: int, num_bytes: int = 8) -> bytes:
    return value.to_bytes(num_bytes, "little")


def metadata(value: bytes) -> bytes:
    """Return a file of version 3 with one field and no tensors.

    ``value`` is the field's value, with its kind in front.
    """
    return b"GGUF" + number(3, 4) + number(0) + number(1) + number(1) + b"x" + value


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return number(kind, 4) + number(count) + content


ARRAY, UINT8, INT32, STRING = 9, 0, 5, 8
HOSTILE = {
    "arrays in arrays": number(ARRAY, 4) + array(ARRAY, 1) * 20_000 + array(UINT8, 1, b"\1"),
    "five arrays in arrays": number(ARRAY, 4) + array(ARRAY, 1) * 5 + array(UINT8, 1, b"\1"),
    "many bytes": number(ARRAY, 4) + array(UINT8, 2**40, bytes(4096)),
    "many numbers": number(ARRAY, 4) + array(INT32, 2**40, bytes(4096)),
    "numbers beyond the end": number(ARRAY, 4) + array(INT32, 2**62),
    "more than can be counted": number(ARRAY, 4) + array(INT32, 2**64 - 1, bytes(4096)),
    "many empty strings": number(ARRAY, 4) + array(STRING, 2**40, bytes(4096)),
    "many empty arrays": number(ARRAY, 4) + array(ARRAY, 2**40, array(UINT8, 0) * 400),
    "more elements than models have": number(ARRAY, 4) + array(UINT8, MAX_ELEMENTS + 1, bytes(MAX_ELEMENTS + 1)),
    "an unknown kind": number(ARRAY, 4) + array(77, 5, bytes(100)),
    "a long string": number(STRING, 4) + number(2**60) + bytes(100),
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_metadata_that_claims_more_than_the_file_holds_is_refused_before_it_takes_memory(
    tmp_path: Path, value: bytes
) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(metadata(value))
    tracemalloc.start()
    refused(path, "cut short or damaged", "get the file again")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_arrays_in_arrays_of_a_few_levels_are_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "nested.gguf"
    path.write_bytes(metadata(number(ARRAY, 4) + array(ARRAY, 2, array(INT32, 2, bytes(8)) * 2)))
    refused(path, "its metadata cannot be used: no 'tokenizer.ggml.model'")
