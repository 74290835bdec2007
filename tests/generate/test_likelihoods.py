"""Likelihoods of both backends: equal to the eager Hugging Face forward, and a unit's bits independent of all else."""

import inspect
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.generate.likelihood_plan import scoring_plan, split
from pipeline.types import LikelihoodRequest
from tests.generate.tiny import VOCAB, drain, load, requests

LONGEST, BLOCK = 256, 32


def unit(seed: int, contexts: int = 6) -> list[LikelihoodRequest]:
    """Return texts that share contexts around multiples of a block, some scored in full, some repeated, some of one token."""
    random = np.random.default_rng(seed)
    head = random.integers(2, VOCAB, 2 * BLOCK).astype(np.int32)
    made = []
    for context in range(contexts):
        beginning = np.concatenate([head, random.integers(2, VOCAB, random.integers(0, 3 * BLOCK)).astype(np.int32)])
        beginning = beginning[: BLOCK * (1 + context % 4)] if context % 2 else beginning
        common = random.integers(2, VOCAB, random.integers(0, BLOCK)).astype(np.int32)
        for choice in range(4):
            ending = np.concatenate([common, random.integers(2, VOCAB, 1 + 3 * choice).astype(np.int32)])
            made.append(LikelihoodRequest(f"{context}/{choice}", np.concatenate([beginning, ending]), len(beginning)))
        letters = [np.append(beginning, np.int32(letter)) for letter in (5, 6, 7)]
        made += [LikelihoodRequest(f"{context}/{text[-1]}", text, len(text) - 1) for text in letters]
    made += [LikelihoodRequest("whole", made[0].tokens, 1), LikelihoodRequest("again", made[0].tokens, made[0].first)]
    made += [LikelihoodRequest("two", head[:2], 1), LikelihoodRequest("longest", np.resize(head, LONGEST), LONGEST - 3)]
    return [made[i] for i in random.permutation(len(made))]


def bits(likelihoods):
    return [(likelihood.id, likelihood.logprobs.tobytes(), likelihood.greedy.tobytes()) for likelihood in likelihoods]


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def settings(request):
    kwargs = {"vllm_kwargs": {"block_size": BLOCK}} if request.param == "vllm" else {}
    return {"backend": request.param, "max_model_len": LONGEST, "max_num_seqs": 16} | kwargs


@pytest.fixture(scope="module")
def engine(new_engine, settings):
    return new_engine(family="llama", **settings)


def test_they_are_those_of_hugging_face(engine, checkpoint):
    asked = unit(0)
    found = engine.likelihoods(asked)
    assert [likelihood.id for likelihood in found] == [request.id for request in asked]
    greedy = 0
    for request, likelihood in zip(asked, found, strict=True):
        context, scored = request.tokens[: request.first], request.tokens[request.first :]
        expected = checkpoint("llama", 0).logprobs(context, scored, 1.0)
        np.testing.assert_allclose(likelihood.logprobs, expected, atol=1e-4)
        assert likelihood.logprobs.dtype == np.float32 and likelihood.greedy.dtype == np.bool_
        greedy += likelihood.greedy.sum()
        assert likelihood.logprobs[likelihood.greedy].min(initial=0) >= np.log(1 / VOCAB)
    drawn = checkpoint("llama", 0).greedy(asked[0].tokens, 8)
    (likely,) = engine.likelihoods([LikelihoodRequest("a", np.append(asked[0].tokens, drawn), len(asked[0].tokens))])
    assert greedy and likely.greedy.all()


def test_the_bits_of_a_unit_depend_on_nothing_else(engine, new_engine, settings, checkpoint):
    asked = unit(1)
    first = bits(engine.likelihoods(asked))
    engine.likelihoods(asked[:5])
    engine.likelihoods(unit(2))
    drain(engine, requests(3, 2))
    assert bits(engine.likelihoods(asked)) == first
    other = new_engine(family="llama", **settings)
    other.likelihoods(unit(3, contexts=9))
    assert bits(other.likelihoods(asked)) == first
    load(other, checkpoint("llama", 1).weights().items(), version=1)
    assert bits(other.likelihoods(asked)) != first


