"""Overrides of config.json in vLLM's own configuration equal those that the trainers read."""

import pytest
from vllm.config import ModelConfig

from pipeline.models.hugging_face import engine_overrides, model_config
from tests.models.test_rope import LINEAR, NEW, OLD_SCALED, ORIGINAL, YARN, write


@pytest.mark.parametrize(
    ("family", "file", "given"),
    [
        ("llama", NEW, {"rope_scaling": {**YARN, **ORIGINAL}, "max_position_embeddings": 64}),
        ("llama", OLD_SCALED, {"rope_theta": 7.0}),
        ("llama", OLD_SCALED, {"rope_scaling": None}),
        ("gemma3_text", {"rope_theta": 1e6, "rope_local_base_freq": 1e4}, {"rope_scaling": LINEAR}),
    ],
)
def test_vllm_reads_overrides_as_the_trainers_do(tmp_path, family, file, given):
    kind = {"llama": "LlamaForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}[family]
    policy = write(tmp_path, family, **file, architectures=[kind])
    policy.hf_config_overrides = given
    trained = model_config(policy)
    engine = ModelConfig(model=policy.model_name, skip_tokenizer_init=True, hf_overrides=engine_overrides(policy)).hf_config
    assert engine.rope_parameters == trained.rope_parameters
    assert engine.max_position_embeddings == trained.max_position_embeddings
