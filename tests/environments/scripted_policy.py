"""An endpoint whose answers are given: what an agent does with right answers, which no untrained model gives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from pipeline.environments.environment import AgentAccess, AgentEnvironment, Outcome
from pipeline.types import Prompt

Call = tuple[str, dict[str, Any]]
KEY = "secret"


def play(
    environment: AgentEnvironment, prompt: Prompt, answers: Sequence[str | Call | int]
) -> tuple[Outcome, list[dict[str, Any]]]:
    """Return the outcome of an episode with these answers, and the requests for them.

    An answer is a text, a call (tool, arguments), or the status of a refusal.
    """
    return asyncio.run(play_async(environment, prompt, answers))


async def play_async(
    environment: AgentEnvironment, prompt: Prompt, answers: Sequence[str | Call | int]
) -> tuple[Outcome, list[dict[str, Any]]]:
    """Play as `play` does, in a running loop."""
    requests: list[dict[str, Any]] = []
    left = iter(answers)

    async def answer(http: web.Request) -> web.Response:
        assert http.headers["Authorization"] == f"Bearer {KEY}"
        requests.append(await http.json())
        if isinstance(said := next(left), int):
            return web.json_response({"error": {"message": "refused"}}, status=said)
        content = FORMS[http.path](said, len(requests))
        if not requests[-1].get("stream"):
            return web.json_response(content)
        choice = content["choices"][0]
        choice["delta"] = choice.pop("message")
        for number, call in enumerate(choice["delta"].get("tool_calls", ())):
            call["index"] = number
        event = json.dumps({**content, "object": "chat.completion.chunk"})
        return web.Response(text=f"data: {event}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    application = web.Application()
    for path in FORMS:
        application.router.add_post(path, answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        access = AgentAccess(f"http://127.0.0.1:{runner.addresses[0][1]}", KEY)
        return await environment.play(prompt, access, 0), requests
    finally:
        await runner.cleanup()


def _chat(answer: str | Call, number: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer if isinstance(answer, str) else None}
    if not isinstance(answer, str):
        function = {"name": answer[0], "arguments": json.dumps(answer[1])}
        message["tool_calls"] = [{"id": f"call-{number}", "type": "function", "function": function}]
    choice = {"index": 0, "message": message, "finish_reason": "stop" if isinstance(answer, str) else "tool_calls"}
    return {"id": f"c{number}", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}


def _response(answer: str | Call, number: int) -> dict[str, Any]:
    text = {"type": "output_text", "text": answer, "annotations": []}
    item: dict[str, Any] = {
        "type": "message",
        "role": "assistant",
        "id": f"m{number}",
        "status": "completed",
        "content": [text],
    }
    if not isinstance(answer, str):
        item = {"type": "function_call", "call_id": f"call-{number}", "name": answer[0], "arguments": json.dumps(answer[1])}
    shared = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "status": "completed"}
    return {"id": f"r{number}", "object": "response", "created_at": 0.0, "model": "policy", "output": [item], **shared}


FORMS = {"/v1/chat/completions": _chat, "/v1/responses": _response}
