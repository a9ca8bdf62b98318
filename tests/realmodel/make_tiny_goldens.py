"""``python -m tests.realmodel.make_tiny_goldens``: tiny models in transformers.

Gemma 3, gpt-oss and Llama 4.

Random weights on a grid of 1/32, which float32 holds exactly and which compress well; logits of one forward pass over
a whole prompt in float32, and the greedy tokens behind it, for each of which everything is computed again, without a
cache. A seed is taken only if no choice of an expert or a token is a near-tie, and if windows, chunks and whatever else
a family does to attention change the logits by far.

PyTorch and transformers are not among the test extras. The goldens were made with

    pip install torch==2.13.0 transformers==5.24.0
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

TARGET = Path(__file__).parent / "tiny_goldens.npz"
PROMPT_TOKENS, GREEDY_TOKENS = 220, 40  # over several windows, and decoding crosses the edge of a chunk, 256
GRID, STD = 32, 0.22
LEAST_EXPERT_GAP, LEAST_TOKEN_GAP = 1e-3, 2e-2  # between the logits of a choice and of the next best one
LEAST_CHANGE = 0.1  # of logits, relative to the largest, where a part of the model is left out
LEAST_DISTINCT = 10  # among the greedy tokens

SHAPE: dict[str, Any] = {
    "vocab_size": 56, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "attn_implementation": "eager",
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "intermediate_size": 16, "tie_word_embeddings": False}


def gemma3(**changed: Any) -> Any:
    """Two layers with a window before each that sees all.

    The scale of scores is not that of the heads' size.
    """
    own = {
        "num_hidden_layers": 6, "intermediate_size": 40, "sliding_window": 12, "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 5, "max_position_embeddings": 1024, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }  # fmt: skip
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**{**SHAPE, **own, **changed}))


def gpt_oss(**changed: Any) -> Any:
    """A window in every second layer, sinks, and two of four experts.

    The rotary embedding is that of the released models.
    """
    own = {
        "num_hidden_layers": 4, "num_experts_per_tok": 2, "sliding_window": 12, "swiglu_limit": 2.0,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096,
        },
    }  # fmt: skip
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**{**SHAPE, **EXPERTS, **own, **changed}))


def llama4(**changed: Any) -> Any:
    """Two layers in chunks before each that sees all, without positions.

    Every second layer has experts, of which a token takes one of four.
    """
    own = {
        "num_hidden_layers": 6, "num_experts_per_tok": 1, "attention_chunk_size": 64, "no_rope_layer_interval": 3,
        "interleave_moe_layer_step": 2, "intermediate_size_mlp": 32, "use_qk_norm": True,
        "attn_temperature_tuning": True, "floor_scale": 16, "attn_scale": 0.6, "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    }  # fmt: skip
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**{**SHAPE, **EXPERTS, **own, **changed}))


FAMILIES: dict[str, Callable[..., Any]] = {"gemma3": gemma3, "gpt_oss": gpt_oss, "llama4": llama4}
WITHOUT: dict[str, dict[str, dict[str, Any]]] = {  # fields that leave out a part of the model
    "gemma3": {"windows": {"sliding_window": 4096}},
    "gpt_oss": {"windows": {"sliding_window": 4096}},
    "llama4": {
        "chunks": {"attention_chunk_size": 4096}, "q and k norms": {"use_qk_norm": False},
        "temperatures": {"attn_temperature_tuning": False},
    },
}  # fmt: skip


def fill(model: Any, seed: int) -> None:
    """Replace all parameters by random numbers on the grid."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape) * STD
            if name.endswith("sinks"):
                values = values * 4 + 1  # beside about 12 keys whose weights are around 1
            elif name.endswith("norm.weight") and not isinstance(model, transformers.Gemma3ForCausalLM):
                values += 1  # Gemma adds it by itself
            elif name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                values += 2  # or the next token would always be the same one again, as the embedding is the output
            parameter.copy_(torch.round(values * GRID) / GRID)


