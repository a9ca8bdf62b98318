"""Models by name: weights and KV as ``pagedkv plan`` counts them, and widths for compute."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.errors import InvalidArgument, UnsupportedVariant
from pagedkv.lab.replay.weights import LLAMA_3_8B, ModelShape
from pagedkv.lab.simulate.layers import spec_of
from pagedkv.lab.sizing.checks import MAX_PARAMS
from pagedkv.lab.sizing.models import Model, find_model, model_of_config
from pagedkv.lab.sizing.shape import Group, token_bytes
from pagedkv.spec.config import read_config
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.layers import Attention
from pagedkv.spec.sizes import whole_number

NEVER = 1e12  # tokens of context: no layer's attention grows with it


@dataclass(frozen=True, slots=True)
class CountedShape:
    """Compute of a model whose weights are counted, and whose widths are not written down.

    Attributes
    ----------
    num_qo_heads, head_dim : of a layer.
    matmul_weights : that a token is multiplied with.
    """

    num_qo_heads: int
    head_dim: int
    matmul_weights: int


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model in 16-bit weights and KV.

    Attributes
    ----------
    sizes : its weights and KV, as ``pagedkv plan`` counts them.
    shape : its widths, which its compute goes by.
    experts : of a layer, and of them those that a token meets; shared ones not among them. 1 and 1: no mixture.
    """

    sizes: Model
    shape: ModelShape | CountedShape
    experts: tuple[int, int] = (1, 1)

    @property
    def name(self) -> str:
        """As ``pagedkv plan`` calls it."""
        return self.sizes.name

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.sizes.weight_bytes()

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token over all layers."""
        return token_bytes(self.sizes.groups)

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts that are not shared; 0 without a mixture."""
        count, used = self.experts
        if count == used:
            return 0
        return 2 * (self.sizes.params - self.sizes.params_per_token) * count // (count - used)

    @property
    def short_groups(self) -> tuple[Group, ...]:
        """Its layers with a window or chunks."""
        return tuple(group for group in self.sizes.groups if group.window is not None or group.chunk is not None)

    @property
    def far_groups(self) -> tuple[Group, ...]:
        """Its layers that see every token."""
        return tuple(group for group in self.sizes.groups if group.window is None and group.chunk is None)

    @property
    def balance_tokens(self) -> float:
        """Tokens of context at which attention costs as much as everything that does not grow.

        Only attention of layers that see everything grows. The other layers count with a whole window or half a chunk.
        """
        of_key = 2 * self.shape.num_qo_heads * self.shape.head_dim
        seen = sum(group.num_layers * (group.window or (group.chunk or 0) // 2) for group in self.short_groups)
        grows = of_key * sum(group.num_layers for group in self.far_groups)
        return (self.shape.matmul_weights + of_key * seen) / grows if grows else NEVER

    def spec(self, block_size: int) -> KVSpec:
        """The spec of a cache by groups, as :func:`pagedkv.lab.simulate.layers.spec_of`."""
        return spec_of(self.name, self.sizes.groups, block_size)


# Of the models that `pagedkv plan` knows by name, those whose widths are written down here.
_LLAMA_7B = ModelShape("llama-7b", 32, 32, 32, 128, 4096, 11_008)
_LLAMA_13B = ModelShape("llama-13b", 40, 40, 40, 128, 5120, 13_824)
_LLAMA_3_70B = ModelShape("llama-3-70b", 80, 64, 8, 128, 8192, 28_672)
_SHAPES = {
    "llama-7b": _LLAMA_7B, "llama-13b": _LLAMA_13B, "llama-2-7b": _LLAMA_7B, "llama-2-13b": _LLAMA_13B,
    "llama-2-70b": _LLAMA_3_70B, "llama-3-8b": LLAMA_3_8B, "llama-3-70b": _LLAMA_3_70B, "llama-3.1-8b": LLAMA_3_8B,
    "llama-3.1-70b": _LLAMA_3_70B, "llama-3.1-405b": ModelShape("llama-3.1-405b", 126, 128, 8, 128, 16_384, 53_248),
    "mistral-7b-v0.3": LLAMA_3_8B, "qwen2.5-7b": ModelShape("qwen2.5-7b", 28, 28, 4, 128, 3584, 18_944),
    "qwen3-8b": ModelShape("qwen3-8b", 36, 32, 8, 128, 4096, 12_288),
    "qwen3-32b": ModelShape("qwen3-32b", 64, 64, 8, 128, 5120, 25_600),
    "mistral-7b-v0.1": LLAMA_3_8B, "gemma-2-9b": ModelShape("gemma-2-9b", 42, 16, 8, 256, 3584, 14_336),
    "gemma-3-27b": ModelShape("gemma-3-27b", 62, 32, 16, 128, 5376, 21_504),
    "gpt-oss-20b": ModelShape("gpt-oss-20b", 24, 64, 8, 64, 2880, 2880, num_mlps=4),
    "gpt-oss-120b": ModelShape("gpt-oss-120b", 36, 64, 8, 64, 2880, 2880, num_mlps=4),
    "llama-4-scout": ModelShape("llama-4-scout", 48, 40, 8, 128, 5120, 8192, num_mlps=2),
}  # fmt: skip
_EXPERTS = {"gpt-oss-20b": (32, 4), "gpt-oss-120b": (128, 4), "llama-4-scout": (16, 1)}
MODELS = {name: ServedModel(find_model(name), shape, _EXPERTS.get(name, (1, 1))) for name, shape in _SHAPES.items()}


def served_by_config(config: str, params: int, active_params: int | None = None) -> ServedModel:
    """The model that a ``config.json`` describes, whose weights the caller counts.

    A token is multiplied with all weights that it meets, its embedding among them. In a mixture each weight counts as
    an expert that a token meets with the chance ``active_params / params``.

    Raises
    ------
    WrongType, InvalidArgument
        As :func:`pagedkv.spec.config.read_config`, or the file does not say how many query heads there are; or no
        weights are counted, or fewer than a token meets, or it is a mixture and `active_params` is None.
    UnsupportedVariant
        Its layers do not all keep K and V of one shape.
    """
    whole_number(params, "params", 1, MAX_PARAMS)
    if active_params is not None:
        whole_number(active_params, "active_params", 1, params)
    sizes, found = model_of_config(config, params, active_params), read_config(config)
    first = found.layers[0]
    for number, layer in enumerate(found.layers):
        if not isinstance(layer, Attention) or not isinstance(first, Attention) or layer.stored != first.stored:
            raise UnsupportedVariant(
                f"layer {number} of this {found.model_type} model is {str(layer)[:120]}: a simulation needs K and V of "
                "one shape in every layer"
            )
    assert isinstance(first, Attention)
    if found.experts > 1 and active_params is None:
        raise InvalidArgument(
            f"this {found.model_type} model is a mixture of {found.experts} experts: say with active_params "
            "(--active-params) how many weights a token meets, or each step would multiply it with all of them"
        )
    if not found.query_heads:
        raise InvalidArgument("the config has no num_attention_heads")
    shape = CountedShape(found.query_heads, first.head_dim, sizes.params_per_token)
    return ServedModel(sizes, shape, (1, 1) if active_params is None else (params, active_params))
