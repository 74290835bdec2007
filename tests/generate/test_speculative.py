"""Speculative decoding: the same distributions in fewer steps, before and after refits. Drafts are n-grams."""

import numpy as np
import pytest

from tests.generate.in_flight import claimed_logprobs
from tests.generate.tiny import drain, refit, requests

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def engine(new_engine):
    """Yield one engine for all tests, without groups of earlier engines."""
    from vllm.distributed import destroy_model_parallel

    destroy_model_parallel()
    made = new_engine("vllm", "llama", vllm_kwargs={"speculative_config": NGRAM})
    yield made
    made.close()


@pytest.mark.parametrize("version", [pytest.param(0, marks=pytest.mark.full), 1])
def test_completions_are_the_policy_s(version, engine, checkpoint):
    policy = checkpoint("llama", version)
    refit(engine, policy.weights(), version)
    for temperature in (0.0, 1.0):
        asked = requests(6, 2, seed=9, temperature=temperature)
        done = drain(engine, asked)
        assert len(asked) == 12
        for request in asked:
            completion = done[request.id]
            expected = policy.logprobs(request.tokens, completion.tokens, temperature)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
            assert [(span.version, span.tokens) for span in completion.spans] == [(version, len(completion.tokens))]
            if temperature == 0:
                assert completion.tokens.tolist() == policy.greedy(request.tokens, 24)


def test_drafts_save_steps(engine, checkpoint):
    refit(engine, checkpoint("llama", 0).weights(), 0)
    steps, tokens = 0, 0
    for request in requests(6, 1, seed=9, temperature=0.0, max_new_tokens=40)[-3:]:
        engine.add([request])
        while engine.pending:
            tokens += sum(len(completion.tokens) for completion in engine.step())
            steps += 1
    assert steps < tokens


def test_draws_follow_the_truncated_distribution(engine, checkpoint):
    """Compare the second token of many completions that begin alike, some of which are drafted."""
    refit(engine, checkpoint("llama", 0).weights(), 0)
    asked = requests(1, 600, temperature=1.0, top_k=4, top_p=0.9, max_new_tokens=2)
    prompt = np.array([7, 8, 9, 7, 8, 9, 7, 8], dtype=np.int32)  # the draft is 9
    asked = [type(r)(r.id, prompt, r.seed, r.sampling) for r in asked]
    done = drain(engine, asked)
    first = [int(completion.tokens[0]) for completion in done.values()]
    probabilities = {int(c.tokens[0]): float(np.exp(c.logprobs[0])) for c in done.values()}
    assert sum(probabilities.values()) == pytest.approx(1, abs=1e-4) and len(probabilities) in (2, 3, 4)
    chi_square = sum((first.count(t) - 600 * p) ** 2 / (600 * p) for t, p in probabilities.items())
    assert chi_square < 16.27  # at most 3 degrees of freedom, p = 0.001; draws are fixed by their seeds


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.full), 1.0])
def test_weights_change_between_two_steps(temperature, engine, checkpoint):
    models = [checkpoint("llama", version) for version in (0, 1)]
    refit(engine, checkpoint("llama", 0).weights(), 0)
    asked = {r.id: r for r in requests(4, 2, temperature=temperature)}
    engine.add(list(asked.values()))
    done = [completion for _ in range(8) for completion in engine.step()]
    refit(engine, checkpoint("llama", 1).weights(), 1)
    while engine.pending:
        done += engine.step()
    for completion in done:
        expected = claimed_logprobs(models, asked[completion.id], completion)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    assert {0, 1} <= {span.version for completion in done for span in completion.spans}
