"""A hook that turns the cache's spans into OpenTelemetry's.

They nest in the span that the caller has open, and link to the spans of the requests that they are for: a step has
one for each request in its batch.

Needs ``pip install opentelemetry-sdk``. Without it, it says so and ends.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import pagedkv as pk
from pagedkv.observe.hooks import Span


class OpenTelemetryHook:
    """One OpenTelemetry span for each of the cache's.

    `tracer` is what ``trace.get_tracer(...)`` gives.
    """

    def __init__(self, tracer: Any) -> None:
        from opentelemetry.trace import Link, SpanContext

        self._tracer, self._link, self._context = tracer, Link, SpanContext

    def begin(self, span: Span) -> Any:
        links = [self._link(trace) for trace in span.traces if isinstance(trace, self._context)]
        current = self._tracer.start_as_current_span(
            f"pagedkv.{span.name}", start_time=span.began_ns, end_on_exit=False, links=links,
            record_exception=False, set_status_on_exception=False,
        )  # fmt: skip
        return current, current.__enter__()

    def end(self, span: Span, state: Any) -> None:
        current, theirs = state
        for name, value in span.attributes.items():
            theirs.set_attribute(f"pagedkv.{name}", value)
        if span.error is not None:
            theirs.record_exception(span.error)
        theirs.end(end_time=span.ended_ns)
        current.__exit__(None, None, None)


def main() -> int:
    try:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    except ImportError:
        print("opentelemetry-sdk is not installed: pip install opentelemetry-sdk")
        return 0
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("example")

    spec = pk.KVSpec(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_size=4)
    with pk.KVCache(spec, device_memory=pk.Blocks(8), host_memory=pk.Blocks(16)) as cache:
        cache.hooks.add(OpenTelemetryHook(tracer))
        for start in (0, 100, 0):
            with tracer.start_as_current_span("request"), cache.sequence(range(start, start + 21)) as seq:
                rest = np.zeros((1, len(seq) - seq.num_computed, 1, 8), np.float32)
                seq.scatter(rest, rest)
        scheduler = pk.Scheduler(cache, pk.SchedulerOptions(max_running=2, max_batch_tokens=64))
        for start in (0, 200):
            with tracer.start_as_current_span("request") as theirs:
                scheduler.submit(range(start, start + 9), max_new_tokens=1, trace=theirs.get_span_context())
        plan = scheduler.schedule()
        with scheduler.step(plan) as step:
            step.mark_written(0)
        scheduler.report(plan, [1, 1])

    spans = kept.get_finished_spans()
    names = {span.context.span_id: span.name for span in spans}
    for span in sorted(spans, key=lambda span: span.start_time):
        print(names[span.parent.span_id] if span.parent else "-", ">", span.name, dict(span.attributes))
    parents = {(span.name, names[span.parent.span_id]) for span in spans if span.parent}
    assert {("pagedkv.sequence", "request"), ("pagedkv.moves", "pagedkv.make_room")} <= parents
    assert len([span for span in spans if span.name == "pagedkv.step"][-1].links) == 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
