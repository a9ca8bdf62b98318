"""Gemma 3, gpt-oss and Llama 4 in NumPy on a cache.

All is float32. Attention is the step's, and nothing here knows how far a layer sees.

Weights have the names, and matrices the shapes, of the families' checkpoints in Hugging Face transformers, which also
computed the goldens (make_tiny_goldens.py).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pagedkv as pk

FILE = Path(__file__).parent / "tiny_goldens.npz"
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class TinyGolden:
    """A model, a prompt, and what transformers computed of them.

    Attributes
    ----------
    config : content of the model's ``config.json``.
    weights : float32, by the checkpoint's names.
    prompt, greedy : token ids, and those that follow greedily.
    logits : float32 [len(prompt), vocab_size].
    """

    config: dict[str, Any]
    weights: dict[str, Floats]
    prompt: list[int]
    greedy: list[int]
    logits: Floats


class TinyModel(ABC):
    """A decoder: each layer is attention and a feed-forward part.

    Either comes behind a norm and is added to its input.

    Parameters
    ----------
    config, weights : as :class:`TinyGolden` has them.
    """

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Floats]) -> None:
        self.config, self.weights = config, weights
        self.softmax_scale = float(config["head_dim"] ** -0.5)

    def forward(self, step: pk.Step) -> Floats:
        """Compute the step's tokens, write their K and V, and return their logits.

        float32 [num_tokens, vocab_size].
        """
        x = self._embed(step)
        for layer in range(self.config["num_hidden_layers"]):
            x = self._layer(step, layer, x)
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        logits: Floats = self._norm(x, "model.norm") @ head.T
        return logits

    def _embed(self, step: pk.Step) -> Floats:
        return self.weights["model.embed_tokens.weight"][step.tokens]

    def _layer(self, step: pk.Step, layer: int, x: Floats) -> Floats:
        name = f"model.layers.{layer}"
        x = x + self._attention(step, layer, self._norm(x, f"{name}.input_layernorm"))
        return x + self._feed_forward(name, self._norm(x, f"{name}.post_attention_layernorm"))

    def _attention(self, step: pk.Step, layer: int, h: Floats) -> Floats:
        """Attention of hidden states [num_tokens, hidden_size], in the same shape."""
        name = f"model.layers.{layer}.self_attn"
        q, k, v = (self._linear(h, f"{name}.{one}_proj").reshape(len(h), -1, self.config["head_dim"]) for one in "qkv")
        q, k = self._placed(layer, q, k, step.positions)
        step.write(layer, k, v)
        sinks = self.weights.get(f"{name}.sinks")
        o = step.attend(layer, q, softmax_scale=self.softmax_scale, sinks=sinks)
        return self._linear(o.reshape(len(h), -1), f"{name}.o_proj")

    @abstractmethod
    def _placed(self, layer: int, q: Floats, k: Floats, positions: NDArray[np.int32]) -> tuple[Floats, Floats]:
        """Return Q and K as a layer with such positions takes them.

        [num_tokens, num_heads, head_dim], as they came.
        """

    @abstractmethod
    def _feed_forward(self, name: str, h: Floats) -> Floats:
        """The other part of the layer that is called `name`."""

    def _linear(self, x: Floats, name: str) -> Floats:
        """``x @ weight.T``, and the bias where there is one."""
        y: Floats = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _norm(self, x: Floats, name: str) -> Floats:
        return rms_normed(x, self.config["rms_norm_eps"]) * self.weights[f"{name}.weight"]


class TinyGemma3(TinyModel):
    """Norms before and after each part, and of q and k.

    The two kinds of layers differ in the rotary embedding.
    """

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Floats]) -> None:
        super().__init__(config, weights)
        self.softmax_scale = float(config["query_pre_attn_scalar"] ** -0.5)

    def _embed(self, step: pk.Step) -> Floats:
        return super()._embed(step) * np.float32(self.config["hidden_size"] ** 0.5)

    def _layer(self, step: pk.Step, layer: int, x: Floats) -> Floats:
        name = f"model.layers.{layer}"
        h = self._attention(step, layer, self._norm(x, f"{name}.input_layernorm"))
        x = x + self._norm(h, f"{name}.post_attention_layernorm")
        h = self._feed_forward(name, self._norm(x, f"{name}.pre_feedforward_layernorm"))
        return x + self._norm(h, f"{name}.post_feedforward_layernorm")

    def _placed(self, layer: int, q: Floats, k: Floats, positions: NDArray[np.int32]) -> tuple[Floats, Floats]:
        name, kind = f"model.layers.{layer}.self_attn", self.config["layer_types"][layer]
        turns = turns_of(self.config["rope_parameters"][kind], self.config["head_dim"], positions)
        return rotated(self._norm(q, f"{name}.q_norm"), turns), rotated(self._norm(k, f"{name}.k_norm"), turns)

    def _feed_forward(self, name: str, h: Floats) -> Floats:
        gate, up = (self._linear(h, f"{name}.mlp.{one}_proj") for one in ("gate", "up"))
        inner = np.float32((2 / np.pi) ** 0.5) * (gate + np.float32(0.044715) * gate**3)
        return self._linear(gate / 2 * (1 + np.tanh(inner)) * up, f"{name}.mlp.down_proj")

    def _norm(self, x: Floats, name: str) -> Floats:
        return rms_normed(x, self.config["rms_norm_eps"]) * (1 + self.weights[f"{name}.weight"])


class TinyGptOss(TinyModel):
    """Sinks, biases, and experts.

    The softmax of the best of a router's logits weighs the outputs.
    """

    def _placed(self, layer: int, q: Floats, k: Floats, positions: NDArray[np.int32]) -> tuple[Floats, Floats]:
        turns = turns_of(self.config["rope_parameters"], self.config["head_dim"], positions)
        return rotated(q, turns), rotated(k, turns)

    def _feed_forward(self, name: str, h: Floats) -> Floats:
        routed = self._linear(h, f"{name}.mlp.router")
        places = np.argsort(-routed, axis=1)[:, : self.config["num_experts_per_tok"]]
        best = np.take_along_axis(routed, places, axis=1)
        shares = np.exp(best - best[:, :1])
        shares /= shares.sum(axis=1, keepdims=True)
        weighted = np.zeros_like(h)
        for expert in range(self.config["num_local_experts"]):
            rows, choices = np.nonzero(places == expert)
            weighted[rows] += shares[rows, choices, None] * self._expert(f"{name}.mlp.experts", expert, h[rows])
        return weighted

    def _expert(self, name: str, expert: int, h: Floats) -> Floats:
        up_weight, up_bias, down_weight, down_bias = (
            self.weights[f"{name}.{part}"][expert]
            for part in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
        )
        both, limit = h @ up_weight + up_bias, self.config["swiglu_limit"]
        gate, up = np.minimum(both[:, ::2], limit), np.clip(both[:, 1::2], -limit, limit)
        h = gate * sigmoid(np.float32(self.config["swiglu_alpha"]) * gate) * (up + 1)
        result: Floats = h @ down_weight + down_bias
        return result


class TinyLlama4(TinyModel):
    """Layers in chunks with a rotary embedding, and layers without either.

    A token's expert comes beside one that all tokens use, and its input is scaled by the router.
    """

    def _placed(self, layer: int, q: Floats, k: Floats, positions: NDArray[np.int32]) -> tuple[Floats, Floats]:
        config = self.config
        if config["no_rope_layers"][layer]:  # 1 where there is one
            turns = turns_of(config["rope_parameters"], config["head_dim"], positions)
            q, k = rotated(q, turns, neighbours=True), rotated(k, turns, neighbours=True)
            if config["use_qk_norm"]:
                q, k = rms_normed(q, config["rms_norm_eps"]), rms_normed(k, config["rms_norm_eps"])
        elif config["attn_temperature_tuning"]:
            growth = np.log1p((positions + 1) // config["floor_scale"]) * config["attn_scale"] + 1
            q = q * growth.astype(np.float32)[:, None, None]
        return q, k

    def _feed_forward(self, name: str, h: Floats) -> Floats:
        name = f"{name}.feed_forward"
        if f"{name}.router.weight" not in self.weights:
            return self._dense(name, h)
        routed = self._linear(h, f"{name}.router")
        result = self._dense(f"{name}.shared_expert", h)
        for expert in range(self.config["num_local_experts"]):
            rows = np.flatnonzero(routed.argmax(axis=1) == expert)
            scaled = h[rows] * sigmoid(routed[rows, expert, None])
            gate, up = np.split(scaled @ self.weights[f"{name}.experts.gate_up_proj"][expert], 2, axis=1)
            result[rows] += (gate * sigmoid(gate) * up) @ self.weights[f"{name}.experts.down_proj"][expert]
        return result

    def _dense(self, name: str, h: Floats) -> Floats:
        gate, up = (self._linear(h, f"{name}.{one}_proj") for one in ("gate", "up"))
        return self._linear(gate * sigmoid(gate) * up, f"{name}.down_proj")


MODELS: dict[str, type[TinyModel]] = {"gemma3": TinyGemma3, "gpt_oss": TinyGptOss, "llama4": TinyLlama4}


def read_golden(family: str) -> TinyGolden:
    """The model and the goldens of one of `MODELS`."""
    with np.load(FILE) as file:
        found = {name.removeprefix(f"{family}/"): file[name] for name in file.files if name.startswith(f"{family}/")}
    weights = {name.removeprefix("weights/"): value for name, value in found.items() if name.startswith("weights/")}
    prompt, greedy = found["prompt"].tolist(), found["greedy"].tolist()
    return TinyGolden(json.loads(str(found["config"])), weights, prompt, greedy, found["logits"])


def sigmoid(x: Floats) -> Floats:
    """The logistic function."""
    result: Floats = np.reciprocal(1 + np.exp(-x))
    return result


def rms_normed(x: Floats, eps: float) -> Floats:
    """Each row divided by the root of its mean square."""
    mean: Floats = np.mean(x * x, axis=-1, keepdims=True)
    result: Floats = x / np.sqrt(mean + np.float32(eps))
    return result


def turns_of(rope: Mapping[str, Any], head_dim: int, positions: NDArray[np.int32]) -> tuple[Floats, Floats]:
    """Cosines and sines [num_tokens, 1, head_dim / 2] of a rotary embedding.

    Parameters
    ----------
    rope : its part of a ``config.json``; default, linear (arXiv:2306.15595) or YaRN (arXiv:2309.00071).
    head_dim, positions
    """
    base, kind, length = rope["rope_theta"], rope["rope_type"], 1.0
    speeds: NDArray[np.float64] = base ** (-np.arange(0, head_dim, 2) / head_dim)
    if kind == "linear":
        speeds = speeds / rope["factor"]
    elif kind == "yarn":  # pairs that turn often within the original context stay, those that hardly turn slow down
        assert rope["truncate"] is False
        context, factor = rope["original_max_position_embeddings"], rope["factor"]
        fast, slow = (
            head_dim * np.log(context / (2 * np.pi * rope[name])) / (2 * np.log(base))
            for name in ("beta_fast", "beta_slow")
        )
        first, last = max(fast, 0.0), min(slow, head_dim - 1.0)
        slowed = np.clip((np.arange(head_dim // 2) - first) / (last - first), 0, 1)
        speeds = speeds * (1 - slowed) + speeds / factor * slowed
        length = 0.1 * np.log(factor) + 1
    else:
        assert kind == "default"
    angles = positions[:, None, None] * speeds
    return (length * np.cos(angles)).astype(np.float32), (length * np.sin(angles)).astype(np.float32)


def rotated(x: Floats, turns: tuple[Floats, Floats], *, neighbours: bool = False) -> Floats:
    """Turn the pairs (i, i + head_dim / 2) of [num_tokens, num_heads, head_dim].

    Or those of `neighbours`, (2i, 2i + 1).
    """
    cos, sin = turns
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if neighbours else (x[..., :half], x[..., half:])
    both = first * cos - second * sin, first * sin + second * cos
    return np.stack(both, axis=-1).reshape(x.shape) if neighbours else np.concatenate(both, axis=-1)
