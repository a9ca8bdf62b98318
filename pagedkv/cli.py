"""The ``pagedkv`` command.

Bad input is one line on stderr and exit code 2; a traceback is a bug of ours.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from pagedkv._version import __version__
from pagedkv.errors import PagedKVError
from pagedkv.lab.replay import command as replay_command
from pagedkv.lab.show import command as show_command
from pagedkv.lab.simulate import command as simulate_command
from pagedkv.lab.sizing import command as plan_command
from pagedkv.lab.traces import command as trace_command
from pagedkv.tools import doctor
from pagedkv.tools.store import command as disk_command

BAD_INPUT = 2
INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """argparse, with errors of one line, and options by their whole names."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:  # type: ignore[override]
        """As argparse's, but a command reports its own unknown options."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, _one_line(f"{self.prog}: error: {message} (see {self.prog} --help)"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv : the arguments after the program's name (default: ``sys.argv[1:]``).

    Returns
    -------
    The exit code: 0 done, 1 the run found something wrong, 2 bad input, 130 interrupted.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _Parser(prog="pagedkv", description="A paged KV cache for LLM inference: tools.")
    parser.add_argument("--version", action="version", version=f"pagedkv {__version__}")
    commands: argparse._SubParsersAction[argparse.ArgumentParser] = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=_Parser
    )
    replay_command.add_parser(commands)
    trace_command.add_parser(commands)
    simulate_command.add_parser(commands)
    disk_command.add_parsers(commands)
    doctor.add_parser(commands)
    plan_command.add_parser(commands)
    show_command.add_parser(commands)
    warnings = logging.StreamHandler()
    warnings.setLevel(logging.WARNING)
    logging.getLogger("pagedkv").addHandler(warnings)
    try:
        arguments = parser.parse_args(argv)
        code: int = arguments.run(arguments, argv)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left; nothing more to say
        return 1
    except (PagedKVError, ImportError, OSError) as error:
        sys.stderr.write(_one_line(f"pagedkv: error: {error}"))
        return BAD_INPUT
    except MemoryError as error:
        sys.stderr.write(_one_line(f"pagedkv: error: not enough memory for this {error}"))
        return BAD_INPUT
    except KeyboardInterrupt:
        sys.stderr.write("pagedkv: interrupted\n")
        return INTERRUPTED
    finally:
        logging.getLogger("pagedkv").removeHandler(warnings)
    return code


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split())) + "\n"


if __name__ == "__main__":
    sys.exit(main())
