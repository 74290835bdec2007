"""Models whose layers keep states are recognized, from transformers' configurations and from the files of older ones."""

import pytest
from transformers import CONFIG_MAPPING

from pipeline.models.mixers import has_states

STATEFUL = (
    "lfm2",
    "zamba",
    "zamba2",
    "falcon_h1",
    "mamba",
    "mamba2",
    "falcon_mamba",
    "jamba",
    "bamba",
    "qwen3_next",
    "qwen3_5",
)
STATEFUL += ("nemotron_h", "recurrent_gemma", "minimax", "lfm2_vl", "granitemoehybrid")


@pytest.mark.parametrize("family", STATEFUL)
def test_families_with_states(family):
    config = CONFIG_MAPPING[family]()
    if family.startswith("lfm2"):
        config.get_text_config().layer_types[0] = "conv"  # the default has none
    assert has_states(config.get_text_config().to_dict())


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "qwen2_vl", "llama4"])
def test_families_without_states(family):
    assert not has_states(CONFIG_MAPPING[family]().get_text_config().to_dict())


@pytest.mark.parametrize(
    ("config", "states"),
    [
        ({"layers_block_type": ["mamba", "hybrid"]}, True),  # Zamba2
        ({"mamba_d_ssm": 6144, "attn_layer_indices": None}, True),  # Falcon-H1
        ({"state_size": 16, "layer_norm_epsilon": 1e-5}, True),  # Mamba
        ({"conv_L_cache": 3, "full_attn_idxs": [2, 5]}, True),  # LFM2
        ({"linear_num_key_heads": 16, "full_attention_interval": 4}, True),  # Qwen3-Next
        ({"mamba_d_state": 256, "layer_types": ["attention", "attention"]}, False),  # Granite 4.0 Micro
        ({"hidden_size": 64, "mamba_d_state": None}, False),
    ],
)
def test_keys_of_files(config, states):
    assert has_states(config) == states
