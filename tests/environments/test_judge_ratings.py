"""Ratings of the LLM judge, and how it asks the judge that a job serves, against a server whose replies each test sets."""

import dataclasses
import json
import logging
import re
import time
from typing import Any

import httpx
import pytest

from pipeline.config import EnvironmentConfig
from pipeline.environments.build_environments import build
from pipeline.environments.environment import ServedJudge, Unjudged
from pipeline.environments.llm_judge import AGAIN_TEMPERATURE, LEFT_OUT, OVERLONG, LLMJudge
from tests.environments.pooled import write_tokenizer
from tests.environments.test_llm_judge import PROMPT, endpoint, says  # noqa: F401  # a fixture

CRITERIA = [{"name": "Clarity", "description": "is it plain", "weight": 3}, {"name": "Right"}]
RECORD = {"source": "a book {response}", "gold": "four", "empty": None}
TASK = dataclasses.replace(PROMPT, task={**PROMPT.task, "record": RECORD})


UNREADABLE_FIRST = [
    "Clarity: 1",
    "Clarity: 1\nRight: 9",  # out of the scale
    "Right: 5\nClarity: 1\nbye",
    "Right: 2\nClarity: 1\nRight: 3",
    "Right: 3\nClarity: 1",
]


@pytest.mark.parametrize(
    ("kwargs", "replies", "reward", "metrics"),
    [
        ({"rating": "yes_no"}, ["It is.\n**Verdict: Yes**"], 1.0, {"tries": 1.0}),
        ({"rating": "yes_no"}, ["Verdict: no."], 0.0, {"tries": 1.0}),
        ({"rating": "yes_no"}, ["Verdict: maybe", "Verdict: yes\nVerdict: no", "Verdict: no"], 0.0, {"tries": 3.0}),
        (
            {"rating": "rubric", "criteria": CRITERIA},
            ["Good.\n- Clarity: 10/10\n**Right:** 2"],
            (3 * 1.0 + 0.2) / 4,
            {"Clarity": 10.0, "Right": 2.0, "tries": 1.0},
        ),
        (
            {"rating": "rubric", "criteria": CRITERIA, "scale": [5, 1]},
            [
                "Clarity: 1",
                "Clarity: 1\nRight: 9",
                "Right: 5\nClarity: 1\nbye",
                "Right: 2\nClarity: 1\nRight: 3",
                "Right: 3\nClarity: 1",
            ],
            (3 * 1.0 + 0.5) / 4,
            {"Clarity": 1.0, "Right": 3.0, "tries": 5.0},
        ),
        ({"rating": "pairwise"}, ["Verdict: A", "Verdict: B"], 1.0, {"disagreement": 0.0, "tries": 2.0}),
        ({"rating": "pairwise"}, ["Verdict: A", "Verdict: A"], 0.5, {"disagreement": 1.0, "tries": 2.0}),
        (
            {"rating": "pairwise", "reference": "gold"},
            ["Verdict: tie", "Verdict: A"],
            0.25,
            {"disagreement": 0.5, "tries": 2.0},
        ),
    ],
)
def test_ratings(endpoint, kwargs: dict[str, Any], replies: list[str], reward: float, metrics: dict[str, float]):  # noqa: F811
    endpoint.replies = [says(reply) for reply in replies]
    outcome = endpoint.judge(tries=9, **kwargs).step(TASK, "4")
    assert outcome.reward == pytest.approx(reward) and outcome.metrics == pytest.approx(metrics)
    assert outcome.notes["judge_reply" if len(replies) > 2 else f"judge_reply{'_2' * (len(replies) - 1)}"] == replies[-1]
    assert len(endpoint.requests) == len(replies)


