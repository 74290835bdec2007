"""Weights that change under running requests, on real engines; engine_rank does it over two ranks."""

import gc

import numpy as np
import pytest
import torch

from pipeline.types import VersionSpan
from tests.generate.in_flight import CASES, Seen, claimed_difference, drive, kept_difference, kept_logprobs, small
from tests.generate.tiny import refit, requests, single

DEFAULT = ("transformers", "vllm, all of these")


@pytest.fixture(autouse=True)
def own_groups():
    """vLLM keeps its groups per process; those of an earlier test's dense model lack the groups of an MoE model."""
    from vllm.distributed import destroy_model_parallel

    destroy_model_parallel()


@pytest.mark.parametrize("name", [case if case in DEFAULT else pytest.param(case, marks=pytest.mark.long) for case in CASES])
def test_log_probs_are_of_the_version_that_a_span_names(name, new_engine, checkpoint):
    case, models = CASES[name], [checkpoint("llama", seed) for seed in (0, 1)]
    weights = [model.weights() for model in models]
    engine = new_engine(case.backend, "llama", **case.settings)
    anew = drive(engine, case, weights, recompute=True)
    assert claimed_difference(models, anew).max() < 1e-4
    kept = drive(engine, case, weights, recompute=False)
    assert kept_difference(models, kept).max() < 1e-4
    assert claimed_difference(models, kept).max() > 0.1  # some of its keys and values are old
    engine.close()
    gc.collect()

    for seen in (anew, kept):
        spans = {tuple(span.version for span in completion.spans) for completion in seen.done.values()}
        assert {0, 1, 2} == {version for found in spans for version in found} and any(len(found) > 1 for found in spans)
        assert all(sum(span.tokens for span in c.spans) == len(c.tokens) for c in seen.done.values())
    if name.endswith(("cached prefixes", "all of these")):
        assert kept.cached
    if name.endswith(("in pieces", "all of these")):
        assert kept.partial
    if name.endswith(("preemption", "all of these")):
        assert kept.preempted


def test_newer_requests_do_not_reuse_kept_keys_and_values(new_engine, checkpoint):
    """One prompt longer than a block, in a running request, a waiting one, and two that start after the change."""
    models = [checkpoint("llama", seed) for seed in (0, 1)]
    engine = new_engine("vllm", "llama", **small() | {"max_num_seqs": 1})
    prompt = np.random.default_rng(0).integers(2, 96, 70)
    names = ("running", "waiting", "late", "later")
    seen = Seen({name: single(prompt, id=name, temperature=0.0, max_new_tokens=6) for name in names})
    engine.add([seen.asked["running"], seen.asked["waiting"]])
    seen.step(engine)
    seen.change(engine, 0)
    refit(engine, models[1].weights(), 1, recompute_kv_cache=False)
    engine.add([seen.asked["late"], seen.asked["later"]])
    while engine.pending:
        seen.step(engine)
    engine.close()
    for id, completion in seen.done.items():
        expected = kept_logprobs(models, seen.asked[id], completion, seen.fed.get(id, []))
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    versions = {id: [span.version for span in completion.spans] for id, completion in seen.done.items()}
    assert versions == {"running": [0, 1], "waiting": [1], "late": [1], "later": [1]}
    assert seen.cached == {"late", "later"}  # they reuse the blocks of `waiting`


def test_a_prompt_computed_by_older_weights_is_not_copied(new_engine, checkpoint):
    engine = new_engine("transformers", "llama")
    prompt = np.arange(2, 22)
    engine.add([single(prompt, id="running", temperature=0.0)])
    engine.step()
    refit(engine, checkpoint("llama", 1).weights(), 1, recompute_kv_cache=False)
    read = engine.prefilled_tokens
    engine.add([single(prompt, id=id, temperature=0.0) for id in ("late", "later")])
    done = []
    while engine.pending:
        done += engine.step()
    assert engine.prefilled_tokens == read + 19
    found = {completion.id: completion for completion in done}
    for id in ("late", "later"):
        assert found[id].tokens.tolist() == checkpoint("llama", 1).greedy(prompt, 24)
    assert found["running"].spans == (VersionSpan(0, 1), VersionSpan(1, len(found["running"].tokens) - 1))


