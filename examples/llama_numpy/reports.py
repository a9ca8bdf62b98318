"""What is told at the end: where cached tokens were found, and how fast it went."""

from __future__ import annotations

from collections.abc import Mapping

from examples.llama_numpy.generation import Speed
from examples.llama_numpy.serving import Served


def of_prompt(num_tokens: int, hits: Mapping[str, int], speed: Speed) -> str:
    """A line about one prompt of so many tokens."""
    parts = [f"computed {speed.prompt_tokens} at {speed.prompt_tokens / speed.prompt_s:.1f} tokens/s"]
    if speed.new_tokens:
        parts.append(f"generated at {speed.new_tokens / speed.new_s:.1f} tokens/s")
    return f"{_counted(num_tokens, 'prompt token')}; hit tokens: {_by_tier(hits)}; {', '.join(parts)}\n"


def of_serving(served: Served) -> str:
    """A line about prompts served together."""
    num_tokens = sum(len(request.prompt) for request in served.requests)
    return (
        f"{_counted(len(served.requests), 'answer')}, {_counted(num_tokens, 'prompt token')}; "
        f"hit tokens: {_by_tier(served.hit_tokens)}; "
        f"preemptions: {served.swapped} by swap, {served.recomputed} by recompute; {_counted(served.steps, 'step')} in "
        f"{served.seconds:.1f} s: computed {served.computed_tokens} at {served.computed_tokens / served.seconds:.1f} "
        f"tokens/s, generated {served.new_tokens} at {served.new_tokens / served.seconds:.1f} tokens/s\n"
    )


def _by_tier(hits: Mapping[str, int]) -> str:
    return ", ".join(f"{tier} {count}" for tier, count in hits.items())


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
