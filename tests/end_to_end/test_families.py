"""Whole runs of today's model families: on Megatron-Core with FSDP2's numbers, and a hybrid model killed and resumed."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Glm4MoeConfig, GptOssConfig, NemotronHConfig

from tests.end_to_end.runs import LOCAL, Fault, Run, submit
from tests.end_to_end.test_megatron import FIVE_STEPS, SHAPE, assert_equal, megatron

pytestmark = pytest.mark.long

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS = {
    "nemotron_h": NemotronHConfig(**SHAPE, **HYBRID, hybrid_override_pattern="M-*M"),
    "gemma3_text": Gemma3TextConfig(**{**SHAPE, "tie_word_embeddings": True}, **WINDOWS, query_pre_attn_scalar=32),
    "gpt_oss": GptOssConfig(**{**SHAPE, "intermediate_size": 128}, **WINDOWS, num_local_experts=4, num_experts_per_tok=2),
    "glm4_moe": Glm4MoeConfig(**SHAPE, **EXPERTS, n_routed_experts=4, first_k_dense_replace=1, attention_bias=True),
}
LAYOUTS = {
    "nemotron_h": megatron(context_parallel_size=2),
    "gemma3_text": megatron(tensor_model_parallel_size=2, sequence_parallel="true"),
    "gpt_oss": megatron(expert_model_parallel_size=2, freeze_moe_router="false"),
    "glm4_moe": megatron(expert_model_parallel_size=2, freeze_moe_router="false"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        torch.manual_seed(5)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / name)
    return folder


def of(model) -> tuple[str, ...]:
    keys = ("policy.random_init=false", f"policy.model_name={model}", "policy.tokenizer.name=recipes/tiny")
    vllm = ("policy.generation.backend=vllm", "cluster.timeouts.silence=120")  # transformers' engine has no windows and renames
    return (*keys, *vllm, *(("policy.generation.vllm_cfg.enable_prefix_caching=false",) if model.name == "nemotron_h" else ()))


def finished(folder, *keys, **options) -> Run:
    run = submit(folder, *LOCAL, *keys, **options)
    assert run.status == 0, run.output
    return run


@pytest.mark.parametrize("family", CONFIGS)
def test_megatron_equals_fsdp2(tmp_path, models, family):
    keys = (*FIVE_STEPS, *of(models / family))
    fsdp = finished(tmp_path / "fsdp", *keys)
    run = finished(tmp_path / "megatron", *keys, *LAYOUTS[family])
    assert "Megatron-Core trains" in run.output
    assert_equal(run.metrics(), fsdp.metrics())


@pytest.mark.parametrize(
    "layout",
    [
        ("policy.dtensor_cfg.enabled=true",),
        ("policy.dtensor_cfg.enabled=true", "policy.dtensor_cfg.context_parallel_size=2"),
        LAYOUTS["nemotron_h"],
    ],
    ids=["fsdp2", "fsdp2-cp2", "megatron-cp2"],
)
def test_a_killed_hybrid_run_resumes_bit_for_bit(tmp_path, models, layout):
    keys = (*of(models / "nemotron_h"), *layout)
    expected = finished(tmp_path / "whole", *keys)
    broken = submit(tmp_path / "run", *LOCAL, *keys, fault=Fault("step", victim=1, count=4))
    assert broken.status == 1, broken.output
    again = finished(tmp_path / "run", *keys)
    assert again.metrics() == expected.metrics()
