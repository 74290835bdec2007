"""Step through tasks of the `verifiers` package (0.4) with an outside policy.

The package runs a task as a whole: an agent's program requests completions over HTTP and decides alone when it ends. Here the
program is a chat loop in this process (`PolicyHarness`; the package allows other programs). The endpoint of its requests
(`Bridge`) holds each request until the policy has answered. Everything runs in one event loop, in a thread.

Imported only where the package is installed. Does not support tasks with several agents, tasks with
images as input, or tasks that need a container.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import queue
import threading
import time
import weakref
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports] optional package
from aiohttp import web
from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore[reportMissingImports] as above
from verifiers.v1.harnesses.null.harness import NullHarness, NullHarnessConfig  # pyright: ignore[reportMissingImports] as above
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp  # pyright: ignore[reportMissingImports] as above
from verifiers.v1.interception import InterceptionServer  # pyright: ignore[reportMissingImports] as above
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type  # pyright: ignore[reportMissingImports] as above

from pipeline.environments.environment import ProcessStuck

Message = dict[str, Any]
START_S = 60.0
LOOP_S = 1.0
"""Seconds in which the event loop must respond after a task exceeds its time. If it does not, another task blocks the loop."""


@dataclass
class CompletionRequest:
    """A task's request for a completion of this conversation."""

    messages: list[Message]
    answer: asyncio.Future[Message]  # of the bridge's loop
    tools: list[dict[str, Any]]  # JSON schemas


@dataclass
class TaskEpisode:
    """The environment's handle on a run. When the handle is garbage-collected, the run is cancelled."""

    name: str
    request: CompletionRequest | None = None  # the open request, which the policy answers next
    events: queue.SimpleQueue[CompletionRequest | vf.Trace | BaseException] = field(default_factory=queue.SimpleQueue)


class PolicyHarness(NullHarness):
    """Runs the package's plain chat loop with tools over MCP in this process.

    The package's own harness would be installed with uv at every start.
    """

    SUPPORTS_TOOL_INTERCEPTION = False

    async def setup(self, runtime: vf.Runtime) -> None:
        """Install nothing."""

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Run the chat loop of one task until the policy makes no more calls or the task stops."""
        servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
            tools, dispatch, connections = await connect_mcp(servers, stack)
            messages = initial_messages(data)
            while True:
                request = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                reply = await client.post(
                    f"{endpoint}/chat/completions", json=request, headers={"Authorization": f"Bearer {secret}"}
                )
                if trace.stop_condition is not None:
                    break  # the task has ended
                reply.raise_for_status()
                message = reply.json()["choices"][0]["message"]
                messages = [*messages, message]
                if not message.get("tool_calls"):
                    break
                for call in message["tool_calls"]:
                    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
                    exists = name in dispatch
                    result = (
                        await call_mcp(connections, dispatch, name, arguments)
                        if exists
                        else f"error: there is no tool {name!r}"
                    )
                    messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": result})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def initial_messages(data: vf.TaskData) -> list[Message]:
    """Return a task's first messages. Raises ValueError if the task has no prompt."""
    if data.prompt is None:
        raise ValueError(
            "the task has no prompt; expected a task with a prompt. A simulated user who speaks first is not supported"
        )
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *map(message_to_wire, data.prompt)]


class Tasks:
    """The tasks of a taskset, indexed by number. Each task is loaded only once."""

    def __init__(self, taskset: str, config: dict[str, Any]) -> None:
        self.taskset = load_taskset(taskset_config_type(taskset).model_validate({**config, "id": taskset}))
        self._iterator, self._loaded, self._lock = iter(self.taskset), [], threading.Lock()

    def __getitem__(self, number: int) -> vf.Task:
        """Return the task with a number. Raises IndexError if the taskset has no such task."""
        with self._lock:
            self._loaded += itertools.islice(self._iterator, max(0, number + 1 - len(self._loaded)))
            return self._loaded[number]


