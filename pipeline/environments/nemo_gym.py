"""Tasks of NeMo Gym (https://github.com/NVIDIA-NeMo/Gym), which a resource server scores over HTTP.

Start the server first, as NeMo Gym's pages say, where the nodes of environments reach it. A row of its JSONL files is a task:

    data.train: {dataset_name: pipeline.environments.nemo_gym.tasks, messages_key: messages, env_name: calendar,
                 kwargs: {path: train.jsonl}}
    env.calendar: {kind: nemo_gym, timeout_s: 60, kwargs: {url: "http://HOST:PORT"}}

An episode goes as in NeMo Gym's `simple_agent`: POST /seed_session with the row; then the policy answers the row's
`responses_create_params` through the episode's endpoint (/v1/responses), and each call goes to the server's route of the tool's
name, until an answer has no calls; then POST /verify with the row and the conversation, whose `reward` is the episode's. The
session is in cookies. Other numbers of the reply are metrics; `reward_components` are rewards that GDPO normalizes apart.

With `agent: gymnasium_agent`, the server has /reset and /step in place of these, and replies to each answer.

Leaves out: NeMo Gym's other agents, servers whose tools are behind MCP alone.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import httpx
from typing_extensions import override

from pipeline.environments.environment import AgentAccess, AgentEnvironment, EnvironmentContext, EpisodeFailed, Outcome
from pipeline.recipe.values import MISSING, Check, Positive, Text

if TYPE_CHECKING:
    from pipeline.types import Prompt

Item = dict[str, Any]
"""An item of the Responses API: a message, a call, a call's output, reasoning."""
UNKNOWN_TOOL = '{"detail":"Not Found"}'
"""Reply of a resource server to a call of a tool that it lacks. Routes such as /verify are no tools."""
UNREACHED = (502, 503, 504)
"""Statuses of a proxy whose server is down."""
NO_IDLE = httpx.Limits(max_keepalive_connections=0)
"""A server may close a connection that waits for the policy's answer just as the next request begins, as if it had died."""


def tasks(split: str, seed: int, path: str, size: int | None = None, first: int = 0) -> list[dict[str, Any]]:
    """Return rows of a JSONL file of NeMo Gym as `{"messages": [{"role", "content"}, ...], "row": {...}}`.

    The messages are the row's texts, without its tools; the agent sends the row itself. `split` and `seed` have no effect.
    Raises ValueError for a row without `responses_create_params.input`.
    """
    with open(path, encoding="utf-8") as lines:
        selection = itertools.islice(filter(str.strip, lines), first, None if size is None else first + size)
        return [_record(json.loads(line), f"{path}: row {first + number}") for number, line in enumerate(selection)]


def _record(row: Any, place: str) -> dict[str, Any]:
    parameters = row.get("responses_create_params") if isinstance(row, dict) else None
    if not isinstance(parameters, dict) or not isinstance(parameters.get("input"), str | list):
        raise ValueError(f"{place}: expected `responses_create_params` with `input`")
    system = parameters.get("instructions")
    items = [*([{"role": "system", "content": system}] if system else []), *_items(parameters["input"])]
    messages = [
        {"role": "system" if item["role"] == "developer" else item["role"], "content": _text(item.get("content"))}
        for item in items
        if "role" in item
    ]
    return {"messages": messages, "row": row}


def _items(given: str | list[Item]) -> list[Item]:
    return [{"role": "user", "content": given}] if isinstance(given, str) else list(given)


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""


def _address_error(url: str) -> str | None:
    fits = re.fullmatch(r"https?://[^/\s@]+(/\S*)?", url)
    return None if fits else "expected the address of a resource server, without a password. Try http://HOST:PORT"


@dataclass
class NemoGymArguments:
    """The kwargs of `kind: nemo_gym`."""

    url: Annotated[Text, Check(_address_error)] = MISSING
    """Address of the resource server."""
    agent: Literal["simple_agent", "gymnasium_agent"] = "simple_agent"
    """NeMo Gym's agent whose protocol the server speaks."""
    max_steps: Positive | None = None
    """Maximum answers of an episode, which is then scored. null: grpo.max_rollout_turns, after which it is not."""


class NemoGym(AgentEnvironment):
    """Plays tasks of a resource server."""

    Arguments = NemoGymArguments

    def __init__(self, arguments: NemoGymArguments, context: EnvironmentContext) -> None:
        self._url, self._timeout_s = arguments.url.rstrip("/"), context.timeout_s
        self._steps: Any = itertools.count() if arguments.max_steps is None else range(arguments.max_steps)
        self._is_gymnasium = arguments.agent == "gymnasium_agent"

    @override
    async def play(self, prompt: Prompt, access: AgentAccess, seed: int) -> Outcome:
        """Play a task. Raises EpisodeFailed if the server is down or dies, and for a reply that it should not give."""
        row = prompt.task["record"].get("row")
        if row is None:
            expected = "data.train.dataset_name=pipeline.environments.nemo_gym.tasks"
            raise EpisodeFailed(f"the record has no `row`; expected {expected}", of_answer=False)
        async with (
            httpx.AsyncClient(timeout=self._timeout_s, limits=NO_IDLE) as server,
            httpx.AsyncClient(timeout=None, trust_env=False, headers={"Authorization": f"Bearer {access.key}"}) as policy,
        ):
            episode = _Episode(row, self._url, server, f"{access.url}/v1/responses", policy)
            return await (episode.step_by_step(self._steps) if self._is_gymnasium else episode.with_tools(self._steps))