@pytest.mark.parametrize("order", [1, -1])
def test_reloading_the_same_weights_changes_nothing_in_any_order_of_lengths(order, new_engine, checkpoint):
    """No request starts or ends at the change, which must leave all rows in place."""
    engine, asked = new_engine("transformers", "llama"), requests(3, 1)[::order]
    engine._eos = ()
    engine.add(asked)
    for _ in range(5):
        assert engine.step() == []
    refit(engine, checkpoint("llama", 0).weights(), 1)
    done = []
    while engine.pending:
        done += engine.step()
    for request, completion in zip(asked, sorted(done, key=lambda c: int(c.id.split("/")[0]) * order), strict=True):
        expected = checkpoint("llama", 0).logprobs(request.tokens, completion.tokens, 1.0)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    engine.close()


@pytest.mark.parametrize("backend", ["transformers", "vllm"])
def test_progress_and_cuts_across_a_change(backend, new_engine, checkpoint):
    engine = new_engine(backend, "llama", max_num_seqs=4)
    asked = requests(3, 2, max_new_tokens=20)
    names = [request.id for request in asked]
    engine._eos = ()
    engine.add(asked)
    for _ in range(3):
        assert engine.step() == []
    update = engine.update()
    assert engine.progress() == {id: (VersionSpan(0, 3),) if id in names[:4] else () for id in names}
    with pytest.raises(RuntimeError, match="commit an update first"):
        engine.cut(names)
    update.load(checkpoint("llama", 1).weights().items())
    update.commit(1)
    for _ in range(2):
        assert engine.step() == []
    spans = (VersionSpan(0, 3), VersionSpan(1, 2))
    assert engine.progress() == {id: spans if id in names[:4] else () for id in names}
    with pytest.raises(ValueError, match="request 7/0: the engine has no such request"):
        engine.cut([names[0], "7/0"])
    assert engine.pending == 6
    cut = engine.cut([names[5], names[2], names[0]])
    assert [(c.id, c.finish, c.spans) for c in cut] == [
        (names[5], "length", ()),
        *((names[i], "length", spans) for i in (2, 0)),
    ]
    assert [(len(c.tokens), len(c.logprobs)) for c in cut] == [(0, 0), (5, 5), (5, 5)]
    assert all(c.tokens.dtype == np.int32 and c.logprobs.dtype == np.float32 for c in cut)
    assert engine.progress().keys() == {names[i] for i in (1, 3, 4)} and engine.pending == 3
    with pytest.raises(ValueError, match=f"request {names[0]}"):
        engine.cut([names[0]])
    rest = []
    while engine.pending:
        rest += engine.step()
    assert {(c.id, c.spans) for c in rest} == {(names[i], (VersionSpan(0, 3), VersionSpan(1, 17))) for i in (1, 3)} | {
        (names[4], (VersionSpan(1, 20),))
    }
    engine.close()


