"""Engines that quantize received weights: vLLM quantizes again at every refit.

On CPU vLLM has the kernels of fp8_per_channel; the blockwise ones of a recipe's `precision: fp8` need a GPU.
"""

import gc

import pytest
import torch

from tests.generate.test_vllm import GPU, fresh_greedy, load_full, own_groups, tokens  # noqa: F401
from tests.generate.tiny import drain, policy, refit, requests
from tests.problems import refused

QUANTISATION = {"quantization": "fp8_per_channel", "quantization_config": {"ignore": ["*o_proj*"]}}


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.long)])
def test_refits_equal_a_fresh_engine(family, new_engine, checkpoint):
    engine = new_engine("vllm", family, precision="bfloat16", vllm_kwargs=QUANTISATION)
    drawn = requests(6, 1, temperature=0.0, max_new_tokens=8)  # each matrix product takes 8 ms on a CPU
    expected = [fresh_greedy(checkpoint(family, seed).folder, drawn, dtype="bfloat16", **QUANTISATION) for seed in (0, 1)]
    assert expected[0] != expected[1]
    kinds = {name.rpartition(".")[2]: module.weight.dtype for name, module in engine._model.named_modules() if "_proj" in name}
    fp8, plain = torch.float8_e4m3fn, torch.bfloat16
    assert kinds == {"qkv_proj": fp8, "o_proj": plain, "gate_up_proj": fp8, "down_proj": fp8}
    assert tokens(drain(engine, drawn)) == expected[0]
    for version, (seed, update) in enumerate([(1, refit), (0, load_full), (1, load_full), (0, refit)], 1):
        update(engine, checkpoint(family, seed).weights(), version)
        assert tokens(drain(engine, drawn)) == expected[seed]
    engine.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_blockwise_fp8_needs_a_gpu(new_engine):
    with refused(("policy.generation.vllm_cfg.precision", "needs-gpu")):
        new_engine("vllm", "llama", vllm_cfg_precision="fp8", precision="bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("update", [load_full, refit])
@pytest.mark.parametrize("family", ["llama_blocks", "qwen3_moe_blocks"])
def test_precision_fp8(family, update, new_engine, checkpoint):
    drawn = requests(6, 1, temperature=0.0)
    expected = fresh_greedy(checkpoint(family, 1).folder, drawn, quantization="fp8_per_block", **GPU)
    gc.collect()
    engine = new_engine(
        "vllm",
        family,
        precision="bfloat16",
        vllm_cfg_precision="fp8",
        enforce_eager=False,
        gpu_memory_utilization=0.2,
    )
    assert any(parameter.dtype == torch.float8_e4m3fn for parameter in engine._model.parameters())
    drain(engine, drawn)
    update(engine, checkpoint(family, 1).weights(), version=1)
    assert tokens(drain(engine, drawn)) == expected
    engine.close()


def test_the_recipe_s_keys_reach_vllm(checkpoint, monkeypatch):
    from pipeline.generate import vllm

    settings = policy(checkpoint("llama", 0).folder, "vllm", precision="bfloat16", vllm_cfg_precision="fp8")
    settings.generation.vllm_cfg.quantization_ignored_layer_kws = ["a_proj", "b_proj"]
    monkeypatch.setattr(vllm.current_platform, "is_cpu", lambda: False)
    made = vllm._arguments(settings, None, engine_ranks=1, seed=0, adapters=None)
    assert made["quantization"] == "fp8_per_block" and made["dtype"] == "bfloat16"
    assert made["quantization_config"] == {"ignore": ["*a_proj*", "*b_proj*"]}
