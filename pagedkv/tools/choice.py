"""``pagedkv doctor --gpu X.Y``: the kernels that "auto" tries on a GPU elsewhere.

Nothing is compiled or launched. Which of them is fastest, only a trial on the GPU itself says.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace

from pagedkv._version import __version__
from pagedkv.errors import InvalidArgument
from pagedkv.kernels.config import AttentionConfig
from pagedkv.kernels.recorder import Recorder
from pagedkv.kernels.select import KERNELS, Kernel, candidates
from pagedkv.kernels.shipped import FLAGSHIP, LATENTS, PREFILL_TOKENS
from pagedkv.kernels.tuning import REFERENCE

GPUS = {
    (7, 0): "V100", (7, 5): "T4", (8, 0): "A100", (8, 6): "A10, RTX 3090", (8, 7): "Jetson Orin",
    (8, 9): "L4, L40S, RTX 4090", (9, 0): "H100, H200, GH200", (10, 0): "B200", (10, 3): "B300",
    (11, 0): "Jetson Thor", (12, 0): "RTX 5090", (12, 1): "DGX Spark",
}  # fmt: skip
_FP8, _FP8_LATENTS = (replace(one, kv_dtype="float8_e4m3", scale_mode="tensor") for one in (FLAGSHIP, LATENTS))
# Kinds of calls, with bf16 queries -> a config, and queries of a sequence.
CALLS: dict[str, tuple[AttentionConfig, int]] = {
    "decode, up to 16 rows": (FLAGSHIP, 1),
    "decode over fp8": (_FP8, 1),
    "decode over int8 with a scale per token": (replace(FLAGSHIP, kv_dtype="int8", scale_mode="token_head"), 1),
    "decode, more rows": (replace(FLAGSHIP, group_size=32), 1),
    "prefill": (FLAGSHIP, PREFILL_TOKENS),
    "prefill with a window": (replace(FLAGSHIP, window=True), PREFILL_TOKENS),
    "prefill over fp8": (_FP8, PREFILL_TOKENS),
    "latents, 16 heads": (LATENTS, 1),
    "prefill over latents, 16 heads": (LATENTS, PREFILL_TOKENS),
    "latents, 32 heads": (replace(LATENTS, group_size=32), 1),
    "latents, 128 heads": (replace(LATENTS, group_size=128), 1),
    "fp8 latents, 128 heads": (replace(_FP8_LATENTS, group_size=128), 1),
    "int8 latents with a scale per token": (replace(LATENTS, kv_dtype="int8", scale_mode="token_head"), 1),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """What "auto" does for a kind of call.

    Attributes
    ----------
    call : the kind.
    tried : names of kernels, the preferred first; decode_simt alone where there is nothing to try.
    not_tried : the others -> why.
    """

    call: str
    tried: tuple[str, ...]
    not_tried: dict[str, str]


def choices(capability: tuple[int, int]) -> list[Choice]:
    """What "auto" does on a compute capability, with a driver for CUDA 12.0 or later."""
    device, found = Recorder(capability), []
    for call, (config, max_q_len) in CALLS.items():
        tried = tuple(kernel.name for kernel in candidates(device, config, max_q_len)) or (REFERENCE,)
        others = (kernel for kernel in KERNELS if kernel.name not in tried)
        found.append(Choice(call, tried, {one.name: _why_not(one, config, capability, max_q_len) for one in others}))
    return found


def run(arguments: argparse.Namespace) -> int:
    """Print the choices for ``--gpu``; 0."""
    others = ("disk", "remote", "size", "secret_file", "ca_file", "cluster", "retune")
    if any(getattr(arguments, name) not in (None, False) for name in others):
        raise InvalidArgument(
            "--gpu shows the kernels of another GPU and tries nothing here: give it alone, or with --json"
        )
    capability = capability_of(arguments.gpu)
    found = choices(capability)
    if arguments.json:
        about = {"pagedkv": __version__, "gpu": arguments.gpu, "gpus": GPUS[capability].split(", ")}
        print(json.dumps({**about, "kernels": [asdict(choice) for choice in found]}, indent=2))
        return 0
    print(f'kernels that "auto" tries on compute capability {arguments.gpu} ({GPUS[capability]}), bf16 queries')
    latents = f"{LATENTS.head_dim}/{LATENTS.head_dim_v}"
    print(f"for head dim {FLAGSHIP.head_dim} and latents of {latents}; another head dim may have fewer kernels")
    for choice in found:
        print(f"{choice.call}: {', '.join(choice.tried)}")
        for name, why in choice.not_tried.items():
            print(f"    not {name}: {why}")
    return 0


def capability_of(text: str) -> tuple[int, int]:
    """The compute capability that `text` names, as "9.0".

    Raises
    ------
    InvalidArgument
        It names none that a GPU has; the message lists them.
    """
    known = {f"{major}.{minor}": (major, minor) for major, minor in GPUS}
    if text not in known:
        every = ", ".join(f"{name} ({GPUS[capability]})" for name, capability in known.items())
        raise InvalidArgument(f"--gpu {text[:40]!r}: give a compute capability, of {every}")
    return known[text]


def _why_not(kernel: Kernel, config: AttentionConfig, capability: tuple[int, int], max_q_len: int) -> str:
    rows = max_q_len * config.group_size
    if reason := kernel.unsupported(config, capability):
        return reason
    if kernel.name == REFERENCE:
        return "the others are checked beside it; it computes where none of them is right"
    if kernel.max_rows and rows > kernel.max_rows:
        return f"{rows} rows of a sequence: at most {kernel.max_rows}"
    return f"{rows} rows of a sequence: kernels for few rows are tried"
