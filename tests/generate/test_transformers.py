"""Behaviour of the transformers backend alone: shared prefills, finished rows, growing caches."""

import numpy as np

from pipeline.generate import build
from tests.generate.tiny import MAX_MODEL_LEN, drain, policy, requests, single
from tests.problems import refused


def test_equal_prompts_are_prefilled_once(new_engine):
    engine = new_engine("transformers", "llama")
    drawn = requests(3, 8)
    drain(engine, drawn)
    assert engine.prefilled_tokens == sum(len(drawn[8 * group].tokens) - 1 for group in range(3))


def test_a_prompt_that_is_still_running_is_not_prefilled_again(new_engine):
    engine = new_engine("transformers", "llama")
    prompt = np.arange(2, 22)
    expected = drain(engine, [single(prompt, id="b", temperature=0.0)])["b"]
    assert engine.prefilled_tokens == 19
    engine.add([single(prompt, id="a", temperature=0.0, max_new_tokens=8)])
    engine.step()
    engine.add([single(prompt, id="b", temperature=0.0)])
    done = []
    while engine.pending:
        done += engine.step()
    assert engine.prefilled_tokens == 38
    assert next(c for c in done if c.id == "b").tokens.tolist() == expected.tokens.tolist()


def test_finished_rows_are_replaced_at_once(new_engine):
    engine = new_engine("transformers", "llama", max_num_seqs=2)
    lengths = {"long": 30, "a": 2, "b": 3, "c": 4}
    prompt = np.arange(2, 9)
    engine._eos = ()
    engine.add([single(prompt, id=id, max_new_tokens=length) for id, length in lengths.items()])
    steps, ended = 0, {}
    while engine.pending:
        steps += 1
        ended |= {completion.id: steps for completion in engine.step()}
    assert ended == {"a": 2, "b": 5, "c": 9, "long": 30}


def test_a_prompt_of_one_token_and_a_cache_that_grows(new_engine, checkpoint):
    engine = new_engine("transformers", "qwen3")
    for prompt in (np.array([7]), np.arange(2, 60)):
        room = MAX_MODEL_LEN - len(prompt)
        done = drain(engine, [single(prompt, temperature=0.0, max_new_tokens=room)])["a"]
        assert done.tokens.tolist() == checkpoint("qwen3", 0).greedy(prompt, room)


def test_unsupported_models_are_refused(checkpoint):
    with refused(("policy.generation.backend", "unsupported")):
        build(policy(checkpoint("qwen3_moe", 0).folder, "transformers"), 1, 0, 0)
    with refused(("policy.generation.backend", "unsupported")):
        build(policy(checkpoint("llama", 0).folder, "transformers"), 2, 0, 0)