class _Episode:
    """An episode between a resource server and the policy."""

    def __init__(self, row: dict[str, Any], url: str, server: httpx.AsyncClient, ask: str, policy: httpx.AsyncClient) -> None:
        self._row, self._url, self._server, self._ask, self._policy = row, url, server, ask, policy
        parameters = {name: value for name, value in row["responses_create_params"].items() if value is not None}
        self._parameters = {"model": "policy", **parameters, "stream": False}
        self._input = _items(parameters["input"])
        self._said: list[Item] = []

    async def with_tools(self, steps: Any) -> Outcome:
        """Play as `simple_agent`, in at most as many steps as `steps` has."""
        await self._post("seed_session", self._row)
        tools = {tool.get("name") for tool in self._parameters.get("tools") or ()}
        answer: dict[str, Any] = {}
        for _ in steps:
            answer = await self._answer()
            calls = [item for item in answer["output"] if item["type"] == "function_call"]
            if answer.get("incomplete_details") or not calls:
                break
            for call in calls:
                output = await self._call(call) if call["name"] in tools else UNKNOWN_TOOL
                self._said.append({"type": "function_call_output", "call_id": call["call_id"], "output": output})
        reply = await self._post("verify", {**self._row, "response": {**answer, "output": self._said, "usage": None}})
        if "reward" not in reply:
            raise EpisodeFailed(f"{self._url}/verify: got a reply without `reward`")
        return Outcome(float(reply["reward"]), self._metrics(reply))

    async def step_by_step(self, steps: Any) -> Outcome:
        """Play as `gymnasium_agent`; the reward is the sum over the steps."""
        state = await self._post("reset", self._row)
        self._input += _observation(state)
        reward, state = 0.0, {}
        for _ in steps:
            state = await self._post("step", {**self._row, "response": {**await self._answer(), "usage": None}})
            reward += float(state.get("reward") or 0.0)
            if state.get("terminated") or state.get("truncated"):
                break
            for output in (state.get("info") or {}).get("tool_outputs", ()):
                self._said.append({"type": "function_call_output", "call_id": output["call_id"], "output": output["output"]})
            self._said += _observation(state)
        return Outcome(reward, self._metrics(state.get("info") or {}))

    async def _answer(self) -> dict[str, Any]:
        """Return the policy's answer, a response of the Responses API, and keep its items."""
        reply = await self._policy.post(self._ask, json={**self._parameters, "input": [*self._input, *self._said]})
        if reply.is_error:
            raise EpisodeFailed(f"the policy's endpoint: {reply.status_code}: {reply.text[:500]}")
        answer = reply.json()
        self._said += answer["output"]
        return answer

    async def _call(self, call: Item) -> str:
        """Return what a tool replies, an error included."""
        try:
            arguments = json.loads(call["arguments"])
        except ValueError as error:
            return json.dumps({"error": f"Invalid tool call arguments: {error!r}"})
        return (await self._send(call["name"], arguments)).text

    async def _post(self, route: str, body: Any) -> dict[str, Any]:
        reply = await self._send(route, body)
        if reply.is_error:
            raise EpisodeFailed(f"{reply.url}: {reply.status_code}: {reply.text[:500]}")
        return reply.json()

    async def _send(self, route: str, body: Any) -> httpx.Response:
        url = f"{self._url}/{route}"
        try:
            reply = await self._server.post(url, json=body)
        except (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout) as error:
            cause = str(error) or type(error).__name__  # the error of a reset connection has no text
            raise EpisodeFailed(f"{url}: the server is down: {cause}", of_answer=False) from error
        if reply.status_code in UNREACHED:
            raise EpisodeFailed(f"{url}: the server is down: status {reply.status_code}", of_answer=False)
        return reply

    def _metrics(self, reply: dict[str, Any]) -> dict[str, float]:
        """Return the numbers of a reply that are not the row's, and its rewards."""
        known = {"reward", *self._row}
        numbers = {name: float(value) for name, value in reply.items() if isinstance(value, int | float) and name not in known}
        rewards = {f"reward/{name}": float(value) for name, value in (reply.get("reward_components") or {}).items()}
        return {**numbers, **rewards}


def _observation(state: dict[str, Any]) -> list[Item]:
    return [{"role": "user", "content": state["observation"]}] if state.get("observation") else []
