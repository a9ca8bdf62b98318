"""Makes traces for ``pagedkv replay``: from a live cache, or from logs of tokens."""

from pagedkv.lab.traces.recorder import TraceRecorder as TraceRecorder
from pagedkv.lab.traces.recorder import TraceStats as TraceStats
