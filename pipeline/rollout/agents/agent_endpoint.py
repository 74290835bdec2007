"""The HTTP endpoint of one episode, for its agent: OpenAI's and Anthropic's routes.

    POST /v1/chat/completions, /v1/completions, /v1/responses      OpenAI
    POST /v1/messages, /v1/messages/count_tokens                   Anthropic
    GET  /v1/models

It listens on a free port of this host and lives as long as the episode. Each request carries the episode's secret, as
`Authorization: Bearer` or `x-api-key`. A request without it, a body above MAX_BODY_BYTES, more than MAX_OPEN requests at a
time, and a client that does not send its request within REQUEST_S get an error, and cost nobody else anything.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pydantic
from aiohttp import web
from typing_extensions import override
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

from pipeline.environments.environment import AgentAccess
from pipeline.environments.episode_folder import EpisodeFolder
from pipeline.rollout.agents.policy_serving import EPISODE, NAME, PolicyServing, ServedEpisode
from pipeline.rollout.engine_client import EpisodeEnded

MAX_BODY_BYTES = 64 << 20
MAX_OPEN = 256
"""Requests of an episode that may be open at a time."""
MAX_UNPROVED = 256
"""Connections that have not sent a request with the episode's secret yet."""
MOST_OF_A_PATH = 60
"""Characters of a temporary folder below which a Unix socket's path fits."""
REQUEST_S = 60.0
"""Seconds in which a client must send its request, from its connection to the last byte of the body."""

NO_TOOLS = "tools: expected none, since no parser reads the policy's calls. Try policy.generation.tool_parser=hermes"
QUIET = logging.Logger("agent endpoint", logging.CRITICAL)
"""The server's log: strangers and agents would write what they like."""

ERROR_EVENT = 'data: {"error"'
"""Beginning of the only event of a stream that vLLM refuses."""
Handler = Callable[[Any], Awaitable[Any]]


class ChatResponsesRequest(ResponsesRequest):
    """A request of the Responses API, as the chat API would read it.

    The template writes all special tokens; vLLM would add those of a plain text, such as a second `<s>`. An empty answer is a
    message without parts, which vLLM writes but does not read.
    """

    @pydantic.model_validator(mode="before")
    @classmethod
    def _read_empty_answers(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("input"), list):
            data["input"] = [
                {"role": item["role"], "content": ""} if _is_empty_message(item) else item for item in data["input"]
            ]
        return data

    @override
    def build_tok_params(self, model_config: Any) -> Any:
        return replace(super().build_tok_params(model_config), add_special_tokens=False)


