"""Runs whose episodes agents play through the endpoint."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from aiohttp import web

from pipeline.data.scratchpad import addition
from pipeline.observe.metrics import read_rollouts
from tests.end_to_end.agents import TURNS, digits, reply
from tests.end_to_end.runs import LOCAL, Run, submit
from tests.end_to_end.test_async import IN_FLIGHT, SLOW, kill_and_rerun
from tests.environments.test_nemo_gym import serving

# Each piece of text is one token, so that whatever the policy samples is its own rendering.
TEMPLATE = (
    "{% for m in messages %}{{ '!' if m.role == 'assistant' else '?' }}{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}!{% endif %}"
)
CHAT = (
    f"policy.tokenizer.chat_template={TEMPLATE!r}",
    "data.apply_chat_template=true",
    "policy.max_total_sequence_length=120",
    "policy.sequence_packing={train_mb_tokens: 256, logprob_mb_tokens: 256}",
    "grpo.max_rollout_turns=3",
    "grpo.max_num_steps=2",
    "cluster.train.ranks_per_node=1",
    "cluster.generate.ranks_per_node=1",
    "cluster.timeouts.silence=120",
)
APART = ("cluster.environment.nodes=2",)
ALONE = "policy.generation.max_num_seqs=1"  # each request is a batch of its own, whatever the time
TASKSETS = Path(__file__).parents[1] / "environments/tasksets"
VERIFIERS = "data.train={_override_: true, dataset_name: pipeline.environments.verifiers.tasks, messages_key: messages, \
output_key: answer, env_name: digits, kwargs: {taskset: hetstep_talk, size: 100}}"
OF_AGENTS = ("train/conversations", "train/unmatched_answers")


def run_with(folder, kind: str, *keys: str) -> Run:
    run = submit(folder, *LOCAL, *CHAT, f"env.digits={{_override_: true, timeout_s: 60, {kind}}}", *keys, timeout=400)
    assert run.status == 0, run.output
    return run


def rollouts(run: Run) -> list[tuple]:
    """Return what the policy sampled and was told in each episode, with its reward."""
    return [
        (line["prompt_index"], line["prompt_tokens"], line["completion_tokens"], line["reward"], line["finish"])
        for path in sorted((run.folder / "rollouts").iterdir())
        for line in read_rollouts(path)
    ]


@pytest.fixture(scope="module")
def in_process(tmp_path_factory) -> Run:
    return run_with(tmp_path_factory.mktemp("talk") / "run", "kind: tests.end_to_end.agents.Talk", ALONE)


@pytest.mark.parametrize(
    "kind, keys",
    [
        ("kind: python_agent, kwargs: {function: tests.end_to_end.agents.talk}", APART),
        pytest.param(
            "kind: agent, kwargs: {command: [python, -m, tests.end_to_end.agents]}", (), marks=pytest.mark.full
        ),  # by default without a run: tests/rollout/test_agents_of_engines.py
        pytest.param(
            "kind: verifiers, kwargs: {taskset: hetstep_talk}",
            (VERIFIERS, f"module_folders=[{TASKSETS}]"),
            marks=pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed"),
        ),
    ],
    ids=["function", "command", "verifiers"],
)
def test_an_agent_has_the_run_of_the_environment_in_process(tmp_path, in_process, kind, keys):
    """Tokens, rewards, losses and gradients are equal to the last bit, also with agents on environment ranks."""
    run = run_with(tmp_path / "run", kind, ALONE, *keys)
    assert rollouts(run) == rollouts(in_process)
    known = in_process.metrics()
    assert [{key: line[key] for key in first} for line, first in zip(run.metrics(), known, strict=True)] == known
    assert [[line[key] for key in OF_AGENTS] for line in run.metrics()] == [[1.0, 0.0]] * 2
    logs = [path.read_text() for path in run.folder.glob("attempts/*/rank*.log")]
    assert sum("runs the environments of an engine" in log for log in logs) == (2 if keys == APART else 0)


@pytest.mark.full
def test_a_killed_run_of_agents_loses_no_rollout_and_repeats_none(tmp_path):
    """The agents change their histories, so their episodes have branches, and weights change within them."""
    agent = (
        "env.digits={_override_: true, timeout_s: 60, kind: python_agent, kwargs: {function: tests.end_to_end.agents.compacts}}"
    )
    chat = [key for key in CHAT if "ranks_per_node" not in key and "max_num_steps" not in key]
    kill_and_rerun(tmp_path / "run", 0, 3, *IN_FLIGHT, *SLOW, "grpo.async_grpo.stragglers=keep", *chat, agent)


@pytest.mark.full
def test_a_gym_has_the_run_of_the_environment_in_process(tmp_path, in_process):
    """A server of NeMo Gym's gymnasium form has the conversation of `Talk`; the policy answers over the Responses API."""
    rows = tmp_path / "rows.jsonl"
    sums = addition("train", 100, 42, digits=[1, 2])
    rows.write_text("\n".join(json.dumps({"responses_create_params": {"input": record["input"]}}) for record in sums))
    data = f"dataset_name: pipeline.environments.nemo_gym.tasks, kwargs: {{path: {rows}}}"
    with serving(talk()) as url:
        run = run_with(
            tmp_path / "run",
            f'kind: nemo_gym, kwargs: {{url: "{url}", agent: gymnasium_agent}}',
            ALONE,
            f"data.train={{_override_: true, {data}, messages_key: messages, env_name: digits}}",
        )
    assert rollouts(run) == rollouts(in_process)
    assert [[line[key] for key in OF_AGENTS] for line in run.metrics()] == [[1.0, 0.0]] * 2


def talk() -> web.Application:
    """Return the application of a server of steps that has the conversation of `Talk`."""
    turns: dict[str, int] = {}

    async def reset(http: web.Request) -> web.Response:
        session = str(len(turns))
        turns[session] = 0
        response = web.json_response({"observation": None, "info": {}})
        response.set_cookie("session", session)
        return response

    async def step(http: web.Request) -> web.Response:
        session = http.cookies["session"]
        turn, turns[session] = turns[session], turns[session] + 1
        answer = (await http.json())["response"]["output"]
        text = "".join(part["text"] for item in answer for part in item["content"])
        last = turn + 1 == TURNS
        observation = None if last else reply(turn)
        return web.json_response({"observation": observation, "reward": digits(text), "terminated": last, "info": {}})

    application = web.Application()
    application.router.add_post("/reset", reset)
    application.router.add_post("/step", step)
    return application
