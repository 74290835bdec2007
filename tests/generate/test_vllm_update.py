"""New weights shard by shard and in the middle of requests, on real engines of one rank."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.types import Span
from tests.generate.tiny import drain, refit, requests, single, write


@pytest.fixture(autouse=True)
def own_groups():
    """vLLM keeps its groups per process; those of an earlier test's dense model lack what an MoE model asks for."""
    from vllm.distributed import destroy_model_parallel

    destroy_model_parallel()


def test_the_layout_covers_the_checkpoint_once(new_engine, checkpoint):
    engine = new_engine("vllm", "qwen3_moe")
    covered = {}
    for unit in engine.layout():
        for region in unit.regions:
            covered.setdefault(region.name, torch.zeros(engine.shapes[region.name], dtype=torch.int8))
            covered[region.name][tuple(slice(o, o + s) for o, s in zip(region.box.offset, region.box.size, strict=True))] += 1
    assert covered.keys() == checkpoint("qwen3_moe", 0).weights().keys()
    assert all((count == 1).all() for count in covered.values())
    tensors = [(unit.name, region.tensor) for unit in engine.layout() for region in unit.regions]
    assert len({unit for unit, _ in tensors}) == len(engine.layout())
    assert len({tensor for _, tensor in tensors}) == len(set(tensors))
    update = engine.update()
    in_place = {unit.name for unit in engine.layout() if update.in_place(unit.name)}
    assert "model.embed_tokens" in in_place and "model.layers.0.input_layernorm" in in_place
    assert "model.layers.0.self_attn.qkv_proj" not in in_place  # on CPU vLLM packs it
    engine.close()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_an_update_given_up_is_mended_by_the_next(family, new_engine, checkpoint):
    engine, drawn = new_engine("vllm", family), requests(4, 1, temperature=0.0)
    live = storage(engine)
    new, units = checkpoint(family, 1).weights(), engine.layout()
    half = len(units) // 2

    update = engine.update()
    write(update, units[:half], new)
    update.target(units[half].name, units[half].regions[0].tensor)  # open, and never finished
    with pytest.raises(RuntimeError, match="are not finished, one is"):
        update.commit(1)
    with pytest.raises(RuntimeError, match="was finished in this update"):
        update.target(units[0].name, units[0].regions[0].tensor)
    with pytest.raises(RuntimeError, match="an update must be committed first"):
        engine.add(drawn)

    update = engine.update()  # its own failure: processing raises
    packed = next(unit for unit in units if not update.in_place(unit.name))
    layer = dict(engine._model.named_modules())[packed.name]
    update.target(packed.name, packed.regions[0].tensor)
    method, layer.quant_method = layer.quant_method, replace_processing(layer.quant_method)
    with pytest.raises(MemoryError, match="while packing"):
        update.finish(packed.name)
    layer.quant_method = method
    assert storage(engine) == live

    refit(engine, new, version=2)
    assert storage(engine) == live
    for id, completion in drain(engine, drawn).items():
        request = next(r for r in drawn if r.id == id)
        assert completion.tokens.tolist() == checkpoint(family, 1).greedy(request.tokens, 24)
        assert completion.spans == (Span(2, len(completion.tokens)),)
    engine.close()


def storage(engine):
    """Where the model's parameters lie."""
    return {name: parameter.data_ptr() for name, parameter in engine._model.named_parameters()}


def replace_processing(method):
    def fail(layer):
        raise MemoryError("while packing")

    class Failing(type(method)):
        process_weights_after_loading = staticmethod(fail)

    failing = object.__new__(Failing)
    failing.__dict__ = method.__dict__
    return failing


def expected_logprobs(models, request, completion, recompute, temperature):
    """By Hugging Face: each span's tokens by its weights, which also made the keys and values of the tokens before it, or, if
    those are kept, of what they were fed themselves."""
    tokens = torch.from_numpy(np.concatenate([request.tokens, completion.tokens])).long()[None]
    past, fed, end, parts = None, 0, len(request.tokens) - 1, []
    for span in completion.spans:
        end += span.tokens
        if recompute:
            past, fed = None, 0
        with torch.no_grad():
            out = models[span.version](tokens[:, fed:end], past_key_values=past, use_cache=True)
        parts.append(out.logits[0, -span.tokens :] / (temperature or 1.0))
        past, fed = out.past_key_values, end
    logprobs = torch.cat(parts).log_softmax(-1)
    return logprobs.gather(-1, torch.from_numpy(completion.tokens).long()[:, None])[:, 0].numpy()


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_change_between_two_steps_of_running_requests(recompute, temperature, new_engine, checkpoint):
    engine = new_engine("vllm", "llama")
    models = {version: checkpoint("llama", version % 2).model for version in (0, 1, 2)}
    drawn = requests(4, 2, temperature=temperature, max_new_tokens=12)
    engine.add(drawn)
    done = [completion for _ in range(4) for completion in engine.step()]
    refit(engine, checkpoint("llama", 1).weights(), 1, recompute)
    late = [replace(request, id=f"late-{request.id}") for request in drawn]
    engine.add(late)
    done += [completion for _ in range(3) for completion in engine.step()]
    refit(engine, checkpoint("llama", 0).weights(), 2, recompute)
    while engine.pending:
        done += engine.step()
    asked = {request.id: request for request in drawn + late}
    assert {completion.id for completion in done} == asked.keys()
    for completion in done:
        expected = expected_logprobs(models, asked[completion.id], completion, recompute, temperature)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    assert {(0, 1, 2), (1, 2)} <= {tuple(span.version for span in completion.spans) for completion in done}
    engine.close()


def test_kept_keys_and_values_are_found_by_no_other_request(new_engine, checkpoint):
    """A prompt longer than one block of vLLM's cache (128 tokens on CPU): running, waiting, and asked after the change."""
    engine = new_engine("vllm", "llama", max_model_len=192, max_num_seqs=1)
    prompt = np.random.default_rng(0).integers(2, 96, 150)
    names = ("running", "waiting", "late", "later")
    asked = {name: single(prompt, id=name, temperature=0.0, max_new_tokens=6) for name in names}
    engine.add([asked["running"], asked["waiting"]])
    done = engine.step()
    refit(engine, checkpoint("llama", 1).weights(), 1, recompute_kv_cache=False)
    engine.add([asked["late"], asked["later"]])
    while engine.pending:
        done += engine.step()
    for completion in done:
        models = {version: checkpoint("llama", version).model for version in (0, 1)}
        expected = expected_logprobs(models, asked[completion.id], completion, False, 0.0)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    versions = {completion.id: [span.version for span in completion.spans] for completion in done}
    assert versions == {"running": [0, 1], "waiting": [1], "late": [1], "later": [1]}
    engine.close()
