"""A hook that writes a trace: open trace.json in chrome://tracing or ui.perfetto.dev.

No dependency.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import pagedkv as pk
from pagedkv.observe.hooks import Span


class ChromeTrace:
    """Turns every span into a complete event ("X") of Chrome's trace format.

    Times in microseconds.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def begin(self, span: Span) -> None:
        """Nothing to remember: a complete event is written at the end."""

    def end(self, span: Span, state: None) -> None:
        args = span.attributes | ({"error": repr(span.error)} if span.error else {})
        begin, took = span.began_ns / 1000, (span.ended_ns - span.began_ns) / 1000
        self.events.append(
            {"ph": "X", "name": span.name, "ts": begin, "dur": took, "pid": 1, "tid": span.thread_id, "args": args}
        )  # fmt: skip


spec = pk.KVSpec(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_size=4)
trace = ChromeTrace()
with pk.KVCache(spec, device_memory=pk.Blocks(8), host_memory=pk.Blocks(16)) as cache:
    cache.hooks.add(trace)
    for start in (0, 100, 200, 0):  # the last prompt is the first one again: it comes up from the host
        with cache.sequence(range(start, start + 21)) as seq:
            rest = np.zeros((1, len(seq) - seq.num_computed, 1, 8), np.float32)
            seq.scatter(rest, rest)
    cache.hooks.remove(trace)

out = Path(tempfile.mkdtemp()) / "trace.json"
out.write_text(json.dumps({"traceEvents": trace.events}))
names = [event["name"] for event in trace.events]
print(f"{len(names)} spans in {out}:", *sorted(f"{name} {names.count(name)}" for name in set(names)))
assert {"request", "sequence", "match", "promote", "make_room", "moves", "step", "allocate", "release"} == set(names)
