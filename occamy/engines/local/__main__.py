"""``python -m occamy.engines.local --model DIR``: serves a checkpoint until told to stop or its launcher is gone."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import NoReturn

import torch
from aiohttp import web
from pydantic import ValidationError

from occamy.engines.config import EngineConfig
from occamy.engines.local.checkpoint import CheckpointError
from occamy.engines.local.invariant import InvarianceError, InvariantModel, check_invariance
from occamy.engines.local.model import Model
from occamy.engines.local.server import EngineServer

_SWITCH_S = 0.0005
"""How long the HTTP thread may hold up the generation thread (CPython's default, 5 ms, is half a step)."""


def main() -> None:
    """Parse arguments, serve, and exit with 2 and one clear line when the engine cannot start."""
    parser = argparse.ArgumentParser(prog="python -m occamy.engines.local", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--weight-version", type=int, default=0)
    parser.add_argument("--max-running", type=int)
    parser.add_argument("--cached-rows", type=int)
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--prefill-tokens", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--deterministic",
        action="store_true",
        default=None,
        help="an answer depends on its own tokens, seed and weights alone, to the last bit",
    )
    parser.add_argument(
        "--launcher-fd", type=int, help="write one JSON line here when ready or failed; end when stdin closes"
    )
    args = parser.parse_args()
    given = {k: getattr(args, k) for k in EngineConfig.model_fields if getattr(args, k) is not None}
    try:
        listener = socket.create_server((args.host, args.port), backlog=1024)
    except OSError as e:
        reason = os.strerror(e.errno) if e.errno else str(e)
        _fail(args.launcher_fd, f"{args.host}:{args.port}: {reason}; --port 0 takes a free port")
    try:
        config = EngineConfig.model_validate(given)
        torch.set_num_threads(config.threads)
        model = _load(args.model, config)
        server = EngineServer(model, args.model, str(args.weight_version), config)
    except (CheckpointError, InvarianceError, MemoryError, OSError, ValidationError) as e:
        _fail(args.launcher_fd, str(e))
    url = f"http://{args.host}:{listener.getsockname()[1]}"
    spec = model.spec
    what = f"{spec.family}, {spec.layers} layers, vocabulary {spec.vocab}, context {server.context}"
    mode = ", deterministic" if config.deterministic else ""
    ready = f"serving on {url}: {args.model} ({what}{mode}) as weight version {args.weight_version}"
    asyncio.run(_serve(server, listener, url, ready, args.launcher_fd))


def _load(folder: Path, config: EngineConfig) -> Model:
    if not config.deterministic:
        return Model.load(folder)
    model = InvariantModel.load(folder)
    with torch.inference_mode():
        check_invariance(model)
    return model


async def _serve(server: EngineServer, listener: socket.socket, url: str, ready: str, launcher_fd: int | None) -> None:
    sys.setswitchinterval(_SWITCH_S)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    # Cancelling a handler whose client went away is what aborts its sequences.
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    print(ready, flush=True)
    if launcher_fd is not None:
        _tell(launcher_fd, {"url": url})
        threading.Thread(target=_watch_launcher, args=(os.getppid(),), daemon=True).start()
    await ended.wait()
    await runner.cleanup()


def _watch_launcher(parent: int) -> None:
    """End the process when the launcher closes our stdin or dies (a forked child of it may keep stdin open)."""
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], 1.0)
        if readable and not os.read(0, 1):
            break
    os._exit(0)


def _tell(fd: int, line: dict[str, str]) -> None:
    with os.fdopen(fd, "w") as pipe:
        pipe.write(json.dumps(line) + "\n")


def _fail(launcher_fd: int | None, message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    if launcher_fd is not None:
        _tell(launcher_fd, {"error": message})
    raise SystemExit(2)


if __name__ == "__main__":
    main()
