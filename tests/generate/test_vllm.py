"""Behaviour of the vLLM backend alone: tensor parallelism in a larger world, packing on reload, equality to the reference."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch.multiprocessing as mp
from safetensors.torch import load_file

from launch.executors import cuda_variables
from pipeline.config import determinism
from pipeline.generate import build
from tests.generate.engine_rank import STOP, run, texts
from tests.generate.in_flight import CASES, Seen, claimed_difference, kept_difference
from tests.generate.tiny import MAX_MODEL_LEN, drain, load, policy, refit, requests, single


@pytest.fixture(autouse=True)
def own_groups():
    """vLLM keeps its groups per process; those of an earlier test's dense model lack the groups of an MoE model."""
    from vllm.distributed import destroy_model_parallel

    destroy_model_parallel()


def tokens(done):
    return {id: completion.tokens.tolist() for id, completion in done.items()}


def load_full(engine, weights, version):
    load(engine, weights.items(), version)


def fresh_greedy(folder, drawn, **arguments):
    """Return greedy tokens of a vLLM that loads its weights from disk."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import tokens_input

    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=32,
        **{"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 32 << 20} | arguments,
    )
    llm.llm_engine.engine_core._finalizer.detach()
    params = SamplingParams(
        temperature=0, max_tokens=drawn[0].sampling.max_new_tokens, stop_token_ids=[1], ignore_eos=True, detokenize=False
    )
    outputs = llm.generate([tokens_input(r.tokens.tolist()) for r in drawn], params, use_tqdm=False)
    return {r.id: list(out.outputs[0].token_ids) for r, out in zip(drawn, outputs, strict=True)}


@pytest.mark.parametrize("family", ["qwen3", *(pytest.param(each, marks=pytest.mark.full) for each in ("llama", "qwen3_moe"))])
def test_updated_equals_fresh_from_disk_and_the_reference(family, new_engine, checkpoint):
    drawn = requests(8, 1, temperature=0.0)
    engine = new_engine("vllm", family)
    expected = {seed: fresh_greedy(checkpoint(family, seed).folder, drawn) for seed in (0, 1)}
    assert expected[0] != expected[1]
    assert tokens(drain(engine, drawn)) == expected[0]
    for version, (seed, update) in enumerate([(1, load_full), (0, refit), (1, refit), (0, load_full)], 1):
        update(engine, checkpoint(family, seed).weights(), version)
        assert tokens(drain(engine, drawn)) == expected[seed]
    engine.close()
    gc.collect()
    if family == "qwen3":
        reference = new_engine("transformers", family)
        refit(reference, checkpoint(family, 1).weights(), version=1)
        assert tokens(drain(reference, drawn)) == expected[1]


def test_seeded_prompts_that_exceed_one_step_s_token_budget(new_engine):
    """vLLM would split the prompt at the budget's edge, and cannot rewind its generator on CPU."""
    engine = new_engine("vllm", "llama", max_num_seqs=128)
    random = np.random.default_rng(0)
    drawn = [single(random.integers(2, 96, 61), id=str(k), max_new_tokens=2) for k in range(128)]  # 7808 tokens
    done = drain(engine, drawn)
    engine.close()
    assert len(done) == 128
    assert all(1 <= len(completion.tokens) <= 2 for completion in done.values())


def test_a_cached_prefix_does_not_outlive_its_weights(new_engine, checkpoint):
    engine = new_engine("vllm", "llama", max_model_len=192)
    # The prompt is longer than one block of vLLM's cache on CPU (128 tokens); only whole blocks are shared.
    request = single(np.random.default_rng(0).integers(2, 96, 150), temperature=0.0)
    for version in (0, 1):
        load(engine, checkpoint("llama", version).weights().items(), version)
        expected = checkpoint("llama", version).greedy(request.tokens, 24)
        for _ in range(2):  # the second reuses the first's prefix
            done = drain(engine, [request])["a"]
            assert done.tokens.tolist() == expected
            logprobs = checkpoint("llama", version).logprobs(request.tokens, done.tokens, 0.0)
            np.testing.assert_allclose(done.logprobs, logprobs, atol=1e-4)


