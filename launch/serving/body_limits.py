"""Limit the size of the body of a request before it is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from launch.serving.error_body import problems_body
from pipeline.recipe.problems import Problem

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class _TooLarge(Exception):
    """Raised when the body exceeds its limit."""


class BodyLimit:
    """ASGI middleware that answers 413 to a request whose body is too large, and reads no more of it than the limit."""

    def __init__(self, app: Application, max_bytes: int):
        """Wrap an application. max_bytes: the largest size of a body."""
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        lengths = [value for name, value in scope["headers"] if name == b"content-length"]
        if any(not value.isdigit() or len(value) > 15 or int(value) > self._max_bytes for value in lengths):
            return await self._refuse(send)
        read, refused = 0, False

        async def bounded() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._max_bytes:
                raise _TooLarge
            return message

        async def answered(message: Message) -> None:
            nonlocal refused
            if read <= self._max_bytes:
                await send(message)
            elif not refused:  # the application may have caught the exception, and answers something else
                refused = True
                await self._refuse(send)

        try:
            await self._app(scope, bounded, answered)
        except _TooLarge:
            if not refused:
                await self._refuse(send)

    async def _refuse(self, send: Send) -> None:
        message = f"got a longer request body; expected at most {self._max_bytes} bytes"
        body = problems_body([Problem("body", "too-large", message)])
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body})