def test_the_prompt_of_each_rating(endpoint):  # noqa: F811
    endpoint.replies = [says("Verdict: A")]
    endpoint.judge(rating="pairwise", reference="gold").step(TASK, "4")
    for (_, body), (first, second) in zip(endpoint.requests, [("4", "four"), ("four", "4")], strict=True):
        content = body["messages"][0]["content"]
        assert re.search(r"Answer A:\n<answer-a-\w+>\n(.*)\n</answer-a", content)[1] == first
        assert re.search(r"Answer B:\n<answer-b-\w+>\n(.*)\n</answer-b", content)[1] == second
    endpoint.replies = [says("Clarity: 1\nRight: 1")]
    endpoint.judge(rating="rubric", criteria=CRITERIA, scale=[1, 5]).step(TASK, "4")
    assert "- Clarity: is it plain\n- Right\n" in endpoint.content and "N is from 1 to 5 (best)" in endpoint.content


def test_columns_of_the_record(endpoint):  # noqa: F811
    endpoint.replies = [says("Score: 5")]
    judge = endpoint.judge(prompt="By {source}: {response} {gold}", columns=["source"])
    judge.step(TASK, "{source}")
    assert endpoint.content.endswith("{gold}") and "By a book {response}: <response-" in endpoint.content
    assert "\n{source}\n" in endpoint.content
    for name in ("empty", "absent"):
        with pytest.raises(Unjudged, match=f"the record has no '{name}'"):
            endpoint.judge(prompt=f"{{response}} {{{name}}}", columns=[name]).step(TASK, "4")


def test_expected_answers_are_needed_where_a_prompt_has_them():
    def needs(**kwargs):
        return LLMJudge.needs_answers(LLMJudge.Arguments(**kwargs))

    assert needs() and needs(rating="pairwise") and needs(prompt="{response}", second_prompt="{response}{answer}")
    assert not needs(prompt="{response}") and not needs(rating="pairwise", reference="gold")


def test_only_what_follows_the_thinking_is_judged(endpoint):  # noqa: F811
    endpoint.replies = [says("Score: 5")]
    judge = endpoint.judge(thinking_end="</think>")
    for text, judged in (("<think>7</think>\n\n4 ", "4"), ("<think>7", "")):
        judge.step(PROMPT, text)
        assert re.search(r"<response-\w+>\n(.*)\n</response", endpoint.content)[1] == judged


# ---- the judge of the job ---------------------------------------------------------------------------------------------------


def of_job(endpoint, timeout_s: float = 20.0, **kwargs: Any) -> LLMJudge:  # noqa: F811
    """Return a judge that asks the endpoint as if it was one of two engines of the job."""
    address = endpoint.url.removeprefix("http://").removesuffix("/v1")
    served = ServedJudge((f"{address}/KEY", f"{address}/KEY"), "no/tokenizer")
    environment = EnvironmentConfig(kind="llm_judge", timeout_s=timeout_s, kwargs=kwargs)
    endpoint.judges.append(build({"x": environment}, served_judge=served)["x"])
    return endpoint.judges[-1]


def overlong(limit: int):
    """Return a reply that refuses prompts of more than `limit` characters, as if they were tokens."""

    def reply(endpoint):  # noqa: F811
        tokens = len(endpoint.content)
        if tokens <= limit:
            return says("Score: 5")
        return 400, json.dumps({"error": {"message": "too long", "code": OVERLONG, "tokens": tokens, "limit": limit}}).encode()

    return reply


def test_a_reply_without_a_verdict_is_asked_again_with_another_seed(endpoint, monkeypatch, caplog):  # noqa: F811
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    endpoint.replies = [says("Hm."), (503, b"loading"), says("Hm."), says("Score: 5")]
    assert of_job(endpoint).step(PROMPT, "4").metrics == {"score": 5.0, "tries": 4.0}
    asked = [(body["temperature"], body.get("seed", 0), body["max_tokens"]) for _, body in endpoint.requests]
    again = AGAIN_TEMPERATURE
    assert asked == [(0, 0, 1024), (again, 1, 1024), (again, 1, 1024), (again, 2, 1024)]
    assert "KEY" not in caplog.text
    assert {headers["path"] for headers, _ in endpoint.requests} == {"/KEY/v1/chat/completions"}


