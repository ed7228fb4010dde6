"""The recording proxy as a service of its own, for harnesses and rollouts in other processes or on other machines."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import socket
import threading
from pathlib import Path

from occamy.cli.options import port


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register proxy."""
    proxy = commands.add_parser("proxy", help="the recording proxy between harnesses and an engine")
    actions = proxy.add_subparsers(dest="action", metavar="ACTION", required=True)
    serve = actions.add_parser(
        "serve",
        help="serve it until it is stopped; started again on the same folder, open episodes go on",
        description="Serve the recording proxy: POST /admin/episodes/ID opens an episode, "
        "/episodes/ID/root/v1 is its OpenAI-compatible base URL, /metrics is for Prometheus.",
        epilog="example: occamy proxy serve --folder captures --tokenizer model --engine http://127.0.0.1:30000 "
        "--context-limit 32768 --port 8100 --workers 4",
    )
    serve.add_argument("--folder", type=Path, required=True, metavar="DIR", help="where captures lie")
    serve.add_argument("--tokenizer", type=Path, required=True, metavar="DIR", help="the policy's checkpoint folder")
    serve.add_argument("--engine", required=True, metavar="URL", help="base URL of an SGLang-compatible engine")
    serve.add_argument("--context-limit", type=int, required=True, metavar="N", help="tokens of prompt and answer")
    serve.add_argument("--host", default="127.0.0.1", metavar="ADDRESS")
    serve.add_argument("--port", type=port, default=8100, metavar="N", help="default: 8100")
    serve.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes; each episode stays with one (default: 1)"
    )
    serve.add_argument(
        "--hold-seconds", type=float, default=120.0, metavar="S", help="how long calls wait for the engine"
    )
    serve.add_argument(
        "--answer-seconds", type=float, default=600.0, metavar="S", help="how long the engine may sample one answer"
    )
    serve.add_argument(
        "--admin-key-file",
        type=Path,
        metavar="FILE",
        help="key of the admin API (default: DIR/admin.key, made when it is not there)",
    )
    serve.set_defaults(handler=serve_command)


def serve_command(args: argparse.Namespace) -> int:
    """Serve in the foreground."""
    from occamy.capture.worker import ProxySettings
    from occamy.capture.workers import serve_workers

    if args.workers < 1:
        raise ValueError(f"--workers {args.workers}: give 1 or more")
    args.folder.mkdir(parents=True, exist_ok=True)
    settings = ProxySettings(
        folder=args.folder,
        tokenizer=args.tokenizer,
        engine=args.engine,
        context_limit=args.context_limit,
        hold_seconds=args.hold_seconds,
        answer_seconds=args.answer_seconds,
        admin_key=_admin_key(args.admin_key_file or args.folder / "admin.key"),
    )
    listener = socket.create_server((args.host, args.port), backlog=2048)
    print("recording proxy: http://{}:{}".format(*listener.getsockname()[:2]), flush=True)
    if args.workers > 1:
        asyncio.run(serve_workers(settings, args.workers, listener))
        return 0
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with settings.serving(listener):
        stop.wait()
    return 0


def _admin_key(path: Path) -> str:
    """Read the key, or make one that its owner alone can read."""
    if not path.exists():
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(16) + "\n")
    return path.read_text().strip()