def logits_of(model: Any, ids: list[int]) -> NDArray[np.float32]:
    """Logits of every token, with nothing cached."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), use_cache=False).logits
    found: NDArray[np.float32] = logits[0].float().numpy()
    return found


def gap(logits: NDArray[np.float32], chosen: int) -> float:
    """The smallest distance between the last logit that is chosen and the next."""
    ordered = np.sort(logits, axis=-1)[..., ::-1]
    return float((ordered[..., chosen - 1] - ordered[..., chosen]).min())


def expert_gap(model: Any, ids: list[int]) -> float:
    """The smallest gap of all routers; infinite where there are none."""
    gaps = [np.inf]

    def look(router: Any, inputs: tuple[Any, ...]) -> None:
        logits = torch.nn.functional.linear(inputs[0], router.weight, router.bias)
        gaps.append(gap(logits.numpy(), router.top_k))

    hooks = [part.register_forward_pre_hook(look) for name, part in model.named_modules() if name.endswith("router")]
    logits_of(model, ids)
    for hook in hooks:
        hook.remove()
    return min(gaps)


def changes(family: str, model: Any, ids: list[int], logits: NDArray[np.float32]) -> dict[str, float]:
    """How far the logits move without a part of the model, by its name.

    Relative to the largest logit.
    """
    found = {}
    for part, fields in WITHOUT[family].items():
        other = FAMILIES[family](**fields).eval()
        other.load_state_dict(model.state_dict())
        found[part] = other
    if family == "gpt_oss":
        found["sinks"] = gpt_oss().eval()
        found["sinks"].load_state_dict({
            name: torch.full_like(value, -1e4) if name.endswith("sinks") else value
            for name, value in model.state_dict().items()
        })  # fmt: skip
    largest = np.abs(logits).max()
    return {part: float(np.abs(logits_of(other, ids) - logits).max() / largest) for part, other in found.items()}


def one_family(family: str, seed: int) -> dict[str, Any] | None:
    """The arrays of one family, or None where a seed will not do."""
    model = FAMILIES[family]().eval()
    fill(model, seed)
    prompt = np.random.default_rng(seed).integers(0, SHAPE["vocab_size"], PROMPT_TOKENS).tolist()
    logits, ids = logits_of(model, prompt), list(prompt)
    token_gap = np.inf
    for _ in range(GREEDY_TOKENS):
        last = logits_of(model, ids)[-1]
        token_gap = min(token_gap, gap(last, 1))
        ids.append(int(last.argmax()))
    greedy, by_part = ids[PROMPT_TOKENS:], changes(family, model, prompt, logits)
    expert = expert_gap(model, ids)
    print(
        f"{family}, seed {seed}: experts differ by {expert:.1e}, tokens by {token_gap:.1e}; "
        f"{len(set(greedy))} distinct tokens; largest logit {np.abs(logits).max():.1f}; without "
        + ", ".join(f"{part} {change:.2f}" for part, change in by_part.items()),
        file=sys.stderr,
    )
    if expert < LEAST_EXPERT_GAP or token_gap < LEAST_TOKEN_GAP or len(set(greedy)) < LEAST_DISTINCT:
        return None
    assert min(by_part.values()) > LEAST_CHANGE
    config = {name: value for name, value in model.config.to_dict().items() if value is not None}
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    weights = {name: value.numpy() for name, value in model.state_dict().items() if name not in tied}
    return {
        "config": np.array(json.dumps(config)), "prompt": np.array(prompt, np.int32), "logits": logits,
        "greedy": np.array(greedy, np.int32), **{f"weights/{name}": value for name, value in weights.items()},
    }  # fmt: skip


def main() -> None:
    """Take each family's first seed that will do, and write the file."""
    torch.set_num_threads(1)
    arrays = {}
    for family in FAMILIES:
        found = next(one for seed in range(100) if (one := one_family(family, seed)) is not None)
        arrays |= {f"{family}/{name}": array for name, array in found.items()}
    np.savez_compressed(TARGET, **arrays)
    print(f"{TARGET.name}: {TARGET.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
