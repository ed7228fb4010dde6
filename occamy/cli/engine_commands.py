"""Commands around an engine: serve a checkpoint on this machine; check any engine against the contract."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from occamy.cli.options import count, port

_COLOURS = {"pass": "green", "fail": "red", "skip": "yellow"}


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register engine serve and engine conformance."""
    engine = commands.add_parser("engine", help="serve a checkpoint; check an engine against the contract")
    actions = engine.add_subparsers(dest="action", metavar="ACTION", required=True)
    serve = actions.add_parser(
        "serve",
        help="serve a checkpoint on the CPU until Ctrl-C",
        description="Serve a checkpoint folder with SGLang's /generate contract.",
        epilog="example: occamy engine serve --model runs/laptop-1/checkpoints/base --port 30000",
    )
    serve.add_argument("--model", type=Path, required=True, metavar="DIR", help="a checkpoint folder")
    serve.add_argument("--port", type=port, default=30000, metavar="N", help="default: 30000; 0 takes a free one")
    serve.add_argument("--weight-version", type=int, default=0, metavar="N")
    serve.add_argument("--threads", type=count, default=1, metavar="N")
    serve.add_argument(
        "--deterministic", action="store_true", help="same seed, same answer, to the last bit; about half as fast"
    )
    serve.set_defaults(handler=serve_command)

    conformance = actions.add_parser(
        "conformance",
        help="check an engine against the /generate contract",
        description="Check any engine that speaks SGLang's /generate; nobody else may use it meanwhile. Exit code 1 "
        "when a check fails.",
        epilog="example: occamy engine conformance --url http://127.0.0.1:30000 --model DIR --intrusive",
    )
    conformance.add_argument("--url", required=True, metavar="URL", help="base URL of the engine")
    conformance.add_argument(
        "--model", type=Path, metavar="DIR", help="the folder it serves: compare with a float32 forward pass of it"
    )
    conformance.add_argument(
        "--tolerance", type=float, default=1e-4, metavar="X", help="of two log-probs (default: 1e-4, for float32)"
    )
    conformance.add_argument(
        "--intrusive",
        action="store_true",
        help="also update weights and send ids out of the vocabulary, which kill an SGLang server",
    )
    conformance.set_defaults(handler=conformance_command)


def serve_command(args: argparse.Namespace) -> int:
    """Become the engine process."""
    command = [sys.executable, "-m", "occamy.engines.local", "--model", str(args.model), "--port", str(args.port)]
    command += ["--weight-version", str(args.weight_version), "--threads", str(args.threads)]
    if args.deterministic:
        command += ["--deterministic"]
    threads = {"OMP_NUM_THREADS": str(args.threads), "MKL_NUM_THREADS": str(args.threads)}
    os.execve(sys.executable, command, {**os.environ, **threads})


def conformance_command(args: argparse.Namespace) -> int:
    """Print a line per check; 1 when one failed."""
    if args.model and not (args.model / "config.json").is_file():
        raise FileNotFoundError(f"--model {args.model}: no config.json there; give a Hugging Face checkpoint folder")
    return asyncio.run(_print_findings(args))


async def _print_findings(args: argparse.Namespace) -> int:
    from occamy.engines.conformance import check_engine

    reference = None
    if args.model:
        from occamy.engines.local.reference import load_reference

        reference = load_reference(args.model)
    console, failed = Console(highlight=False, soft_wrap=True), 0
    async for finding in check_engine(
        args.url, model=args.model, reference=reference, tolerance=args.tolerance, intrusive=args.intrusive
    ):
        failed += finding.verdict == "fail"
        verdict = f"[{_COLOURS[finding.verdict]}]{finding.verdict}[/]"
        console.print(f"{verdict}  {finding.check:34}{escape(finding.detail)}")
    console.print(f"{args.url}: " + (f"{failed} checks failed" if failed else "keeps the contract"))
    return 1 if failed else 0