class AgentEndpoint:
    """Serves one episode, from `start` to `close`."""

    def __init__(self, serving: PolicyServing, episode: ServedEpisode, host: str = "127.0.0.1") -> None:
        self._serving, self._episode, self._host = serving, episode, host
        self._key = secrets.token_urlsafe(24)
        self._open = 0
        self._folder: EpisodeFolder | None = None
        self._runner: web.AppRunner | None = None
        self._servers: list[asyncio.Server] = []
        self._unproved: dict[Any, float] = {}  # connections without a request of the episode -> time.monotonic() of their start

    async def start(self) -> AgentAccess:
        """Listen, and return how an agent reaches the endpoint."""
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        served = self._serving
        routes: dict[str, tuple[Any, Handler]] = {
            "/v1/chat/completions": (ChatCompletionRequest, served.chat.create_chat_completion),
            "/v1/completions": (CompletionRequest, served.completions.create_completion),
            "/v1/responses": (ChatResponsesRequest, served.responses.create_responses),
            "/v1/messages": (AnthropicMessagesRequest, served.messages.create_messages),
            "/v1/messages/count_tokens": (AnthropicCountTokensRequest, served.messages.count_tokens),
        }
        for path, (form, handler) in routes.items():
            application.router.add_post(path, self._route(form, handler))
        application.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(application, access_log=None, logger=QUIET, shutdown_timeout=0.1)
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._servers.append(await loop.create_server(self._connect, self._host, 0, backlog=1024))
        address = self._servers[0].sockets[0].getsockname()
        place = tempfile.gettempdir()
        place = place if len(place) < MOST_OF_A_PATH else "/tmp"
        self._folder = EpisodeFolder(place)
        path = f"{self._folder.path}/socket"
        self._servers.append(await loop.create_unix_server(self._connect, path, backlog=1024))
        return AgentAccess(f"http://{address[0]}:{address[1]}", self._key, path)

    def _connect(self) -> Any:
        """Return the protocol of a new connection, which is closed if it sends no request of the episode in time."""
        assert self._runner and self._runner.server
        connection, now = self._runner.server(), time.monotonic()
        if len(self._unproved) >= MAX_UNPROVED:
            closed = [one for one, begun in self._unproved.items() if one.transport is None and begun < now - 1.0]
            for one in closed or [next(iter(self._unproved))]:  # the oldest
                self._drop(one)
        self._unproved[connection] = now
        asyncio.get_running_loop().call_later(REQUEST_S, self._drop, connection)
        return connection

    def _drop(self, connection: Any) -> None:
        if self._unproved.pop(connection, None) is not None and connection.transport is not None:
            connection.transport.abort()

    async def close(self) -> None:
        """End the endpoint and its open requests."""
        for server in self._servers:
            server.close()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._folder:
            self._folder.remove()

    def _allows(self, http: web.Request) -> bool:
        sent = http.headers.get("Authorization", "").removeprefix("Bearer ") or http.headers.get("x-api-key", "")
        return hmac.compare_digest(sent.encode(errors="replace"), self._key.encode())

    async def _models(self, http: web.Request) -> web.StreamResponse:
        if not self._allows(http):
            return _refusal(401, "the API key is not the episode's", "invalid_api_key")
        self._unproved.pop(http.protocol, None)
        return web.json_response((await self._serving.models.show_available_models()).model_dump())

    def _route(self, form: Any, handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(http: web.Request) -> web.StreamResponse:
            if not self._allows(http):
                return _refusal(401, "the API key is not the episode's", "invalid_api_key")
            if self._open >= MAX_OPEN:
                return _refusal(429, f"{MAX_OPEN} requests are open; expected fewer at a time", "too_many_requests")
            self._open += 1
            try:
                content = await asyncio.wait_for(http.read(), REQUEST_S)
                self._unproved.pop(http.protocol, None)
                EPISODE.set(self._episode)
                return await _answer(http, form, handler, content)
            except TimeoutError:
                return _refusal(408, f"the request did not arrive within {REQUEST_S:g} s", "timeout")
            finally:
                self._open -= 1

        return handle


async def _answer(http: web.Request, form: Any, handler: Handler, content: bytes) -> web.StreamResponse:
    """Answer a request of the episode's agent."""
    try:
        request = form.model_validate_json(content)
        request.model = NAME  # whatever the agent calls it
        result = await handler(request)
    except pydantic.ValidationError as error:
        return _refusal(400, _lines(error), "invalid_request_error")
    except EpisodeEnded as error:
        return _refusal(410, str(error), "episode_ended")
    except Exception as error:  # of the request; vLLM knows the status of each kind
        result = create_error_response(error)
    if isinstance(result, ErrorResponse):
        if "--tool-call-parser" in result.error.message:  # vLLM's option, which a recipe has as a key
            result.error.message = NO_TOOLS
        return web.json_response(result.model_dump(), status=result.error.code)
    if not isinstance(result, AsyncGenerator):
        text = result.model_dump_json(exclude_none=form is AnthropicMessagesRequest, by_alias=True)
        return web.json_response(text=text)
    first = await anext(result, None)  # it comes when the turn is complete, so a refusal still has its status
    if isinstance(first, str) and first.startswith(ERROR_EVENT):
        error = json.loads(first.removeprefix(ERROR_EVENT[:6]))
        return web.json_response(error, status=min(int(error["error"].get("code") or 400), 499))
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await stream.prepare(http)
    async for event in _after(first, result):
        if not isinstance(event, str):  # of /v1/responses
            event = f"event: {event.type}\ndata: {event.model_dump_json(by_alias=True)}\n\n"
        await stream.write(event.encode())
    await stream.write_eof()
    return stream


def _is_empty_message(item: Any) -> bool:
    return isinstance(item, dict) and "role" in item and item.get("content") == []


async def _after(first: Any, rest: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    if first is not None:
        yield first
    async for event in rest:
        yield event


def _lines(error: pydantic.ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()[:5])


def _refusal(status: int, message: str, code: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error", "code": code}}, status=status)
