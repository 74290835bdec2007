"""Tasks of NeMo Gym.

By default the server is a small one of ours, after the repository's pages and its agents (nemo_gym/base_resources_server.py,
responses_api_agents/simple_agent). With NEMO_GYM_PYTHON, a Python that has `nemo-gym`, the real server plays the same episodes.
"""

import asyncio
import contextlib
import json
import os
import socket
import struct
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from pipeline.environments.environment import EpisodeFailed
from pipeline.environments.nemo_gym import tasks
from pipeline.recipe.problems import RecipeError
from pipeline.types import Prompt
from tests.environments.pooled import made
from tests.environments.scripted_policy import play

PYTHON = os.environ.get("NEMO_GYM_PYTHON")
GET = {"type": "function", "name": "get_counter_value", "parameters": {"type": "object", "properties": {}}, "strict": True}
ADD = {
    "type": "function",
    "strict": True,
    "name": "increment_counter",
    "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
}
ROW = {
    "responses_create_params": {"input": [{"role": "developer", "content": "Count."}, {"role": "user", "content": "add 3"}]},
    "expected_count": 6,
    "initial_count": 3,
}
ROW["responses_create_params"]["tools"] = [ADD, GET]


def counter() -> web.Application:
    """Return the application of a server whose sessions have a counter."""
    counters: dict[str, int] = {}

    async def seed_session(http: web.Request) -> web.Response:
        session = f"s{len(counters)}"
        counters[session] = (await http.json())["initial_count"]
        reply = web.json_response({})
        reply.set_cookie("session", session)
        return reply

    async def increment_counter(http: web.Request) -> web.Response:
        counters[http.cookies["session"]] += (await http.json())["count"]
        return web.json_response({"success": True})

    async def get_counter_value(http: web.Request) -> web.Response:
        return web.json_response({"count": counters[http.cookies["session"]]})

    async def verify(http: web.Request) -> web.Response:
        row = await http.json()
        count = counters[http.cookies["session"]]
        return web.json_response({**row, "reward": float(count == row["expected_count"]), "count": count})

    application = web.Application()
    for handler in (seed_session, increment_counter, get_counter_value, verify):
        application.router.add_post(f"/{handler.__name__}", handler)
    return application


def guess() -> web.Application:
    """Return the application of a server of the gymnasium form: the policy has two guesses."""

    async def reset(http: web.Request) -> web.Response:
        return web.json_response({"observation": "Guess.", "info": {}})

    async def step(http: web.Request) -> web.Response:
        row = await http.json()
        right = row["response"]["output"][0]["content"][0]["text"] == row["number"]
        return web.json_response({"observation": "Again.", "reward": float(right), "terminated": right, "info": {"seen": 1}})

    application = web.Application()
    application.router.add_post("/reset", reset)
    application.router.add_post("/step", step)
    return application


@contextlib.contextmanager
def serving(application: web.Application) -> Iterator[str]:
    """Serve an application in a thread, and yield its address."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(application)
    loop.run_until_complete(runner.setup())
    loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(runner.cleanup())
        loop.close()


@contextlib.contextmanager
def real(server: str) -> Iterator[str]:
    """Start a resource server of the package, and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = subprocess.Popen([str(PYTHON), str(Path(__file__).with_name("gym_server.py")), str(port), server])
    try:
        for _ in range(240):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/docs", timeout=5)
                break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        program.kill()
        program.wait()


def prompt(tmp_path: Path, *rows: Any) -> Prompt:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    (record,) = tasks("train", 0, path=str(path), size=1)
    return Prompt(0, np.zeros(1, np.int32), "gym", {"messages": record["messages"], "record": record})


SERVERS = [
    pytest.param(lambda: serving(counter()), id="ours"),
    pytest.param(
        lambda: real("resources_servers.example_session_state_mgmt.app:StatefulCounterResourcesServer"),
        id="theirs",
        marks=pytest.mark.skipif(PYTHON is None, reason="NEMO_GYM_PYTHON names no Python"),
    ),
]


@pytest.mark.parametrize("server", SERVERS)
def test_tools_of_a_session(tmp_path, server):
    add, task = ("increment_counter", {"count": 3}), prompt(tmp_path, ROW)
    assert task.task["messages"] == [{"role": "system", "content": "Count."}, {"role": "user", "content": "add 3"}]
    with server() as url:
        environment = made("nemo_gym", url=url)
        outcome, requests = play(environment, task, [add, ("get_counter_value", {}), "6"])
        assert outcome.reward == 1.0
        assert requests[0]["tools"] == [ADD, GET] and requests[0]["input"] == ROW["responses_create_params"]["input"]
        outputs = [json.loads(item["output"]) for item in requests[2]["input"] if item.get("type") == "function_call_output"]
        assert outputs == [{"success": True}, {"count": 6}]
        outcome, requests = play(environment, task, [("verify", {}), ("increment_counter", {"count": "many"}), add, add, "6"])
        assert outcome.reward == 0.0 and requests[1]["input"][-1]["output"] == '{"detail":"Not Found"}'
        outcome, requests = play(made("nemo_gym", url=url, max_steps=1), task, [add])
        assert outcome.reward == 1.0 and len(requests) == 1


def test_a_server_of_steps(tmp_path):
    row = {"responses_create_params": {"input": "A number."}, "number": "7"}
    with serving(guess()) as url:
        environment = made("nemo_gym", url=url, agent="gymnasium_agent", max_steps=3)
        outcome, requests = play(environment, prompt(tmp_path, row), ["5", "7"])
        assert (outcome.reward, outcome.metrics, len(requests)) == (1.0, {"seen": 1.0}, 2)
        said = [item["content"] for item in requests[1]["input"] if item["role"] == "user"]
        assert said == ["A number.", "Guess.", "Again."]


@pytest.mark.parametrize("route", ["increment_counter", "verify"])
@pytest.mark.parametrize("how", ["at once", "within a reply", "by a reset", "behind a proxy"])
def test_a_server_that_dies_in_a_request(tmp_path, route, how):
    """The episode is left out: no answer is wrong for it."""

    @web.middleware
    async def dies(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path != f"/{route}":
            return await handler(request)
        if how == "behind a proxy":
            return web.Response(status=502)
        reply = web.StreamResponse(headers={"Content-Length": "100"})
        if how == "within a reply":
            await reply.prepare(request)
            await reply.write(b"{")
        assert request.transport is not None
        if how == "by a reset":
            request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.transport.abort()
        return reply

    application = counter()
    application.middlewares.append(dies)
    with serving(application) as url, pytest.raises(EpisodeFailed, match=f"{url}/{route}: the server is down: .+"):
        play(made("nemo_gym", url=url), prompt(tmp_path, ROW), [("increment_counter", {"count": 3}), "6"])


def test_faults(tmp_path):
    with pytest.raises(EpisodeFailed, match=r"127\.0\.0\.1:9"):
        play(made("nemo_gym", url="http://127.0.0.1:9"), prompt(tmp_path, ROW), [])
    with pytest.raises(ValueError, match=r"row 0: expected `responses_create_params`"):
        prompt(tmp_path, {"input": "x"})
    with pytest.raises(RecipeError, match="address of a resource server"):
        made("nemo_gym", url="localhost:8000")