long = pytest.mark.long


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        pytest.param("qwen3", {}, marks=long),
        pytest.param("qwen3_moe", {}, marks=long),
        pytest.param("qwen3_moe", {"expert_parallel_size": 2}, marks=long),
        pytest.param("qwen3", {"pipeline_parallel_size": 2}, marks=long),
    ],
)
def test_two_ranks_in_a_larger_world_equal_one(family, settings, tmp_path, new_engine, checkpoint):
    old, new = (checkpoint(family, seed) for seed in (0, 1))
    replies = run(tmp_path, old, new, settings)
    assert all(replies[0][what] == replies[1][what] for what in ("results", "cut", "scored", "in_flight"))
    # Engines on one node are distinguished by the process id of their first rank.
    assert [reply["shared_memory"] for reply in replies] == [str(replies[0]["pid"])] * 2
    whole = sum(tensor.numel() for tensor in old.weights().values())
    assert all(reply["received"] < 0.65 * whole for reply in replies)

    engine = new_engine("vllm", family)
    expected = [tokens(drain(engine, requests(4, 2, temperature=0.0)))]
    load(engine, new.weights().items(), 1)
    expected += [tokens(drain(engine, requests(4, 2, temperature=temperature))) for temperature in (0.0, 1.0)]
    expected.append(tokens(drain(engine, requests(4, 2, temperature=1.0, stop=STOP))))
    engine.close()
    assert expected[3] != expected[2] and all(expected[2][id][: len(kept)] == kept for id, kept in expected[3].items())
    assert replies[0]["results"] == expected

    for text, (logprobs, _) in zip(texts(), replies[0]["scored"], strict=True):
        expected_logprobs = new.logprobs(text.tokens[: text.first], text.tokens[text.first :], 1.0)
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-4)

    models, case = [old, new], CASES["vllm"]
    anew, kept = (Seen.unpacked(packed, case) for packed in replies[0]["in_flight"])
    assert claimed_difference(models, anew).max() < 1e-4 and kept_difference(models, kept).max() < 1e-4
    assert {0, 1, 2} == {span.version for completion in kept.done.values() for span in completion.spans}
    for place, request in enumerate(requests(4, 2)):
        finish, drawn = replies[0]["cut"][request.id]
        whole = expected[2][request.id]
        if place % 2:
            assert drawn == whole
        else:
            assert (finish == "length" and drawn == whole[: len(drawn)] and 1 <= len(drawn) <= 5) or drawn == whole


GPU = {"dtype": "bfloat16", "enforce_eager": False, "gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": None}


@pytest.mark.gpu
@pytest.mark.parametrize("update", [load_full, refit])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_cuda_graphs_see_new_weights(family, update, new_engine, checkpoint):
    drawn = requests(6, 1, temperature=0.0)
    expected = fresh_greedy(checkpoint(family, 1).folder, drawn, **GPU)
    gc.collect()
    engine = new_engine("vllm", family, precision="bfloat16", enforce_eager=False, gpu_memory_utilization=0.2)
    drain(engine, drawn)
    update(engine, checkpoint(family, 1).weights(), version=1)
    assert tokens(drain(engine, drawn)) == expected
    engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("update", [load_full, refit])
def test_online_quantization_is_repeated(update, new_engine, checkpoint):
    drawn = requests(6, 1, temperature=0.0)
    expected = fresh_greedy(checkpoint("llama", 1).folder, drawn, quantization="fp8", **GPU)
    gc.collect()
    engine = new_engine(
        "vllm",
        "llama",
        precision="bfloat16",
        vllm_kwargs={"quantization": "fp8"},
        enforce_eager=False,
        gpu_memory_utilization=0.2,
    )
    drain(engine, drawn)
    update(engine, checkpoint("llama", 1).weights(), version=1)
    assert tokens(drain(engine, drawn)) == expected
    engine.close()


@pytest.mark.gpu
def test_answers_of_a_deterministic_engine_do_not_depend_on_the_batch(checkpoint, monkeypatch):
    """In a process of its own, since vLLM reads the variable when it is imported."""
    for name, value in (determinism.SHARED | determinism.OF_ENGINES).items():
        monkeypatch.setenv(name, value)
    folder = checkpoint("llama", 0).folder
    mp.start_processes(_alone_and_together, (folder,), nprocs=1, start_method="spawn")


def _alone_and_together(_: int, folder: Path) -> None:
    settings = {"precision": "bfloat16", "enforce_eager": False, "gpu_memory_utilization": 0.2}
    engine = build(policy(folder, "vllm", **settings), engine_ranks=1, rank_in_engine=0, seed=0)
    load(engine, load_file(folder / "model.safetensors").items(), version=0)
    drawn = requests(8, 4)
    together = drain(engine, drawn)
    for request in drawn[::5]:
        alone = drain(engine, [request])[request.id]
        np.testing.assert_array_equal(alone.tokens, together[request.id].tokens)
        np.testing.assert_array_equal(alone.logprobs, together[request.id].logprobs)
    engine.close()


@pytest.mark.gpu
def test_float32_is_not_rounded_to_tf32(checkpoint, monkeypatch, new_engine):
    """Otherwise the log-probs of tiny recipes would be 1e-3 from the train ranks'."""
    for name, value in cuda_variables.EXACT_FLOAT32.items():
        monkeypatch.setenv(name, value)  # Triton reads it when it compiles a kernel
    engine = new_engine("vllm", "llama", gpu_memory_utilization=0.2, max_model_len=192)
    for request in [*requests(4, 1), single(np.random.default_rng(0).integers(2, 96, 150))]:
        done = drain(engine, [request])[request.id]
        expected = checkpoint("llama", 0).logprobs(request.tokens, done.tokens, 1.0)
        np.testing.assert_allclose(done.logprobs, expected, atol=1e-4)
    engine.close()