def test_vllm_computes_shared_blocks_once(engine, settings, monkeypatch):
    if settings["backend"] != "vllm":
        pytest.skip("the reference shares nothing")
    from pipeline.generate import vllm_likelihood

    computed, score = [], vllm_likelihood._LikelihoodScorer.score
    monkeypatch.setattr(
        vllm_likelihood._LikelihoodScorer,
        "score",
        lambda scorer, hidden, batch: (computed.append(len(hidden)), score(scorer, hidden, batch)),
    )
    asked = unit(5)
    engine.likelihoods(asked)
    prompts = scoring_plan(asked).prompts
    blocks = {prompt[:end].tobytes() for prompt in prompts for end in range(BLOCK, len(prompt) + 1, BLOCK)}
    last = sum(len(prompt) % BLOCK or BLOCK for prompt in prompts)
    assert sum(computed) <= BLOCK * len(blocks) + last < 0.6 * sum(len(prompt) for prompt in prompts)


def test_what_cannot_be_scored_is_refused(engine):
    text = np.arange(2, 10, dtype=np.int32)
    for first in (0, 8):
        with pytest.raises(ValueError, match=f"request a: got first={first} with 8 tokens; expected 1 to 7"):
            engine.likelihoods([LikelihoodRequest("a", text, first)])
    with pytest.raises(ValueError, match="request b: got 257 tokens; expected at most max_model_len 256"):
        engine.likelihoods([LikelihoodRequest("b", np.resize(text, LONGEST + 1), 1)])
    engine.add(requests(1, 1))
    with pytest.raises(RuntimeError, match="1 requests are pending"):
        engine.likelihoods([])
    while engine.pending:
        engine.step()
    assert engine.likelihoods([]) == []


def test_states_come_from_the_model_runner_of_gpus_too():
    """It needs Triton, so only its names and the rows that they stand for are checked here."""
    pytest.importorskip("pipeline.generate.vllm")
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

    from pipeline.generate.vllm_likelihood import _hidden_states, _States

    batch: Any = SimpleNamespace(
        req_ids=["a", "b"],
        num_computed_prefill_tokens_np=np.array([16, 0]),
        query_start_loc_np=np.array([0, 5, 8, 8]),  # longer than the batch
        num_scheduled_tokens=np.array([5, 3]),
    )
    assert vars(batch).keys() <= InputBatch.__dataclass_fields__.keys()
    worker = PromptLogprobsWorker(4, torch.device("cpu"))
    received = []
    with _hidden_states(SimpleNamespace(prompt_logprobs_worker=worker), lambda *states: received.append(states)):
        names = list(inspect.signature(PromptLogprobsWorker.compute_prompt_logprobs).parameters)
        assert names[1:4] == ["logits_fn", "hidden_states", "input_batch"]
        assert worker.compute_prompt_logprobs(None, "hidden", batch, None, None, None) == {}  # pyright: ignore[reportArgumentType]
    assert received == [("hidden", [_States("a", 16, 0, 5), _States("b", 0, 5, 3)])]
    assert "compute_prompt_logprobs" not in vars(worker)


def test_a_plan_holds_each_prefix_once():
    asked = unit(4)
    plan = scoring_plan(asked)
    prefixes = {request.tokens[:length].tobytes() for request in asked for length in range(1, len(request.tokens))}
    seen: dict[bytes, int] = {}
    for prompt, numbers in zip(plan.prompts, plan.prefixes, strict=True):
        for length, number in enumerate(numbers, 1):
            assert seen.setdefault(prompt[:length].tobytes(), int(number)) == number
    assert seen.keys() == prefixes and sorted(seen.values()) == list(range(len(prefixes)))
    assert not any(len(a) <= len(b) and (a == b[: len(a)]).all() for a, b in pairwise(plan.prompts))
    places, indices = plan.score_indices(np.arange(len(prefixes)))
    assert sorted(places) == list(range(len(plan.tokens))) and (plan.ends[places] == indices).all()
    scored = split(asked, plan.tokens.astype(np.float32), np.zeros(len(plan.tokens), np.bool_))
    for request, likelihood in zip(asked, scored, strict=True):
        assert likelihood.logprobs.tolist() == request.tokens[request.first :].tolist()