def test_repeats_have_seeds_of_their_own(endpoint):  # noqa: F811
    endpoint.replies = [says("Hm."), says("Score: 5")]
    of_job(endpoint, request={"temperature": 0.8, "seed": 1}).step(PROMPT, "4")
    assert [(body["temperature"], body["seed"]) for _, body in endpoint.requests] == [(0.8, 1), (0.8, 2)]


def test_an_overloaded_judge_is_not_the_answers_fault(endpoint):  # noqa: F811
    endpoint.replies = [lambda handler: time.sleep(2) or says("Score: 5"), says("Score: 5")]
    with pytest.raises(Unjudged, match="ReadTimeout"):
        of_job(endpoint, timeout_s=1.0).step(PROMPT, "4")
    assert len(endpoint.requests) == 1  # an empty answer is not judged


@pytest.mark.parametrize("mode", ["refuse", "shorten"])
def test_an_overlong_answer(endpoint, mode):  # noqa: F811
    refuses = overlong(900)
    endpoint.replies = [lambda handler: refuses(endpoint)]
    judge = of_job(endpoint, overlong=mode)
    text = "begin" + "x" * 3000 + "end"
    if mode == "refuse":
        with pytest.raises(ValueError, match="the judge of the job: too long; the judge scores an empty answer") as error:
            judge.step(PROMPT, text)
        assert "KEY" not in str(error.value)
        return
    assert judge.step(PROMPT, text).metrics == {"score": 5.0, "tries": 1.0, "shortened": 1.0}
    assert "begin" in endpoint.content and "end\n" in endpoint.content and LEFT_OUT in endpoint.content
    assert judge.step(PROMPT, "short").metrics["shortened"] == 0.0
    refuses = overlong(10)  # the rest of the prompt alone is too long
    with pytest.raises(Unjudged, match="too long"):
        judge.step(PROMPT, text)


def test_without_a_judge_in_the_job_a_url_is_needed():
    with pytest.raises(ValueError, match=r"env\.x: kind llm_judge: got no url; expected one, since the job serves no judge"):
        build({"x": EnvironmentConfig(kind="llm_judge")})


# ---- a score of verl's form that asks it -------------------------------------------------------------------------------------


async def of_verl(data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer):
    """Ask as verl's generative reward models are asked (docs/advance/reward_loop.rst)."""
    messages = [{"role": "user", "content": f"{ground_truth}? {solution_str} {reward_model_tokenizer.eos_token}"}]
    async with httpx.AsyncClient(trust_env=False) as client:
        reply = await client.post(f"http://{reward_router_address}/v1/chat/completions", json={"messages": messages})
    return {"score": float(reply.json()["choices"][0]["message"]["content"]), "judge": "asked"}


def test_a_score_of_verls_form_asks_it(endpoint, tmp_path):  # noqa: F811
    write_tokenizer(tmp_path, eos_token="<e>")
    endpoint.replies = [says("0.25")]
    address = endpoint.url.removeprefix("http://").removesuffix("/v1")
    record = {"data_source": "sums", "reward_model": {"ground_truth": "4"}}
    prompt = dataclasses.replace(PROMPT, task={**PROMPT.task, "record": record})
    config = {"x": EnvironmentConfig(kind=f"{__name__}.of_verl", timeout_s=20.0)}
    environment = build(config, served_judge=ServedJudge((f"{address}/KEY",), str(tmp_path)))["x"]
    outcome = environment.step(prompt, "four")
    assert (outcome.reward, outcome.notes) == (0.25, {"judge": "asked"})
    assert endpoint.content == "4? four <e>" and endpoint.requests[0][0]["path"] == "/KEY/v1/chat/completions"
    environment.close()
    with pytest.raises(ValueError, match=r"it needs reward_router_address; expected a judge in the job"):
        build(config)
