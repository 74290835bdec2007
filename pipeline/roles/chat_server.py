"""Serve chat completions of the job's judge over HTTP: `POST /KEY/v1/chat/completions`, in OpenAI's form.

The environments beside the policy's engines ask here, each from a process of its own, as soon as an episode ends. The engine
batches whatever is open. KEY is derived from the attempt's secret, so other users of the cluster cannot ask; the port is free.

A reply depends on the conversation, the sampling parameters, `seed` and the run's seed alone. So the same request gets the same
reply, in a resumed run too; for another one, send another `seed`. A client that closes its connection ends its request.
"""

from __future__ import annotations

import asyncio
import hmac
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from pipeline.environments.llm_judge import OVERLONG, ChatBody
from pipeline.rollout.seeds import derived_seed
from pipeline.types import Completion, Request, Sampling

START_S = 60.0
MAX_BODY_BYTES = 64 << 20


@dataclass(frozen=True)
class ServedChat:
    """The model behind a server."""

    encode: Callable[[Sequence[dict[str, Any]]], np.ndarray]
    """Return the tokens of messages, [P] int32."""
    decode: Callable[[Completion], str]
    """Return the text of a completion, up to its stop string."""
    max_model_len: int
    vocabulary: int  # tokens, which limits top_k
    seed: int  # of the run


class ChatServer:
    """An HTTP server in a thread. The thread that owns the engine calls `take` and `reply`."""

    def __init__(self, address: str, key: str, wakeup: threading.Event) -> None:
        """Listen at an IP address, on a free port. wakeup: is set when a request arrives, or its client has gone."""
        self._address, self._key, self._wakeup = address, key, wakeup
        self._model: ServedChat | None = None
        self._arrived: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._gone: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._waiting: dict[str, asyncio.Future[Completion]] = {}  # id of the request -> its completion
        self._number = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="chat server", daemon=True).start()
        port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(START_S)
        host = f"[{address}]" if ":" in address else address
        self.address = f"{host}:{port}/{key}"

    def serve(self, model: ServedChat) -> None:
        """Answer from now on. Before, requests get status 503."""
        self._model = model

    def take(self) -> tuple[list[Request], list[str]]:
        """Return (requests that have arrived, ids of requests whose clients have gone) since the last call."""
        requests, gone = [], []
        while not self._arrived.empty():
            requests.append(self._arrived.get())
        while not self._gone.empty():
            gone.append(self._gone.get())
        return requests, gone

    @property
    def has_news(self) -> bool:
        """True if `take` would return something."""
        return not (self._arrived.empty() and self._gone.empty())

    def reply(self, completion: Completion) -> None:
        """Answer a request with its completion."""
        self._loop.call_soon_threadsafe(self._complete, completion)

    def _complete(self, completion: Completion) -> None:
        future = self._waiting.get(completion.id)
        if future and not future.done():
            future.set_result(completion)

    def close(self) -> None:
        """Stop to listen, and drop open requests."""
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _start(self) -> int:
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_post("/{key}/v1/chat/completions", self._handle)
        self._runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._address, 0, backlog=4096).start()
        return self._runner.addresses[0][1]

    async def _handle(self, http: web.Request) -> web.Response:
        if not hmac.compare_digest(http.match_info["key"].encode(), self._key.encode()):
            return _refusal(401, "the key is wrong", "invalid_api_key")
        if (model := self._model) is None:
            return _refusal(503, "the judge is loading", "loading")
        content = await http.read()
        try:
            body = msgspec.json.decode(content, type=ChatBody)
            tokens = model.encode([_plain(message) for message in body.messages])
        except msgspec.MsgspecError as error:
            return _refusal(400, str(error), "invalid_request_error")
        except Exception as error:  # of the chat template, which may refuse roles
            return _refusal(400, f"the chat template: {type(error).__name__}: {error}", "invalid_request_error")
        if not len(tokens):
            return _refusal(400, "the chat template makes an empty prompt of these messages", "invalid_request_error")
        most = body.max_completion_tokens or body.max_tokens
        if len(tokens) + (most or 1) > model.max_model_len:
            limit = model.max_model_len - (most or 1)
            message = (
                f"the prompt has {len(tokens)} tokens; expected at most {limit}: judge.vllm_cfg.max_model_len less max_tokens"
            )
            return _refusal(400, message, OVERLONG, tokens=len(tokens), limit=limit)
        self._number += 1
        request = _request(str(self._number), body, tokens, most or model.max_model_len, model)
        future = self._waiting[request.id] = self._loop.create_future()
        self._arrived.put(request)
        self._wakeup.set()
        try:
            completion = await future
        finally:
            del self._waiting[request.id]
            if future.cancelled():
                self._gone.put(request.id)
                self._wakeup.set()
        usage = {"prompt_tokens": len(tokens), "completion_tokens": len(completion.tokens)}
        message = {"role": "assistant", "content": model.decode(completion)}
        return web.json_response(
            {
                "id": f"chatcmpl-{request.id}",
                "object": "chat.completion",
                "created": 0,
                "model": body.model or "judge",
                "choices": [{"index": 0, "message": message, "finish_reason": completion.finish, "logprobs": None}],
                "usage": {**usage, "total_tokens": sum(usage.values())},
            }
        )


def _plain(message: dict[str, Any]) -> dict[str, str]:
    """Return a message with a text as its content. Raises msgspec.ValidationError for other contents."""
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str) or not isinstance(message.get("role"), str):
        raise msgspec.ValidationError("expected messages of {role, content}, with a text as content")
    return {"role": message["role"], "content": content}


def _request(name: str, body: ChatBody, tokens: np.ndarray, most: int, model: ServedChat) -> Request:
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    top_k = min(max(0, body.top_k), model.vocabulary)
    sampling = Sampling(body.temperature, body.top_p, top_k, most, (), stop)
    return Request(name, tokens, derived_seed(model.seed, body.seed, tokens.tobytes()), sampling)


def _refusal(status: int, message: str, code: str, **more: Any) -> web.Response:
    return web.json_response(
        {"error": {"message": message, "type": "invalid_request_error", "code": code, **more}}, status=status
    )