class Bridge:
    """The endpoint for completions, and the runs that send requests to it."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._runs: dict[str, tuple[weakref.ref[TaskEpisode], asyncio.Task[None]]] = {}
        self._open_answers: dict[str, asyncio.Future[Message]] = {}  # by the name of a run: the answer that it waits for
        self._numbers = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="verifiers", daemon=True)
        self._thread.start()
        self._stack = AsyncExitStack()
        self._wait(self._serve(), START_S)

    def begin(self, number: int, timeout_s: float) -> TaskEpisode:
        """Begin a task's run, and wait for its first completion request or its end."""
        episode = TaskEpisode(f"policy-{next(self._numbers)}")
        self._wait(self._start(episode.name, weakref.ref(episode), self._tasks[number]), timeout_s)
        weakref.finalize(episode, self._cancel, episode.name)
        self._next_event(episode, time.monotonic() + timeout_s)
        return episode

    def answer(self, episode: TaskEpisode, message: Message, timeout_s: float) -> vf.Trace | CompletionRequest:
        """Answer the open request and return the run's next request, or its trace if it has ended.

        Raises TimeoutError, ProcessStuck if a task blocks the loop that all share, and the error that ended the run.
        """
        assert episode.request is not None
        deadline = time.monotonic() + timeout_s
        self._loop.call_soon_threadsafe(episode.request.answer.set_result, message)
        return self._next_event(episode, deadline)

    def close(self) -> None:
        """Cancel all runs, and end the endpoint and the loop."""

        async def end() -> None:
            for _, run in list(self._runs.values()):
                run.cancel()
            await asyncio.gather(*(run for _, run in list(self._runs.values())), return_exceptions=True)
            await self._stack.aclose()

        self._wait(end(), START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, None], timeout_s: float) -> None:
        try:
            asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)
        except TimeoutError:
            self._check_loop()
            raise

    def _check_loop(self) -> None:
        responded = threading.Event()
        self._loop.call_soon_threadsafe(responded.set)
        if not responded.wait(LOOP_S):
            raise ProcessStuck(
                "a task blocks all other tasks, for example with a reward that never ends", caused_by_answer=True
            )

    def _next_event(self, episode: TaskEpisode, deadline: float) -> vf.Trace | CompletionRequest:
        try:
            event = episode.events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            self._check_loop()
            raise TimeoutError("the task did not respond in time") from None
        if isinstance(event, BaseException):
            raise event
        episode.request = event if isinstance(event, CompletionRequest) else None
        return event

    async def _serve(self) -> None:
        application = web.Application(client_max_size=1 << 30)
        application.router.add_post("/v1/chat/completions", self._handle_request)
        runner = web.AppRunner(application, shutdown_timeout=1.0)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        self._client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1", api_key_var="HETSTEP_NO_KEY")
        self._interception = await self._stack.enter_async_context(InterceptionServer(requires_tunnel=False))

    async def _start(self, name: str, episode: weakref.ref[TaskEpisode], task: vf.Task) -> None:
        self._runs[name] = episode, asyncio.create_task(self._run(name, episode, task))

    async def _run(self, name: str, episode: weakref.ref[TaskEpisode], task: vf.Task) -> None:
        harness = NullHarnessConfig(id="null")
        config = vf.AgentConfig(model=name, client=self._client, runtime=vf.SubprocessConfig(), harness=harness)
        agent = vf.Agent(config, interception=self._interception)
        agent.harness = PolicyHarness(harness)
        try:
            event: vf.Trace | BaseException = await agent.run(task)
        except Exception as error:
            event = error
        finally:
            del self._runs[name]
            if answer := self._open_answers.pop(name, None):
                answer.cancel()  # this cancels the request too
        if (open_episode := episode()) is not None:
            open_episode.events.put(event)

    async def _handle_request(self, request: web.Request) -> web.Response:
        body = await request.json()
        episode = self._runs[body["model"]][0]()
        if episode is None:
            raise web.HTTPGone
        completion = CompletionRequest(body["messages"], self._loop.create_future(), body.get("tools", []))
        self._open_answers[body["model"]] = completion.answer
        episode.events.put(completion)
        del episode  # so that it can be garbage-collected, which ends the run, while this waits
        message = await completion.answer
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return web.json_response(
            {"id": body["model"], "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        )

    def _cancel(self, name: str) -> None:
        """Cancel the run of a garbage-collected episode. Called from any thread."""

        def cancel() -> None:
            if name in self._runs:
                self._runs[name][1].cancel()

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(cancel)
