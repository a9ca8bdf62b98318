"""The table of models.

Weights are counted again from the published widths, and KV is compared with published figures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pagedkv import InvalidArgument, WrongType
from pagedkv.lab.sizing import MODELS, KVFormat, LayerGroup, Model, find_model, sequence_bytes, token_bytes
from pagedkv.lab.sizing.models import groups_of, with_window_kept
from pagedkv.spec.config import read_config
from tests.spec.published import CONFIGS


def dense(
    layers: int, width: int, ffn: int, heads: int, kv_heads: int, head_dim: int, vocab: int, *, tied: bool = False,
    biased: bool = False, norms: int = 2, head_norms: bool = False, experts: int = 1,
) -> int:  # fmt: skip
    """Weights of a decoder with gated feed-forward layers."""
    attention = 2 * width * (heads + kv_heads) * head_dim
    attention += (heads + 2 * kv_heads) * head_dim if biased else 0
    attention += 2 * head_dim if head_norms else 0
    each = attention + experts * 3 * width * ffn + norms * width
    return vocab * width * (1 if tied else 2) + layers * each + width


def mixture(experts: int, used: int, **shape: Any) -> tuple[int, int]:
    """All weights and those that a token meets, with a router over `experts`."""
    routing = shape["layers"] * shape["width"] * experts
    return dense(**shape, experts=experts) + routing, dense(**shape, experts=used) + routing


def gpt_oss(layers: int, experts: int, used: int) -> tuple[int, int]:
    """The same for a mixture whose matrices all have biases, and whose heads have a sink each."""
    width, head_dim, heads, kv_heads, vocab = 2880, 64, 64, 8, 201_088
    attention = 2 * width * (heads + kv_heads) * head_dim + (heads + 2 * kv_heads) * head_dim + width + heads
    fixed = 2 * vocab * width + width + layers * (attention + 2 * width + (width + 1) * experts)
    each = layers * (3 * width * width + 3 * width)
    return fixed + each * experts, fixed + each * used


def scout() -> tuple[int, int]:
    """Llama 4 Scout: of 16 experts a token meets one, and one that all share."""
    shape = {"layers": 48, "width": 5120, "ffn": 8192, "heads": 40, "kv_heads": 8, "head_dim": 128, "vocab": 202_048}
    routing = 48 * 5120 * 16
    return dense(**shape, experts=17) + routing, dense(**shape, experts=2) + routing


def siglip(layers: int, width: int, ffn: int, patches: int) -> int:
    """A vision tower: patches of 14 x 14, biases, two norms a layer and one at the end."""
    each = 4 * (width * width + width) + 2 * width * ffn + ffn + width + 4 * width
    return 3 * 14 * 14 * width + width + patches * width + layers * each + 2 * width


def deepseek(
    layers: int, width: int, heads: int, q_rank: int, ffn: int, dense_layers: int, expert: int, experts: int, used: int,
    shared: int, vocab: int, corrected: bool,
) -> tuple[int, int]:  # fmt: skip
    """The same with latent attention: a latent of 512 and 64 for positions, heads of 128."""
    q = width * q_rank + q_rank + q_rank * heads * 192 if q_rank else width * heads * 192
    attention = q + width * (512 + 64) + 512 + 512 * heads * 256 + heads * 128 * width
    routing = width * experts + (experts if corrected else 0)
    fixed = 2 * vocab * width + width + layers * (attention + 2 * width) + dense_layers * 3 * width * ffn
    each = 3 * width * expert * (layers - dense_layers)
    fixed += (layers - dense_layers) * routing
    return fixed + each * (experts + shared), fixed + each * (used + shared)


LLAMA_VOCAB, LLAMA_3_VOCAB, QWEN_VOCAB, QWEN_2_VOCAB = 32_000, 128_256, 151_936, 152_064
DENSE: dict[str, Callable[[], int]] = {
    "llama-7b": lambda: dense(32, 4096, 11_008, 32, 32, 128, LLAMA_VOCAB),
    "llama-13b": lambda: dense(40, 5120, 13_824, 40, 40, 128, LLAMA_VOCAB),
    "llama-2-7b": lambda: dense(32, 4096, 11_008, 32, 32, 128, LLAMA_VOCAB),
    "llama-2-13b": lambda: dense(40, 5120, 13_824, 40, 40, 128, LLAMA_VOCAB),
    "llama-2-70b": lambda: dense(80, 8192, 28_672, 64, 8, 128, LLAMA_VOCAB),
    "llama-3-8b": lambda: dense(32, 4096, 14_336, 32, 8, 128, LLAMA_3_VOCAB),
    "llama-3-70b": lambda: dense(80, 8192, 28_672, 64, 8, 128, LLAMA_3_VOCAB),
    "llama-3.1-8b": lambda: dense(32, 4096, 14_336, 32, 8, 128, LLAMA_3_VOCAB),
    "llama-3.1-70b": lambda: dense(80, 8192, 28_672, 64, 8, 128, LLAMA_3_VOCAB),
    "llama-3.1-405b": lambda: dense(126, 16_384, 53_248, 128, 8, 128, LLAMA_3_VOCAB),
    "llama-3.2-1b": lambda: dense(16, 2048, 8192, 32, 8, 64, LLAMA_3_VOCAB, tied=True),
    "llama-3.2-3b": lambda: dense(28, 3072, 8192, 24, 8, 128, LLAMA_3_VOCAB, tied=True),
    "mistral-7b-v0.1": lambda: dense(32, 4096, 14_336, 32, 8, 128, 32_000),
    "mistral-7b-v0.3": lambda: dense(32, 4096, 14_336, 32, 8, 128, 32_768),
    "qwen2.5-0.5b": lambda: dense(24, 896, 4864, 14, 2, 64, QWEN_VOCAB, tied=True, biased=True),
    "qwen2.5-7b": lambda: dense(28, 3584, 18_944, 28, 4, 128, QWEN_2_VOCAB, biased=True),
    "qwen2.5-14b": lambda: dense(48, 5120, 13_824, 40, 8, 128, QWEN_2_VOCAB, biased=True),
    "qwen2.5-32b": lambda: dense(64, 5120, 27_648, 40, 8, 128, QWEN_2_VOCAB, biased=True),
    "qwen2.5-72b": lambda: dense(80, 8192, 29_568, 64, 8, 128, QWEN_2_VOCAB, biased=True),
    "qwen3-8b": lambda: dense(36, 4096, 12_288, 32, 8, 128, QWEN_VOCAB, head_norms=True),
    "qwen3-32b": lambda: dense(64, 5120, 25_600, 64, 8, 128, QWEN_VOCAB, head_norms=True),
    "gemma-2-9b": lambda: dense(42, 3584, 14_336, 16, 8, 256, 256_000, tied=True, norms=4),
    "gemma-3-27b": lambda: dense(62, 5376, 21_504, 32, 16, 128, 262_208, tied=True, norms=4, head_norms=True),
    "smollm2-135m": lambda: dense(30, 576, 1536, 9, 3, 64, 49_152, tied=True),
}
_MIXTRAL = {"layers": 32, "width": 4096, "ffn": 14_336, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocab": 32_000}
_QWEN_30 = {"layers": 48, "width": 2048, "ffn": 768, "heads": 32, "kv_heads": 4, "head_dim": 128, "vocab": QWEN_VOCAB}
_QWEN_235 = {"layers": 94, "width": 4096, "ffn": 1536, "heads": 64, "kv_heads": 4, "head_dim": 128, "vocab": QWEN_VOCAB}
SPARSE: dict[str, Callable[[], tuple[int, int]]] = {
    "mixtral-8x7b": lambda: mixture(8, 2, **_MIXTRAL),
    "qwen3-30b-a3b": lambda: mixture(128, 8, **_QWEN_30, head_norms=True),
    "qwen3-235b-a22b": lambda: mixture(128, 8, **_QWEN_235, head_norms=True),
    "gpt-oss-20b": lambda: gpt_oss(24, 32, 4),
    "gpt-oss-120b": lambda: gpt_oss(36, 128, 4),
    "llama-4-scout": scout,
    "deepseek-v2-lite": lambda: deepseek(27, 2048, 16, 0, 10_944, 1, 1408, 64, 6, 2, 102_400, False),
    "deepseek-v2": lambda: deepseek(60, 5120, 128, 1536, 12_288, 1, 1536, 160, 6, 2, 102_400, False),
    "deepseek-v3": lambda: deepseek(61, 7168, 128, 1536, 18_432, 3, 2048, 256, 8, 1, 129_280, True),
}


@pytest.mark.parametrize("name", DENSE)
def test_the_weights_of_a_dense_model_are_those_its_widths_give(name: str) -> None:
    assert (find_model(name).params, find_model(name).params_per_token) == (DENSE[name](), DENSE[name]())


@pytest.mark.parametrize("name", SPARSE)
def test_the_weights_of_a_mixture_are_those_its_widths_give(name: str) -> None:
    assert (find_model(name).params, find_model(name).params_per_token) == SPARSE[name]()


def test_every_model_but_gpt_3_is_counted_again() -> None:
    """Its paper gives 174,600 million (arXiv:2005.14165, table D.1).

    Embeddings and biases make the rest of that.
    """
    assert MODELS.keys() - DENSE.keys() - SPARSE.keys() == {"gpt3-175b"}
    without_biases = 12 * 96 * 12_288**2 + (50_257 + 2048) * 12_288
    assert find_model("gpt3-175b").params == pytest.approx(without_biases, rel=1e-4)


def test_the_weights_of_models_with_windows_and_chunks_are_those_of_the_published_files() -> None:
    """Totals of the files on the hub; two of them have a vision tower beside the text model."""
    vision = siglip(27, 1152, 4304, 64 * 64) + 1152 * 5376 + 1152  # with its projector and that one's norm
    assert find_model("gemma-3-27b").params + vision == 27_432_406_640
    width, mlp = 1408, 5632
    blocks = 34 * (4 * (width * width + width) + 2 * width * mlp + mlp + width + 4 * width)
    vision = blocks + 3 * 14 * 14 * width + width + (24 * 24 + 1) * width + 4 * width  # no bias of patches, a class
    vision += 4 * width * 4096 + 4096 * 4096 + 4096 * 5120  # the adapter takes four patches as one
    assert find_model("llama-4-scout").params + vision == 108_641_793_536
    assert find_model("gpt-oss-120b").params == 116_829_156_672
    assert find_model("gpt-oss-20b").params == 20_914_757_184


@pytest.mark.parametrize(("name", "billions"), [("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)])
def test_weights_that_a_token_meets_are_the_model_card_s_and_the_embedding(name: str, billions: float) -> None:
    """The card (arXiv:2508.10925, table 1) counts the output head, and not the embedding."""
    assert round((find_model(name).params_per_token - 201_088 * 2880) / 1e9, 2) == billions


@pytest.mark.parametrize("name", ["gemma-3-27b", "gpt-oss-120b", "llama-4-scout", "gemma-2-9b", "mistral-7b-v0.1"])
def test_groups_of_layers_are_those_of_the_published_config(name: str) -> None:
    (config,) = (one for known, one in CONFIGS.items() if known.lower().startswith(name))
    as_sets = (set(find_model(name).groups), set(groups_of(read_config(config).layers)))
    assert as_sets[0] == as_sets[1]


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("llama-2-7b", 512 * 1024),
        ("llama-13b", 800 * 1024),  # as of OPT-13B, of the same shape: arXiv:2309.06180, section 3
        ("llama-3.1-8b", 128 * 1024),
        ("llama-3.1-70b", 320 * 1024),
        ("llama-3.1-405b", 516_096),  # DeepSeek's ISCA'25 paper (arXiv:2505.09343), table 1: 516.096 kB in BF16
        ("qwen2.5-72b", 327_680),  # the same table: 327.680 kB
        ("deepseek-v3", 70_272),  # the same table: 70.272 kB
        ("gpt3-175b", 4_718_592),
    ],
)
def test_kv_bytes_per_token_as_published(name: str, num_bytes: int) -> None:
    assert token_bytes(find_model(name).groups) == num_bytes


def test_a_window_caps_what_a_sequence_needs() -> None:
    mistral = find_model("mistral-7b-v0.1")
    assert sequence_bytes(mistral.groups, 32_768) == sequence_bytes(mistral.groups, 4096) == 512 * 2**20
    assert sequence_bytes(with_window_kept(mistral).groups, 32_768) == 4 * 2**30


def test_half_of_gemma_2_s_layers_have_a_window() -> None:
    groups = find_model("gemma-2-9b").groups
    assert token_bytes(groups) == 42 * 2 * 8 * 256 * 2
    assert sequence_bytes(groups, 8192) == token_bytes(groups) * (8192 + 4096) // 2


def test_a_name_is_found_whatever_its_capitals() -> None:
    assert find_model(" Llama-3.1-8B ") is MODELS["llama-3.1-8b"]


def test_an_unknown_name_is_refused_and_the_message_names_those_there_are() -> None:
    with pytest.raises(InvalidArgument, match=r"no model 'llama-9'.*llama-2-7b.*deepseek-v3"):
        find_model("llama-9")
    with pytest.raises(WrongType):
        find_model(7)  # type: ignore[arg-type]


def test_weights_take_their_bits() -> None:
    model = find_model("llama-3.1-8b")
    assert model.weight_bytes() == 2 * model.params
    assert model.weight_bytes(4) == model.params // 2
    assert Model("odd", (LayerGroup(1, 1, 1),), 3).weight_bytes(4) == 2


def test_a_quantised_cache_of_a_latent_model() -> None:
    assert token_bytes(find_model("deepseek-v3").groups, KVFormat("fp8")) == 61 * 576


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: Model("m", (), 1), InvalidArgument),
        (lambda: Model("m", [LayerGroup(1, 1, 1)], 1), WrongType),  # type: ignore[arg-type]
        (lambda: Model("m", (LayerGroup(1, 1, 1),), -1), InvalidArgument),
        (lambda: Model("m", (LayerGroup(1, 1, 1),), 1, 2), InvalidArgument),
        (lambda: Model("m", (LayerGroup(1, 1, 1),), 1, None, 0), InvalidArgument),
        (lambda: find_model("llama-7b").weight_bytes(0), InvalidArgument),
    ],
)
def test_what_is_no_model_is_refused(make: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        make()
