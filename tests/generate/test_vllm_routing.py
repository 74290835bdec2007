"""The experts that vLLM records for router replay equal those that the Hugging Face router chooses for the same tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.generate.tiny import drain, load, requests, single


@pytest.fixture(autouse=True)
def own_groups():
    from vllm.distributed import destroy_model_parallel

    destroy_model_parallel()


def chosen(checkpoint, tokens):
    """Return the experts that the reference chooses for tokens, [tokens, layers, K], sorted."""
    logits = checkpoint.model(torch.from_numpy(tokens).long()[None], output_router_logits=True).router_logits
    top = torch.stack([layer.topk(checkpoint.model.config.num_experts_per_tok).indices for layer in logits], 1)
    return top.sort(-1).values.numpy()


def inputs(request, completion):
    return np.concatenate([request.tokens, completion.tokens])[:-1]


def test_recorded_experts_are_those_of_the_reference(new_engine, checkpoint):
    """Requests of different lengths, with waiting and preempted ones, and one whose first experts are known already."""
    engine = new_engine("vllm", "qwen3_moe", router_replay=True, max_num_seqs=6, vllm_kwargs={"num_gpu_blocks_override": 7})
    source = checkpoint("qwen3_moe", 0)
    drawn = requests(12, 3)
    drawn[3] = replace(drawn[3], routed=len(drawn[3].tokens) - 1)
    done = drain(engine, drawn)
    for request in drawn:
        completion = done[request.id]
        recorded = completion.experts
        assert recorded.dtype == np.int16
        expected = chosen(source, inputs(request, completion))[request.routed :]
        np.testing.assert_array_equal(np.sort(recorded, -1), expected)
    assert not engine._routing._rows
    assert not engine._routing._watched
    engine.close()


@pytest.mark.parametrize("recompute", [False, True])
def test_experts_of_a_request_that_a_refit_interrupts(recompute, new_engine, checkpoint):
    engine, (request,) = new_engine("vllm", "qwen3_moe", router_replay=True), [single(np.arange(2, 12), max_new_tokens=12)]
    engine.add([request])
    done = []
    for _ in range(4):
        done += engine.step()
    update = engine.update()
    update.load(checkpoint("qwen3_moe", 1).weights().items())
    update.commit(1, recompute)
    while not done:
        done = engine.step()
    (completion,) = done
    old, new = (chosen(checkpoint("qwen3_moe", seed), inputs(request, completion)) for seed in (0, 1))
    computed_by_old = 0 if recompute else len(request.tokens) + completion.spans[0].tokens - 1
    recorded = np.sort(completion.experts, -1)
    assert len(completion.spans) == 2
    np.testing.assert_array_equal(recorded[:computed_by_old], old[:computed_by_old])
    if recompute:
        np.testing.assert_array_equal(recorded, new)
    engine.close()


def test_a_cut_request_has_the_experts_so_far(new_engine, checkpoint):
    engine, (request,) = new_engine("vllm", "qwen3_moe", router_replay=True), [single(np.arange(2, 12), max_new_tokens=12)]
    engine.add([request])
    for _ in range(4):
        engine.step()
    (completion,) = engine.cut([request.id])
    expected = chosen(checkpoint("qwen3_moe", 0), inputs(request, completion))
    np.testing.assert_array_equal(np.sort(completion.experts, -1), expected)
    load(engine, checkpoint("qwen3_moe", 1).weights().items(), 1)
    engine.close()
