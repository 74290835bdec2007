"""Check the token of each request before anything else reads it."""

from __future__ import annotations

from collections.abc import MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any

from launch.serving.access import COOKIE, AccessError, Refused, Users
from launch.serving.body_limits import Application, Receive, Send
from launch.serving.error_body import problems_body
from pipeline.recipe.problems import Problem

OPEN = ("/login", "/logout")
"""The paths that need no token: a browser's cookie does not count for POST, and signing out only forgets it."""
COMMON = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
"""Headers that are added to every answer that does not set them itself."""


class Authentication:
    """ASGI middleware that refuses requests without a valid token: with status 401, or for a browser with the form for it."""

    def __init__(self, app: Application, users: Users, refused: Refused):
        """Wrap an application. users: the users of the service. refused: a function that is called for each refused request."""
        self._app, self._users, self._refused = app, users, refused

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request on with its user in `request.state.user`, or refuse it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def answered(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                message = {**message, "headers": [*message["headers"], *(each for each in COMMON if each[0] not in given)]}
            await send(message)

        if scope["path"] in OPEN:
            return await self._app(scope, receive, answered)
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        try:
            user = self._users.identified(headers.get(b"authorization"), _cookie(headers.get(b"cookie", "")), scope["method"])
        except AccessError as error:
            self._refused("", f"{scope['method']} {scope['path']}", str(error))
            return await _refuse(error, "text/html" in headers.get(b"accept", ""), answered)
        scope.setdefault("state", {})["user"] = user
        await self._app(scope, receive, answered)


def _cookie(header: str) -> str | None:
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return None
    return found.value if found else None


async def _refuse(error: AccessError, browser: bool, send: Send) -> None:
    if browser:
        start = {"type": "http.response.start", "status": 303, "headers": [(b"location", b"/login"), (b"content-length", b"0")]}
        await send(start)
        return await send({"type": "http.response.body", "body": b""})
    body = problems_body([Problem("", error.code, str(error))])
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