@pytest.mark.parametrize("backend", ["transformers", "vllm"])
def test_an_engine_sleeps_and_wakes_in_parts(backend, new_engine, checkpoint):
    engine, asked = new_engine(backend, "llama"), single(np.arange(2, 12), temperature=0.0)

    def drawn():
        engine.add([asked])
        done = []
        while engine.pending:
            done += engine.step()
        return done[0].tokens.tolist()

    engine.add([asked])
    with pytest.raises(RuntimeError, match="sleep: 1 requests are pending"):
        engine.sleep()
    engine.cut([asked.id])
    update = engine.update()
    with pytest.raises(RuntimeError, match="sleep: an update is in progress"):
        engine.sleep()
    update.load(checkpoint("llama", 1).weights().items())
    update.commit(1)
    with pytest.raises(RuntimeError, match="wake 'weights': nothing sleeps"):
        engine.wake("weights")

    engine.sleep()
    for refused in (engine.step, engine.update, engine.sleep, lambda: engine.add([asked]), lambda: engine.wake("cache")):
        with pytest.raises(RuntimeError, match=r"sleep|next to wake"):
            refused()
    engine.wake("weights")
    refit(engine, checkpoint("llama", 0).weights(), 2)
    with pytest.raises(RuntimeError, match="wake its cache first"):
        engine.add([asked])
    engine.wake("cache")
    assert drawn() == checkpoint("llama", 0).greedy(asked.tokens, 24)

    if backend == "vllm":
        check_saved(engine)
    engine.sleep(keep_weights=True)
    engine.wake("weights")
    engine.wake("cache")
    assert drawn() == checkpoint("llama", 0).greedy(asked.tokens, 24)
    engine.sleep()
    engine.wake("weights")
    engine.wake("cache")
    with pytest.raises(RuntimeError, match="commit an update first"):
        engine.add([asked])
    engine.close()


def check_saved(engine):
    """State saved besides weights contains no keys and values, whose memory is free when it is restored."""
    from pipeline.generate.vllm_sleep import unregistered_tensors

    held = [module.kv_cache for module in engine._model.modules() if hasattr(module, "kv_cache")]
    caches = {cache.untyped_storage().data_ptr() for cache in held}
    assert caches
    assert not caches & {tensor.untyped_storage().data_ptr() for tensor in unregistered_tensors(engine._model)}


def test_a_sleeping_transformers_engine_holds_no_weights(new_engine):
    engine = new_engine("transformers", "qwen3")
    tensors = [*engine._model.parameters()]

    def held():
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    awake = held()
    assert awake == sum(tensor.nbytes for tensor in tensors) > 0
    engine.sleep()
    assert held() == 0
    engine.wake("weights")
    assert held() == awake and all(ours is theirs for ours, theirs in zip(tensors, engine._model.parameters(), strict=True))


def test_state_that_vllm_does_not_save_is_found(tmp_path):
    """ALiBi slopes, which attention keeps as a plain tensor in the weights' memory."""
    from tests.generate.families import rank_model, save_config

    save_config("bloom", tmp_path)
    with rank_model(tmp_path, 0) as model:
        from pipeline.generate.vllm_sleep import unregistered_tensors

        slopes = [tensor for tensor in unregistered_tensors(model) if tensor.shape == (4,)]
        assert [tensor.tolist() for tensor in slopes] == [[2**-2, 2**-4, 2**-6, 2**-8]] * 2
        owned = {tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
        assert not owned & {tensor.data_ptr() for tensor in unregistered_tensors(model)}


@pytest.mark.gpu
@pytest.mark.parametrize("keep_weights", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_a_sleeping_vllm_engine_frees_its_memory(family, keep_weights, new_engine, checkpoint):
    from tests.generate.test_vllm import tokens
    from tests.generate.tiny import drain

    engine = new_engine("vllm", family, precision="bfloat16", enforce_eager=False, gpu_memory_utilization=0.2, colocated=True)
    drawn = requests(6, 1, temperature=0.0)
    expected = tokens(drain(engine, drawn))
    places = {name: tensor.data_ptr() for name, tensor in engine._model.named_parameters()}
    awake = torch.cuda.mem_get_info()[0]
    engine.sleep(keep_weights)
    assert torch.cuda.mem_get_info()[0] - awake > 0.1 * torch.cuda.mem_get_info()[1]
    ours = torch.full((1 << 28,), float("nan"), device="cuda")  # as a trainer would, in the memory that the engine freed
    del ours
    torch.cuda.empty_cache()
    engine.wake("weights")
    if not keep_weights:
        refit(engine, checkpoint(family, 0).weights(), 1)
    engine.wake("cache")
    assert {name: tensor.data_ptr() for name, tensor in engine._model.named_parameters()} == places
    assert tokens(drain(engine, drawn)) == expected
    engine.close()
