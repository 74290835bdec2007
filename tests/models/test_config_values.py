"""Values of published config.json files that look wrong and are right."""

import pytest

from pipeline.models import config_values, rope

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
}
YARN = {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
PUBLISHED = {
    "granite-4.0-micro": {"model_type": "granitemoehybrid", "num_local_experts": 0, "num_experts_per_tok": 0},
    "DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "rope_scaling": {**YARN, "factor": 40, "type": "yarn"},
    },
    "Phi-3": {"model_type": "phi3", "rope_scaling": {"type": "su", "long_factor": [1.0], "short_factor": [1.0]}},
    "Qwen2.5-VL": {
        "model_type": "qwen2",
        "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [16, 24, 24]},
    },
    "gpt-oss": {"model_type": "gpt_oss", "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False}},
    "gemma-3": {
        "model_type": "gemma3_text",
        "attn_logit_softcapping": None,
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
    },
    "gemma-3n": {"model_type": "gemma3n_text", "intermediate_size": [16384, 16384]},
    "Hunyuan": {"model_type": "hunyuan_v1_moe", "moe_intermediate_size": [3072, 3072]},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_right(name):
    config = {**SIZES, **PUBLISHED[name]}
    assert list(config_values.problems("k", config)) == [] and all(map(str, rope.decide(config)))


@pytest.mark.parametrize("value", [["llama"], {"llama": 1}, 3])
def test_a_family_that_is_no_text_is_refused(value):
    problems = list(config_values.problems("k", {**SIZES, "model_type": value}))
    assert [(one.key, one.code) for one in problems] == [("k", "wrong-type")] and "expected a string" in str(problems[0])
