"""A command's whole report: the trace, the options, the results, and the model's limits."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pagedkv._version import __version__
from pagedkv.errors import InvalidArgument
from pagedkv.lab.replay.advice import Advice
from pagedkv.lab.replay.options import Options
from pagedkv.lab.replay.result import Json, Result
from pagedkv.lab.replay.trace import Trace

INSTANT = (
    "time: requests run one after the other in file order; queueing and batching play no part, and arrival times none "
    "but for the policy hazard, whose ages go by them"
)
GENERATING = (
    "time: a request starts when it arrives and takes {:g} ms per output token; queueing and prefill take none",
    "room for generated tokens: a request holds the blocks of its prompt",
)
NOT_MODELLED = (
    "generated tokens: their KV becomes visible only when a later request sends it back as input",
    "load time against recompute: bytes moved are counted, what they would cost on your hardware is not",
    "the token that an engine must compute even when the whole prompt is cached",
    "the sim engine: moves succeed at once, and no bytes are moved",
    "prompts longer than the device tier keep their first blocks only",
)
NOT_HELD = "prompts whose blocks and last tail are more than the device holds are not cached at all"


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """Results of one trace, with the facts that a reader needs to repeat them."""

    trace: Trace
    results: Sequence[Result]
    command: str
    wall_s: float
    options: Options
    advice: Advice | None = None

    def to_json(self) -> Json:
        """The report as written by ``--json``."""
        trace, options = self.trace, self.options
        return {
            "trace": trace.name,
            "sha256": trace.sha256,
            "requests": trace.num_requests,
            "block_size": trace.block_size,
            "unique_blocks": trace.num_unique,
            "block_accesses": trace.num_accesses,
            "input_tokens": int(trace.input_tokens.sum(dtype=np.int64)),
            "start": "cold",
            "time_stamps_back": trace.num_steps_back,
            "results": [result.to_json() for result in self.results],
            "advice": None
            if self.advice is None
            else {
                "sentences": self.advice.sentences,
                "replays": [result.to_json() for result in self.advice.replays],
            },
            "command": self.command,
            "version": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": platform.machine(),
            "wall_s": round(self.wall_s, 3),
            "bytes_per_token": options.bytes_per_token,
            "generating_ms": options.generating,
            "flop_weights": {
                "model": options.model.name,
                "per_token": 2 * options.model.matmul_weights,
                "per_token_and_key": 4 * options.model.num_layers * options.model.num_qo_heads * options.model.head_dim,
            },
            "not_modelled": not_modelled(options),
        }

    def write_json(self, out: str) -> None:
        """Write to a file (whole or not at all), or to stdout when ``out`` is ``-``."""
        write_json(self.to_json(), out)


def not_modelled(options: Options) -> list[str]:
    """What to keep in mind with the figures."""
    times = [INSTANT] if options.generating is None else [line.format(options.generating) for line in GENERATING]
    limits = [*NOT_MODELLED[:-1], NOT_HELD if options.layers else NOT_MODELLED[-1]]
    return [*times, *limits]


def write_json(document: Json, out: str) -> None:
    """Write to a file (whole or not at all), or to stdout when ``out`` is ``-``."""
    text = json.dumps(document, indent=1) + "\n"
    if out == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    target = Path(out).resolve()  # a link stays a link
    if target.exists() and not target.is_file():  # a pipe, a device: there is nothing to replace
        target.write_text(text, encoding="utf-8")
        return
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def require_writable(option: str, out: str) -> None:
    """Fail before the work rather than after it.

    Raises
    ------
    InvalidArgument : ``out`` is a folder, or lies in none that can be written.
    """
    target = Path(out)
    if target.is_dir():
        raise InvalidArgument(f"{option}: {out} is a folder")
    if not target.parent.is_dir():
        raise InvalidArgument(f"{option}: there is no folder {target.parent}")
    if not os.access(target.parent, os.W_OK):
        raise InvalidArgument(f"{option}: cannot write in {target.parent}")
