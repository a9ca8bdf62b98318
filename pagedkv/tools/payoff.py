"""When loading KV is faster than computing it again, for some models."""

from __future__ import annotations

from typing import Any

MODELS = {"Llama 3 8B": 131072, "Llama 3 70B": 327680, "Qwen 2.5 7B": 57344}  # bytes of K and V per token, 16 bits


def verdict(kind: str, bytes_per_s: float, numbers: dict[str, Any]) -> str:
    """A sentence about hits that load at this rate; `numbers` is filled with its figures."""
    numbers["pays_below_tokens_per_s"] = rates = {name: bytes_per_s / size for name, size in MODELS.items()}
    parts = [f"{rate:,.0f} for {name} ({MODELS[name]:,} bytes per token)" for name, rate in rates.items()]
    return f"a {kind} hit pays while prefill makes fewer tokens/s than: {', '.join(parts)}"
