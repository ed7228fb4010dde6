"""Several proxies behind one address: starts them, starts them again when they die, and routes to them."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from contextlib import AsyncExitStack, suppress

from aiohttp import web

from occamy.capture.render import Renderer
from occamy.capture.router import Router
from occamy.capture.worker import ProxySettings

_LOG = logging.getLogger(__name__)

_RESTART_SECONDS = 0.5
_YOUNG_SECONDS = 10.0
_YOUNG_DEATHS = 5
"""So many deaths in a row before the age of `_YOUNG_SECONDS` are no accident (our choice)."""


async def serve_workers(settings: ProxySettings, count: int, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM: `count` worker processes behind a router on `listener`.

    Worker k keeps its captures in ``folder/worker-k``. Raises ValueError for a folder that another number of workers
    served: its episodes would be looked for in the wrong place. Raises RuntimeError when a worker cannot stay alive.
    """
    names = [f"worker-{k}" for k in range(count)]
    before = sorted(path.name for path in settings.folder.glob("worker-*"))
    if before and before != sorted(names):
        raise ValueError(f"{settings.folder} was served by {len(before)} workers, not {count}; give that number")
    Renderer(settings.tokenizer)  # a wrong folder fails here, not in every worker
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        proxies: dict[str, str] = {}
        keepers = []
        for name in names:
            own = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=2048))
            proxies[name] = "http://{}:{}".format(*own.getsockname())
            mine = settings.model_copy(update={"folder": settings.folder / name})
            keepers.append(asyncio.create_task(_keep(name, mine, own)))
        router = Router(proxies, settings.hold_seconds)
        runner = web.AppRunner(router.app(), access_log=None, handler_cancellation=True)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, listener).start()
        stopping = asyncio.create_task(stop.wait())
        done, pending = await asyncio.wait({stopping, *keepers}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            task.result()


async def _keep(name: str, settings: ProxySettings, listener: socket.socket) -> None:
    """Run a worker, again and again. Raises RuntimeError when it keeps dying young."""
    deaths = 0
    while deaths < _YOUNG_DEATHS:
        born = time.monotonic()
        code = await _live(settings, listener)
        deaths = deaths + 1 if time.monotonic() - born < _YOUNG_SECONDS else 0
        _LOG.error("%s ended with status %d; starting it again", name, code)
        await asyncio.sleep(_RESTART_SECONDS)
    raise RuntimeError(f"{name} died {deaths} times in a row right after its start; its errors are above")


async def _live(settings: ProxySettings, listener: socket.socket) -> int:
    """Run one worker process to its end. A cancelled call ends it."""
    command = (sys.executable, "-m", "occamy.capture.worker", str(listener.fileno()))
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, pass_fds=[listener.fileno()]
    )
    assert process.stdin is not None
    try:
        with suppress(ConnectionError):
            process.stdin.write(settings.model_dump_json().encode() + b"\n")
            await process.stdin.drain()
        return await process.wait()
    finally:
        process.stdin.close()
        await process.wait()
