"""Published models by name: KV shape, number of weights, and source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.lab.sizing.checks import MAX_PARAMS, MAX_TOKENS, by_name
from pagedkv.lab.sizing.shape import Group, LayerGroup, StateGroup, mla
from pagedkv.spec.config import read_config
from pagedkv.spec.layers import Attention, Latent, Layer, Recurrent
from pagedkv.spec.sizes import whole_number


@dataclass(frozen=True, slots=True)
class Model:
    """What sizing has to know of a model.

    Parameters
    ----------
    name : how it is called.
    groups : its layers' KV.
    params : weights in all.
    active_params : weights that one token meets; less than `params` in a mixture of experts. None: all.
    context : tokens it takes, as published.
    source : where the numbers stand.

    Raises
    ------
    WrongType, InvalidArgument
    """

    name: str
    groups: tuple[Group, ...]
    params: int
    active_params: int | None = None
    context: int = MAX_TOKENS
    source: str = "given by its numbers"

    def __post_init__(self) -> None:
        if not isinstance(self.groups, tuple) or not all(isinstance(group, Group) for group in self.groups):
            raise WrongType("groups must be a tuple of LayerGroup and StateGroup")
        if not self.groups:
            raise InvalidArgument("a model needs at least one group of layers")
        whole_number(self.params, "params", 0, MAX_PARAMS)
        if self.active_params is not None:
            whole_number(self.active_params, "active_params", 0, self.params)
        whole_number(self.context, "context", 1, MAX_TOKENS)

    @property
    def num_layers(self) -> int:
        """Layers that keep KV."""
        return sum(group.num_layers for group in self.groups)

    @property
    def params_per_token(self) -> int:
        """Weights that one token meets."""
        return self.params if self.active_params is None else self.active_params

    def weight_bytes(self, bits: int = 16) -> int:
        """Bytes of the weights at so many bits each, rounded up."""
        return -(-self.params * whole_number(bits, "bits", 1, 64) // 8)


def _dense(
    name: str, layers: int, kv_heads: int, head_dim: int, params: int, context: int, source: str,
    active_params: int | None = None,
) -> Model:  # fmt: skip
    return Model(name, (LayerGroup(layers, kv_heads, head_dim),), params, active_params, context, source)


def _latent(name: str, layers: int, params: int, active_params: int, context: int, source: str) -> Model:
    return Model(name, (mla(layers, 512, 64),), params, active_params, context, source)


def _alternating(name: str, layers: int, params: int, active_params: int) -> Model:
    groups = (LayerGroup(layers // 2, 8, 64), LayerGroup(layers // 2, 8, 64, window=128))
    return Model(name, groups, params, active_params, 131_072, _GPT_OSS)


# Weights are counted from the published config.json (tests/sizing/test_models.py counts them again); those of GPT-3 are
# its paper's. An entry is here only if every number of it is published. Of a mixture the weights that a token meets
# include all embeddings, which papers may leave out (gpt-oss-120b: 5.13 of these 5.71 B).
_LLAMA = "config.json of meta-llama on the Hugging Face hub"
_QWEN3 = "config.json of Qwen on the Hugging Face hub"
_QWEN2 = f"{_QWEN3} (-Instruct)"
_MISTRAL = "config.json of mistralai on the Hugging Face hub"
_DEEPSEEK = "config.json of deepseek-ai on the Hugging Face hub; arXiv:2405.04434"
_GPT_OSS = "config.json of openai on the Hugging Face hub; arXiv:2508.10925"
_ALL = (
    _dense("llama-7b", 32, 32, 128, 6_738_415_616, 2048, "arXiv:2302.13971"),
    _dense("llama-13b", 40, 40, 128, 13_015_864_320, 2048, "arXiv:2302.13971"),
    _dense("llama-2-7b", 32, 32, 128, 6_738_415_616, 4096, _LLAMA),
    _dense("llama-2-13b", 40, 40, 128, 13_015_864_320, 4096, _LLAMA),
    _dense("llama-2-70b", 80, 8, 128, 68_976_648_192, 4096, _LLAMA),
    _dense("llama-3-8b", 32, 8, 128, 8_030_261_248, 8192, _LLAMA),
    _dense("llama-3-70b", 80, 8, 128, 70_553_706_496, 8192, _LLAMA),
    _dense("llama-3.1-8b", 32, 8, 128, 8_030_261_248, 131_072, _LLAMA),
    _dense("llama-3.1-70b", 80, 8, 128, 70_553_706_496, 131_072, _LLAMA),
    _dense("llama-3.1-405b", 126, 8, 128, 405_853_388_800, 131_072, _LLAMA),
    _dense("llama-3.2-1b", 16, 8, 64, 1_235_814_400, 131_072, _LLAMA),
    _dense("llama-3.2-3b", 28, 8, 128, 3_212_749_824, 131_072, _LLAMA),
    Model(
        "mistral-7b-v0.1", (LayerGroup(32, 8, 128, window=4096),), 7_241_732_096, None, 32_768,
        f"{_MISTRAL}; arXiv:2310.06825",
    ),
    _dense("mistral-7b-v0.3", 32, 8, 128, 7_248_023_552, 32_768, _MISTRAL),
    _dense("mixtral-8x7b", 32, 8, 128, 46_702_792_704, 32_768, _MISTRAL, 12_879_925_248),
    _dense("qwen2.5-0.5b", 24, 2, 64, 494_032_768, 32_768, _QWEN2),
    _dense("qwen2.5-7b", 28, 4, 128, 7_615_616_512, 32_768, _QWEN2),
    _dense("qwen2.5-14b", 48, 8, 128, 14_770_033_664, 32_768, _QWEN2),
    _dense("qwen2.5-32b", 64, 8, 128, 32_763_876_352, 32_768, _QWEN2),
    _dense("qwen2.5-72b", 80, 8, 128, 72_706_203_648, 32_768, _QWEN2),
    _dense("qwen3-8b", 36, 8, 128, 8_190_735_360, 40_960, _QWEN3),
    _dense("qwen3-32b", 64, 8, 128, 32_762_123_264, 40_960, _QWEN3),
    _dense("qwen3-30b-a3b", 48, 4, 128, 30_532_122_624, 40_960, _QWEN3, 3_353_032_704),
    _dense("qwen3-235b-a22b", 94, 4, 128, 235_093_634_560, 40_960, _QWEN3, 22_190_763_520),
    Model(
        "gemma-2-9b", (LayerGroup(21, 8, 256), LayerGroup(21, 8, 256, window=4096)), 9_241_705_984, None, 8192,
        "config.json of google on the Hugging Face hub; arXiv:2408.00118",
    ),
    Model(
        "gemma-3-27b", (LayerGroup(10, 16, 128), LayerGroup(52, 16, 128, window=1024)), 27_009_346_304, None, 131_072,
        "config.json of google on the Hugging Face hub; arXiv:2503.19786; without its vision tower",
    ),
    _alternating("gpt-oss-20b", 24, 20_914_757_184, 4_187_440_704),
    _alternating("gpt-oss-120b", 36, 116_829_156_672, 5_711_982_912),
    Model(
        "llama-4-scout", (LayerGroup(12, 8, 128), LayerGroup(36, 8, 128, chunk=8192)), 107_769_861_120, 17_172_894_720,
        10_485_760, f"{_LLAMA} (Llama-4-Scout-17B-16E); without its vision tower",
    ),
    _latent("deepseek-v2-lite", 27, 15_706_484_224, 2_661_150_208, 32_768, _DEEPSEEK),
    _latent("deepseek-v2", 60, 235_741_434_880, 21_375_800_320, 131_072, _DEEPSEEK),
    _latent("deepseek-v3", 61, 671_026_419_200, 37_552_297_472, 131_072, "arXiv:2412.19437; without its MTP layer"),
    _dense("smollm2-135m", 30, 3, 64, 134_515_008, 8192, "config.json of HuggingFaceTB on the Hugging Face hub"),
    _dense("gpt3-175b", 96, 96, 128, 174_600_000_000, 2048, "arXiv:2005.14165, tables 2.1 and D.1"),
)  # fmt: skip
MODELS = {model.name: model for model in _ALL}


def find_model(name: str) -> Model:
    """A published model by its name; capitals do not count.

    Raises
    ------
    WrongType
        Not text.
    InvalidArgument
        No such model; the message names those there are.
    """
    return by_name(MODELS, name, "model", "give its numbers, or ")


def with_window_kept(model: Model) -> Model:
    """The same model in a pool that keeps what lies behind a window, as pagedkv's own does."""
    return replace(model, groups=tuple(group.with_all_kept() for group in model.groups))


def groups_of(layers: Sequence[Layer]) -> tuple[Group, ...]:
    """Layers that are alike, together; those that read another layer's KV keep none."""
    counts: dict[Layer, int] = {}
    for layer in layers:
        counts[layer] = counts.get(layer, 0) + 1
    groups: list[Group] = []
    for layer, count in counts.items():
        if isinstance(layer, Attention):
            window, chunk = layer.window, layer.chunk
            groups.append(LayerGroup(count, layer.num_kv_heads, layer.head_dim, window=window, chunk=chunk))
        elif isinstance(layer, Latent):
            groups.append(mla(count, layer.rank, layer.rope_dim))
        elif isinstance(layer, Recurrent):
            groups.append(StateGroup(count, layer.state_bytes))
    return tuple(groups)


def model_of_config(config: str, params: int, active_params: int | None = None, context: int = MAX_TOKENS) -> Model:
    """The model that a ``config.json`` describes, whose weights the caller counts.

    `context` is for a file that names none.

    Raises
    ------
    WrongType, InvalidArgument
        As :func:`pagedkv.spec.config.read_config`.
    """
    found = read_config(config)
    groups, context = groups_of(found.layers), found.context or context
    return Model(found.model_type, groups, params, active_params, context, "its config.json")
