"""A generative judge with its own ranks, in a real world of three realms that the local executor's controller starts."""

import json
import os
import threading
import time

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch.executors.components import components
from launch.executors.local import rank_environments
from pipeline import config
from pipeline.environments.llm_judge import OVERLONG
from pipeline.roles.chat_server import ChatServer, ServedChat
from pipeline.types import Completion, Sampling
from tests.evaluation.said_models import POLICY, write_model
from tests.fork_server import Program
from tests.launch.model import write_recipe
from tests.roles import judge_rank
from tests.roles.judge_rank import QUESTIONS
from tests.world.secret import write_secret

LONGEST = 512


def text_of(reply: dict) -> str:
    assert reply["status"] == 200, reply
    return reply["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("keys", "engines"),
    [
        (("policy.generation.backend=transformers",), 2),
        pytest.param(("judge.vllm_cfg.tensor_parallel_size=2",), 1, marks=pytest.mark.full),
    ],
    ids=["two engines", "two ranks of vLLM"],
)
def test_ranks_serve_a_judge(tmp_path, keys, engines):
    judge = write_model(tmp_path / "judge", POLICY, said=False, longest=LONGEST)
    served = {"model_name": str(judge), "max_num_seqs": 2, "precision": "float32"}
    served["vllm_cfg"] = {"max_model_len": LONGEST, "enforce_eager": True}
    served["vllm_kwargs"] = {"kv_cache_memory_bytes": 1 << 26}
    path = write_recipe(
        tmp_path, judge=served, env={"math": {"kind": "llm_judge", "timeout_s": 60, "kwargs": {"request": {"max_tokens": 8}}}}
    )
    recipe = config.load(str(path), ["policy.precision=float32", "cluster.judge.ranks_per_node=2", *keys])
    found = run(tmp_path / "run", recipe)
    assert found["engines"] == engines
    model, tokenizer = AutoModelForCausalLM.from_pretrained(judge), AutoTokenizer.from_pretrained(judge)
    for question, reply in zip(QUESTIONS, found["greedy"], strict=True):
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        tokens = torch.tensor([tokenizer(asked, add_special_tokens=False).input_ids])
        drawn = model.generate(tokens, do_sample=False, max_new_tokens=8)[0, tokens.shape[1] :]
        assert text_of(reply) == tokenizer.decode(drawn, skip_special_tokens=True)
        assert reply["usage"]["prompt_tokens"] == tokens.shape[1]
    sampled = [text_of(reply) for reply in found["sampled"]]
    assert [text_of(reply) for reply in found["alone"]] == sampled[:2]  # on any engine, beside any other requests
    others = map(text_of, found["another seed"])
    assert sum(one != other for one, other in zip(sampled, others, strict=True)) >= 6  # of 8; both may end at once
    assert found["sampled"][0]["choices"][0]["finish_reason"] == "length"
    refused = found["overlong"]["error"]
    assert (refused["code"], refused["limit"]) == (OVERLONG, LONGEST - 100)
    for name, status in {"overlong": 400, "stream": 400, "empty stop": 400, "picture": 400, "wrong key": 401}.items():
        assert found[name]["status"] == status, found[name]


def test_a_client_that_goes_ends_its_request():
    """Also one that goes before the engine has seen its request."""
    wakeup = threading.Event()
    server = ChatServer("127.0.0.1", "KEY", wakeup)
    url = f"http://{server.address}/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 3, "stop": ["a", "b"], "top_k": 99}
    try:
        assert httpx.post(url, json=body).status_code == 503  # no model yet
        server.serve(ServedChat(lambda messages: np.arange(4, dtype=np.int32), lambda completion: "text", 100, 50, 0))
        with httpx.Client() as client, pytest.raises(httpx.ReadTimeout):
            client.post(url, json=body, timeout=0.3)
        assert wakeup.wait(10)
        (request,), gone = server.take()
        assert request.sampling == Sampling(0.0, 1.0, 50, 3, (), ("a", "b"))
        deadline = time.monotonic() + 30
        while not gone and time.monotonic() < deadline:
            gone = server.take()[1]
        assert gone == [request.id] and not server.has_news
        empty = np.zeros(0, np.float32)
        server.reply(Completion(request.id, np.zeros(0, np.int32), empty, (), "length"))  # nobody waits for it
    finally:
        server.close()


def run(folder, recipe) -> dict:
    """Return what the judge replied in a world with one train, one generate and two judge ranks."""
    folder.mkdir()
    write_secret(folder)
    config.write(recipe, folder / "recipe.yaml")
    logs, processes = [], []
    try:
        for environment in rank_environments(components(recipe)):
            logs.append(folder / f"{environment['HETSTEP_RANK']}.log")
            environment = {**os.environ, **environment, "HETSTEP_ATTEMPT": "1", "CUDA_VISIBLE_DEVICES": ""}
            processes.append(Program(judge_rank.main, (folder,), environment, logs[-1]))
        statuses = [process.wait(120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert statuses == [0] * 4, [log.read_text()[-3000:] for log in logs]
    return json.loads((folder / "replies.json").read_text())
