"""Entry point: the parser, and the one place where an error becomes a message and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from occamy import __version__
from occamy.cli import (
    engine_commands,
    episode_commands,
    harness_commands,
    learning,
    proxy_commands,
    running,
    stage_commands,
    tools,
)

_EPILOG = """\
first steps:
  occamy doctor                      check this machine
  occamy run --profile ci            the whole recipe, shortened to minutes
  occamy run --profile laptop        the whole recipe
  occamy ui runs/laptop-1            compare its checkpoints in MLflow
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands; each command sets `handler`."""
    parser = argparse.ArgumentParser(
        prog="occamy",
        description="Post-training of cost-efficient co-work agents: synthesise, admit, roll out, SFT, HDPO, "
        "sprint SFT, soup, SAO, evaluate, promote.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"occamy {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    running.add_commands(commands)
    stage_commands.add_commands(commands)
    learning.add_commands(commands)
    harness_commands.add_commands(commands)
    proxy_commands.add_commands(commands)
    engine_commands.add_commands(commands)
    episode_commands.add_commands(commands)
    tools.add_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 success, 1 failure, 2 wrong usage, 130 interrupted."""
    args = build_parser().parse_args(argv)
    try:
        code: int = args.handler(args)
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as e:
        if args.debug:
            raise
        known = isinstance(e, ValueError | RuntimeError | OSError) and str(e)
        message = str(e) if known else f"{type(e).__name__}: {e} (--debug shows where)"
        print(f"occamy {args.command}: {message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
