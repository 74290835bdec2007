"""Guarantees of every backend, on real engines: by default with a Qwen3 whose lm_head is tied; marked `full`, a Llama too."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.generate import build
from pipeline.types import VersionSpan
from tests.generate.tiny import EOS, MAX_MODEL_LEN, VOCAB, drain, load, policy, requests, single

FAMILIES = [pytest.param("llama", marks=pytest.mark.full), "qwen3"]


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def backend(request):
    return request.param


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def engine(new_engine, backend, family):
    return new_engine(backend, family)


@pytest.fixture
def loadable(engine, family, checkpoint):
    """Yield the engine to a test that loads other weights; restore its weights afterwards."""
    yield engine
    load(engine, checkpoint(family, 0).weights().items(), version=0)


def same(a, b):
    assert a.keys() == b.keys()
    for id in a:
        assert a[id].tokens.tolist() == b[id].tokens.tolist()
        np.testing.assert_allclose(a[id].logprobs, b[id].logprobs, atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_the_sampling_distribution(engine, family, checkpoint, temperature):
    drawn = requests(6, 4, temperature=temperature)
    done = drain(engine, drawn)
    assert len(drawn) == 24
    for request in drawn:
        completion = done[request.id]
        expected = checkpoint(family, 0).logprobs(request.tokens, completion.tokens, temperature)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        assert completion.tokens.dtype == np.int32 and completion.logprobs.dtype == np.float32


def test_greedy_equals_hugging_face(engine, family, checkpoint):
    drawn = requests(6, 1, temperature=0.0)
    done = drain(engine, drawn)
    greedy = {request.id: checkpoint(family, 0).greedy(request.tokens, 24) for request in drawn}
    assert len(drawn) == 6
    assert {id: completion.tokens.tolist() for id, completion in done.items()} == greedy


def test_draws_do_not_depend_on_other_requests(engine):
    together = requests(4, 4)
    all_at_once = drain(engine, together)
    same(all_at_once, drain(engine, together[::-1]))
    alone = {}
    for request in together[::5]:
        alone |= drain(engine, [request])
    same({id: all_at_once[id] for id in alone}, alone)


def test_draws_do_not_depend_on_the_engine(engine, new_engine, backend, family):
    other = new_engine(backend, family, max_num_seqs=3)  # a smaller batch, so that requests wait
    drawn = requests(4, 4)
    same(drain(engine, drawn), drain(engine, drawn[::2]) | drain(other, drawn[1::2]))


def test_requests_that_join_later_draw_the_same(engine):
    drawn = requests(4, 4)
    expected = drain(engine, drawn)
    done = []
    for request in drawn:
        engine.add([request])
        done += engine.step()
    while engine.pending:
        done += engine.step()
    same(expected, {completion.id: completion for completion in done})


def test_each_seed_draws_its_own(engine):
    done = drain(engine, requests(1, 16))
    assert len({tuple(completion.tokens) for completion in done.values()}) == 16


def test_stop_tokens_end_a_completion_and_are_part_of_it(engine):
    prompts = requests(6, 8, max_new_tokens=MAX_MODEL_LEN)
    done = drain(engine, prompts)
    stopped = [c for c in done.values() if c.finish == "stop"]
    assert 0 < len(stopped) < len(done)
    for completion in done.values():
        assert (completion.tokens == EOS).sum() == (completion.finish == "stop")
        assert (completion.tokens[-1] == EOS) == (completion.finish == "stop")
    # A request's own stop token, taken from the middle of a completion, ends it there.
    whole = max(done.values(), key=lambda c: len(c.tokens))
    token = int(whole.tokens[5])
    first = whole.tokens.tolist().index(token)
    source = next(request for request in prompts if request.id == whole.id)
    cut = drain(engine, [replace(source, sampling=replace(source.sampling, stop_token_ids=(token,)))])[whole.id]
    assert cut.finish == "stop" and cut.tokens.tolist() == whole.tokens[: first + 1].tolist()


def test_length_is_bounded_by_the_request_and_by_the_context(engine):
    prompt = np.arange(2, 12)
    assert drain(engine, [single(prompt, max_new_tokens=3)])["a"].tokens.shape == (3,)
    long = np.arange(MAX_MODEL_LEN - 2) % (VOCAB - 2) + 2
    done = drain(engine, [single(long, temperature=0.0, max_new_tokens=50)])["a"]
    assert len(done.tokens) == 2 and done.finish == "length"


def test_a_prompt_that_leaves_no_room_is_named(engine):
    full = single(np.full(MAX_MODEL_LEN, 5), id="too-long")
    with pytest.raises(ValueError, match="too-long"):
        engine.add([single(np.arange(2, 9)), full])
    with pytest.raises(ValueError, match="request void: the prompt is empty"):
        engine.add([single(np.zeros(0), id="void")])
    assert engine.pending == 0


def test_top_k_and_top_p_cut_the_distribution(engine, family, checkpoint):
    drawn = requests(1, 16, top_k=2, max_new_tokens=1)
    ids = torch.from_numpy(drawn[0].tokens).long()[None]
    with torch.no_grad():
        logprobs = checkpoint(family, 0).model(ids).logits[0, -1].log_softmax(-1)
    best = logprobs.topk(2)
    renormalised = dict(zip(best.indices.tolist(), best.values.log_softmax(-1).tolist(), strict=True))
    for completion in drain(engine, drawn).values():
        assert completion.logprobs[0] == pytest.approx(renormalised[int(completion.tokens[0])], abs=1e-4)
    nucleus = drain(engine, requests(1, 8, top_p=1e-6, max_new_tokens=1))
    assert {int(c.tokens[0]) for c in nucleus.values()} == {int(logprobs.argmax())}
    assert all(c.logprobs[0] == 0 for c in nucleus.values())


def test_new_weights_replace_the_old_ones_and_their_cached_prefixes(loadable, family, checkpoint):
    drawn = requests(6, 2, temperature=0.0)
    before = drain(loadable, drawn)
    assert {span.version for c in before.values() for span in c.spans} == {0}
    load(loadable, checkpoint(family, 1).weights().items(), version=1)
    after = drain(loadable, drawn)
    assert {span.version for c in after.values() for span in c.spans} == {1}
    assert any(before[id].tokens.tolist() != after[id].tokens.tolist() for id in before)
    for request in drawn:
        assert after[request.id].tokens.tolist() == checkpoint(family, 1).greedy(request.tokens, 24)
        expected = checkpoint(family, 1).logprobs(request.tokens, after[request.id].tokens, 0.0)
        np.testing.assert_allclose(after[request.id].logprobs, expected, atol=1e-4)


def missing(weights):
    weights.pop("model.layers.1.self_attn.k_proj.weight")
    return weights.items()


def unknown(weights):
    return [*weights.items(), ("model.layers.1.mlp.extra.weight", torch.zeros(3))]


def misshapen(weights):
    return [(n, t[:-1] if n == "model.layers.1.mlp.up_proj.weight" else t) for n, t in weights.items()]


def twice(weights):
    return [*weights.items(), ("model.norm.weight", weights["model.norm.weight"])]


def broken_off(weights):
    for name, tensor in weights.items():
        if "layers.1.mlp" in name:
            raise ConnectionError("layers.1.mlp did not arrive")
        yield name, tensor


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (missing, "1 tensors are missing; .*k_proj"),
        (unknown, "no tensor 'model.layers.1.mlp.extra.weight'"),
        (misshapen, r"up_proj.weight' has shape \[95, 64\]; expected \[96, 64\]"),
        (twice, "'model.norm.weight' is given twice"),
        (broken_off, "did not arrive"),
    ],
)
def test_a_failed_load_stops_the_engine_until_one_succeeds(loadable, family, checkpoint, spoil, message):
    with pytest.raises((ValueError, ConnectionError), match=message):
        load(loadable, spoil(checkpoint(family, 1).weights()), version=1)
    request = single(np.arange(2, 9), temperature=0.0)
    with pytest.raises(RuntimeError, match="commit an update first"):
        loadable.step()
    with pytest.raises(RuntimeError, match="commit an update first"):
        loadable.add([request])
    load(loadable, checkpoint(family, 1).weights().items(), version=2)
    done = drain(loadable, [request])["a"]
    assert done.spans == (VersionSpan(2, len(done.tokens)),) and done.tokens.tolist() == checkpoint(family, 1).greedy(
        request.tokens, 24
    )


def test_without_weights_requests_are_refused_and_random_state_is_kept(backend, checkpoint):
    torch.manual_seed(5)
    np.random.seed(5)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1]
    engine = build(policy(checkpoint("llama", 0).folder, backend), engine_ranks=1, rank_in_engine=0, seed=3)
    assert torch.equal(torch.get_rng_state(), torch_state) and (np.random.get_state()[1] == numpy_state).all()
    with pytest.raises(RuntimeError, match="commit an update first"):
        engine.add([single(np.arange(2, 9))])
