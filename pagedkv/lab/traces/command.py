"""``pagedkv trace``: makes traces for ``pagedkv replay``.

Exit code 0 done, 2 bad input.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence

from pagedkv.lab.replay.report import require_writable
from pagedkv.lab.traces.from_tokens import BLOCK_SIZE, EVERY_MS, Converted, convert
from pagedkv.lab.traces.token_log import OUTPUT, PROMPT

DESCRIPTION = """Make a trace for `pagedkv replay`. A live cache records one itself: pagedkv.TraceRecorder."""
FROM_TOKENS = f"""Make a trace from a log of token ids: JSON lines, plain, .gz or .zst, one for each request in order of
arrival. A line has the prompt as one of {", ".join(PROMPT)} (a list of numbers), and may have
timestamp (milliseconds), one of {", ".join(OUTPUT)} (a number, or a list), namespace and session
(text or a number). Prompts of different namespaces share nothing. No token is written: the trace has lengths, times,
and a number for each whole block of a prompt, counted up from 0."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``trace`` command and its own commands."""
    parser = commands.add_parser("trace", help="make a trace for replay", description=DESCRIPTION)
    made: argparse._SubParsersAction[argparse.ArgumentParser] = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=type(parser)
    )
    tokens = made.add_parser("from-tokens", help="make one from a log of token ids", description=FROM_TOKENS)
    add = tokens.add_argument
    add("log", metavar="FILE", help="the log")
    add("-o", "--out", required=True, metavar="OUT", help="the trace, a .jsonl file; one that is there is replaced")
    add("--block-size", type=int, default=BLOCK_SIZE, metavar="TOKENS", help="of a block (default: %(default)s)")
    add(
        "--every", type=int, default=EVERY_MS, metavar="MS",
        help="milliseconds between requests of a log without time stamps (default: %(default)s)",
    )  # fmt: skip
    tokens.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Sequence[str] | None = None) -> int:
    """Convert, and say what there is; 0."""
    require_writable("--out", arguments.out)
    done = convert(arguments.log, arguments.out, block_size=arguments.block_size, every_ms=arguments.every)
    print(*_told(done, arguments), sep="\n")
    return 0


def _told(done: Converted, arguments: argparse.Namespace) -> list[str]:
    lines = [
        f"{arguments.out}: {done.requests:,} requests, {done.blocks:,} block accesses, {done.unique_blocks:,} unique "
        f"blocks of {arguments.block_size} tokens"
    ]
    if done.without_block:
        lines.append(f"{done.without_block:,} prompts are shorter than a block, and have none")
    if done.without_time:
        lines.append(f"no time stamps in the log: a request every {arguments.every:,} ms (--every)")
    if done.steps_back:
        lines.append(f"{done.steps_back:,} time stamps lay before an earlier one, and count as that one")
    return [*lines, f"next: pagedkv replay {shlex.quote(arguments.out)}"]
