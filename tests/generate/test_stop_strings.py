"""Stop strings on real engines, against the completions without them."""

import random
from dataclasses import replace

import numpy as np
import pytest
from transformers import AutoTokenizer

from pipeline.data.stop_strings import first_stop
from pipeline.generate import build
from pipeline.types import VersionSpan
from tests.data.made_tokenizers import byte_level
from tests.generate.tiny import drain, load, policy, refit, requests, save

SPECULATIVE = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}}


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Two models whose tokens are bytes of text, so that random tokens have broken characters."""
    made = [save(tmp_path_factory.mktemp(f"bytes-{seed}"), "llama", seed) for seed in (0, 1)]
    for model in made:
        byte_level().save_pretrained(model.folder)
    return made


def engine_of(models, backend, **settings):
    engine = build(policy(models[0].folder, backend, **settings), engine_ranks=1, rank_in_engine=0, seed=0)
    load(engine, models[0].weights().items(), version=0)
    return engine


def with_stops(asked, whole, tokenizer, seed=0):
    """Return the requests with stop strings out of the texts of their completions without them, and what to expect.

    The expectation is (number of tokens kept, finish, stop string).
    """
    drawn, stopping, expected = random.Random(seed), [], {}
    for request in asked:
        tokens, finish = whole[request.id].tokens.tolist(), whole[request.id].finish
        text = tokenizer.decode(tokens)
        begins = [drawn.randrange(len(text)) for _ in range(3)]
        stop = [part for begin in begins if "\ufffd" not in (part := text[begin : begin + drawn.randint(1, 6)])]
        stopping.append(replace(request, sampling=replace(request.sampling, stop=("never there", *stop))))
        expected[request.id] = (len(tokens), finish, "")
        for length in range(1, len(tokens) + 1):
            if found := first_stop(tokenizer.decode(tokens[:length]), stop):
                expected[request.id] = (length, "stop", found[1])
                break
    return stopping, expected


def check(done, whole, expected):
    for id, (length, finish, stop) in expected.items():
        completion = done[id]
        assert (len(completion.tokens), completion.finish, completion.stop) == (length, finish, stop), id
        assert completion.tokens.tolist() == whole[id].tokens[:length].tolist()
        np.testing.assert_allclose(completion.logprobs, whole[id].logprobs[:length], atol=1e-4)
        assert sum(span.tokens for span in completion.spans) == length
    assert sum(bool(stop) for _, _, stop in expected.values()) > len(expected) / 2


@pytest.mark.parametrize(
    "backend, settings",
    [
        ("transformers", {"max_num_seqs": 7}),
        ("vllm", {"max_num_seqs": 7}),
        pytest.param("vllm", {"vllm_kwargs": SPECULATIVE}, marks=pytest.mark.full),
        pytest.param("vllm", {"vllm_kwargs": {"async_scheduling": True}}, marks=pytest.mark.full),
    ],
    ids=["transformers", "vllm", "drafted", "ahead"],
)
def test_completions_are_those_without_stop_strings_up_to_the_string(backend, settings, models):
    engine, tokenizer = engine_of(models, backend, **settings), AutoTokenizer.from_pretrained(models[0].folder)
    engine._eos = ()
    for temperature in (1.0, 0.0):
        asked = requests(6, 4, temperature=temperature, max_new_tokens=24)
        whole = drain(engine, asked)
        stopping, expected = with_stops(asked, whole, tokenizer)
        check(drain(engine, stopping), whole, expected)
    # the token that completes a string is the last that the request may draw
    last = []
    for request in stopping:
        length, _, stop = expected[request.id]
        last += [replace(request, sampling=replace(request.sampling, max_new_tokens=length))] * bool(stop)
    assert {completion.finish for completion in drain(engine, last).values()} == {"stop"}
    engine.close()


@pytest.mark.parametrize("backend", ["transformers", "vllm"])
def test_stop_strings_across_new_weights_cuts_and_progress(backend, models):
    engine, tokenizer = engine_of(models, backend, max_num_seqs=4), AutoTokenizer.from_pretrained(models[0].folder)
    engine._eos = ()

    def run(asked):
        """Return completions; weights change after three steps, and the last request is cut after nine."""
        engine.add(asked)
        done = [completion for _ in range(3) for completion in engine.step()]
        refit(engine, models[1].weights(), 1)
        done += [completion for _ in range(6) for completion in engine.step()]
        if asked[3].id in engine.progress():
            done += engine.cut([asked[3].id])
        while engine.pending:
            assert all(sum(span.tokens for span in spans) < 24 for spans in engine.progress().values())
            done += engine.step()
        load(engine, models[0].weights().items(), version=0)
        return {completion.id: completion for completion in done}

    asked = requests(4, 1)
    whole = run(asked)
    assert len(whole[asked[3].id].tokens) == 9
    stopping, expected = with_stops(asked, whole, tokenizer, seed=3)
    done = run(stopping)
    check(done, whole, expected)
    kept = max(expected[request.id][0] for request in asked[:3])
    assert kept > 3 and any(c.spans == (VersionSpan(0, 3), VersionSpan(1, len(c.tokens) - 3)) for c in done.values())
    engine.close()
