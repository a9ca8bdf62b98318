"""The commands ``pagedkv inspect`` and ``pagedkv verify``.

Exit code 0 clean, 1 something is wrong, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from pagedkv.errors import InvalidArgument
from pagedkv.tools import remote
from pagedkv.tools.store.reader import StoreReader
from pagedkv.tools.store.repair import repair
from pagedkv.tools.store.show import progress
from pagedkv.tools.store.survey import survey
from pagedkv.tools.store.verify import header_bytes, total_bytes, verify

INSPECT = """Show the content of a cache directory, read from its headers. Changes nothing; another process may have
the directory open."""
VERIFY = """Check every header, checksum, chain key and parent of a cache directory. Exit code 0: nothing is wrong;
1: something is (with --repair: was); 2: it is no cache directory that can be read. Blocks that are merely of no use any
more are counted, not wrong."""


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the two commands."""
    inspect = commands.add_parser("inspect", help="show the content of a cache directory", description=INSPECT)
    check = commands.add_parser("verify", help="check every byte of a cache directory", description=VERIFY)
    for parser in (inspect, check):
        count = "?" if parser is inspect else None
        parser.add_argument("directory", metavar="DIR", nargs=count, help="directory of a disk tier")
        parser.add_argument("--json", action="store_true", help="print the result as JSON")
    inspect.add_argument("--remote", metavar="URL", help="count the blocks of a remote store instead, by group")
    inspect.add_argument("--prefix", metavar="WORD", default="pagedkv", help="of keys for --remote (default: pagedkv)")
    inspect.add_argument("--ca-file", metavar="FILE", help="certificates to trust for --remote")
    inspect.add_argument("--cluster", action="store_true", help="the server of --remote is a node of a cluster")
    check.add_argument(
        "--repair", action="store_true",
        help="lock the directory and bury wrong and useless slots; right ones are not touched",
    )  # fmt: skip
    inspect.set_defaults(run=run_inspect)
    check.set_defaults(run=run_verify)


def run_inspect(arguments: argparse.Namespace, argv: Any = None) -> int:
    """Print a survey; 0."""
    if (arguments.directory is None) == (arguments.remote is None):
        raise InvalidArgument("inspect a directory, or a store with --remote URL")
    if arguments.remote is None and (arguments.ca_file is not None or arguments.cluster):
        raise InvalidArgument("--ca-file and --cluster are for --remote")
    if arguments.remote is not None:
        store = remote.options(arguments.remote, None, arguments.ca_file, is_cluster=arguments.cluster)
        groups = remote.inspect(store, remote.check_prefix(arguments.prefix))
        if arguments.json:
            print(json.dumps(groups, indent=2))
        else:
            remote.show(groups, store.where, sys.stdout)
        return 0
    with StoreReader(arguments.directory) as reader, progress("headers", header_bytes(reader)) as tick:
        found = survey(reader, tick)
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        found.print(sys.stdout)
    return 0


def run_verify(arguments: argparse.Namespace, argv: Any = None) -> int:
    """Print a verdict; 0 if nothing is wrong, else 1."""
    with StoreReader(arguments.directory) as reader, progress("checked", total_bytes(reader)) as tick:
        verdict = repair(arguments.directory, tick) if arguments.repair else verify(reader, tick)
    if arguments.json:
        print(json.dumps(verdict.to_dict(), indent=2))
    else:
        verdict.print(sys.stdout)
    return 0 if verdict.ok else 1
