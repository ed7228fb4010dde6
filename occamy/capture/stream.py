"""Brings an answer that is still being sampled to its client: disconnects end the work, held streams stay alive."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request, Response

from occamy.capture.answer import DONE, event
from occamy.capture.request import ApiError

_COMMENT = b": held\n\n"
GONE = 499
"""Status of an answer that nobody waits for any more (nginx's number); it is never sent."""

Work = asyncio.Task[bytes]
"""Gives the whole answer, or raises ApiError."""


class Delivery:
    """How long a stream waits for its answer before it starts.

    Until `commit_seconds` a failure is a proper HTTP error. Then status and headers go out, for clients give up on a
    silent server, a comment follows every `alive_seconds`, and a failure can only be told as an error event. Both are
    our choice. An answer that is no stream waits as long as it takes.
    """

    def __init__(self, commit_seconds: float = 20.0, alive_seconds: float = 10.0) -> None:
        self._commit, self._alive = commit_seconds, alive_seconds

    async def deliver(self, request: Request, work: Work, stream: bool) -> Response:
        """Return what to send for `work`, which is cancelled when the client leaves. The request's body was read."""
        gone = asyncio.create_task(_disconnect(request))
        try:
            await _first(work, gone, self._commit if stream else None)
        except BaseException:
            gone.cancel()
            await _stop(work)
            raise
        if not (work.done() or gone.done()):
            return _Held(work, gone, self._alive)
        gone.cancel()
        if not work.done():
            await _stop(work)
            return Response(status_code=GONE)
        try:
            return Response(work.result(), media_type="text/event-stream" if stream else "application/json")
        except ApiError as e:
            return Response(e.body(), status_code=e.status, media_type="application/json")


class _Held(Response):
    """A stream that begins before its answer is there."""

    def __init__(self, work: Work, gone: asyncio.Task[None], alive_seconds: float) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self._work, self._gone, self._alive = work, gone, alive_seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send comments until the answer is there, then the answer."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while not self._work.done():
                await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
                await _first(self._work, self._gone, self._alive)
                if self._gone.done():
                    return
            await send({"type": "http.response.body", "body": self._answer()})
        finally:
            self._gone.cancel()
            await _stop(self._work)

    def _answer(self) -> bytes:
        try:
            return self._work.result()
        except ApiError as e:
            return event(e.body()) + DONE


async def _first(work: Work, gone: asyncio.Task[None], seconds: float | None) -> None:
    """Return when one of them is done, or after `seconds`."""
    both: set[asyncio.Task[Any]] = {work, gone}
    await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stop(work: Work) -> None:
    """Cancel and wait until it has cleaned up; what it raises by then concerns nobody."""
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
