"""``python -m bench.hooks``.

What hooks cost a request and a step, where there are none and where there are some.

``none`` is a cache without hooks, ``idle`` one with a hook that does nothing, ``recorder`` one that is recorded for
``pagedkv show``, ``trace`` one with a TraceRecorder. A step
is all of it but the model: its arrays, its slots, its commit, on sequences that need no new block. A request opens a
prompt that is cached to its last block, and lets go of it. The kinds take turns, so that all share the machine's moods.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import pagedkv as pk
from bench.timing import environment, measure, print_table, write_results
from pagedkv.lab.recording import Recorder
from pagedkv.observe.hooks import Span

SPEC = pk.KVSpec(1, 1, 8, "float16", 16)
PROMPT = list(range(513))
TURNS, ROUNDS = 5, 200
KINDS = ("none", "idle")


class Idle:
    """A hook that does nothing."""

    def begin(self, span: Span) -> None:
        """Nothing."""

    def end(self, span: Span, state: Any) -> None:
        """Nothing."""


Work = tuple[Callable[[], object], Callable[[], object] | None]


def step_of(cache: pk.KVCache, seqs: list[pk.Sequence]) -> Work:
    """One step that writes nothing.

    Beside the clock it is cut back, so that the next one is the same.
    """

    def run() -> None:
        with cache.step(seqs) as step:
            step.mark_written(0)

    def cut() -> None:
        for seq in seqs:
            seq.truncate(len(PROMPT) - 1)
            seq.append(7)

    return run, cut


def request_of(cache: pk.KVCache, pause_s: float) -> Work:
    """One request for a cached prompt, and a pause beside the clock."""
    return lambda: cache.sequence(PROMPT).release(), lambda: time.sleep(pause_s)


def rows(num_seqs: int, kinds: Sequence[str], pause_s: float) -> list[dict[str, Any]]:
    """Medians of each kind of work with each kind of hook, microseconds."""
    found: dict[tuple[str, str], list[float]] = {}
    with TemporaryDirectory() as folder, pk.KVCache(SPEC, device_memory=pk.Blocks(40 + 2 * num_seqs)) as cache:
        with cache.sequence(PROMPT) as seq, cache.step([seq]) as step:
            step.mark_written(0)
        seqs = [cache.sequence(PROMPT) for _ in range(num_seqs)]
        work = {"request": request_of(cache, pause_s), f"step of {num_seqs}": step_of(cache, seqs)}
        for _ in range(TURNS):
            for kind in kinds:
                trace = pk.TraceRecorder(cache, f"{folder}/trace.jsonl") if kind == "trace" else None  # adds itself
                hook = Idle() if kind == "idle" else Recorder(cache, max_frames=10**6) if kind == "recorder" else None
                if hook is not None:
                    cache.hooks.add(hook)
                for name, (run, cut) in work.items():
                    found.setdefault((name, kind), []).append(measure(run, rounds=ROUNDS, teardown=cut).us())
                if hook is not None:
                    cache.hooks.remove(hook)
                if trace is not None:
                    trace.close()
        for seq in seqs:
            seq.release()
    return [{"work": name, "hooks": kind, "us": min(times)} for (name, kind), times in found.items()]


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.hooks", description=__doc__)
    parser.add_argument("--json", metavar="OUT", help="write the results there")
    parser.add_argument("--sequences", type=int, default=32, help="sequences of a step")
    parser.add_argument("--recorder", action="store_true", help="with a recorder, too")
    parser.add_argument("--trace", action="store_true", help="with a TraceRecorder, too")
    parser.add_argument("--pause", type=float, default=0.0, metavar="MS", help="between requests (default: none)")
    arguments = parser.parse_args()
    env = environment()
    more = [kind for kind in ("recorder", "trace") if getattr(arguments, kind)]
    found = rows(arguments.sequences, [*KINDS, *more], arguments.pause / 1000)
    print_table(found, ("work", "hooks", "us"), title="Hooks")
    if arguments.json:
        write_results(arguments.json, "hooks", found, env=env)
        print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
