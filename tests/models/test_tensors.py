"""Compare the tensors described from config.json alone with transformers' model and its checkpoint, name by name."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline import models
from pipeline.config import MEGATRON_MODEL_TYPES
from pipeline.models.hugging_face import checkpoint_shapes
from pipeline.models.sizes import MODEL_TYPES
from pipeline.models.tensors import tensors

TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
}
HYBRID = {
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "ssm_state_size": 5,
    "n_groups": 2,
    "n_routed_experts": 4,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 20,
}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 5,
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 12}
GLM_EXPERTS = {"n_routed_experts": 4, "moe_intermediate_size": 12}
CASES = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True, "head_dim": 16}),
    "llama_biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_all_heads": ("llama", {"num_key_value_heads": None}),
    "llama_value_heads": ("llama", {"num_key_value_heads": 1}),
    "mistral": ("mistral", {"head_dim": 12}),
    "ministral": ("ministral", {"head_dim": 12}),
    "mistral_plain": ("mistral", {"head_dim": None}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"attention_bias": True}),
    "qwen3_tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "head_dim": 16}),
    "qwen3_moe_some_dense": ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [3], "decoder_sparse_step": 2}),
    "qwen3_moe_all_dense": ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [0, 1, 2, 3], "attention_bias": True}),
    "mixtral": ("mixtral", {"num_local_experts": 3}),
    "mixtral_heads": ("mixtral", {"num_local_experts": 3, "head_dim": 12}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "n_shared_experts": 2, "num_nextn_predict_layers": 1}),
    "deepseek_v3_no_query_latent": ("deepseek_v3", {**LATENT, "q_lora_rank": None}),
    "deepseek_v3_biased": ("deepseek_v3", {**LATENT, "attention_bias": True}),
    "deepseek_v3_all_dense": ("deepseek_v3", {**LATENT, "first_k_dense_replace": 9}),
    "nemotron_h": ("nemotron_h", {**HYBRID, "hybrid_override_pattern": "M*-M"}),
    "nemotron_h_moe": ("nemotron_h", {**HYBRID, "hybrid_override_pattern": "ME*E", "moe_latent_size": 10}),
    "gemma3_text": ("gemma3_text", {"head_dim": 16}),
    "gemma3_text_untied": ("gemma3_text", {"head_dim": 16, "tie_word_embeddings": False, "attention_bias": True}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "head_dim": 16}),
    "glm4": ("glm4", {"head_dim": 12, "pad_token_id": None}),
    "glm4_no_biases": ("glm4", {"head_dim": 12, "pad_token_id": None, "attention_bias": False, "tie_word_embeddings": True}),
    "glm4_moe": ("glm4_moe", {**GLM_EXPERTS, "attention_bias": True, "use_qk_norm": True, "head_dim": 12}),
    "glm4_moe_plain": ("glm4_moe", {**GLM_EXPERTS, "first_k_dense_replace": 9, "num_nextn_predict_layers": 1}),
    "qwen3_5_text": ("qwen3_5_text", {**DELTA_NET, "head_dim": 16}),
    "qwen3_5_text_tied": ("qwen3_5_text", {**DELTA_NET, "full_attention_interval": 2, "tie_word_embeddings": True}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 20}),
    "gpt_oss_no_biases": ("gpt_oss", {"num_local_experts": 4, "attention_bias": False, "tie_word_embeddings": True}),
}
assert {family for family, _ in CASES.values()} == set(MODEL_TYPES)


@pytest.fixture(params=CASES)
def described(request) -> dict:
    """Return config.json as a model's authors write it: transformers' defaults may be missing."""
    family, changes = CASES[request.param]
    return {"model_type": family, **TINY, **changes}


def of_transformers(config: dict):
    return AutoConfig.for_model(**config)


def test_names_and_shapes_equal_the_checkpoint(described):
    shapes, _ = checkpoint_shapes(of_transformers(described))
    found = tensors(described)
    assert len({tensor.name for tensor in found}) == len(found)
    assert {tensor.name: tensor.shape for tensor in found} == shapes


def test_the_count_equals_the_model(described):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(of_transformers(described))
    assert sum(t.numel for t in tensors(described) if t.part != "buffer") == sum(p.numel() for p in model.parameters())
    assert sum(t.numel for t in tensors(described) if t.part == "embedding") == model.get_input_embeddings().weight.numel()


def test_transformers_form_of_the_config_gives_the_same_tensors(described, tmp_path):
    """Check other names of the same keys, and all defaults."""
    of_transformers(described).save_pretrained(tmp_path)
    assert tensors(json.loads((tmp_path / "config.json").read_text())) == tensors(described)


def test_layers_and_experts_follow_the_names(described):
    assert any(tensor.layer is not None for tensor in tensors(described))
    for tensor in tensors(described):
        names = tensor.name.split(".")
        assert tensor.layer == (int(names[names.index("layers") + 1]) if "layers" in names else None)
        numbered = "experts" in names and names[names.index("experts") + 1].isdigit()
        assert tensor.expert == (int(names[names.index("experts") + 1]) if numbered else None)
        assert (tensor.part == "routed") == ("experts" in names)


@pytest.mark.parametrize(
    "name", [name for name, (family, _) in CASES.items() if family in MEGATRON_MODEL_TYPES and name != "gpt_oss_no_biases"]
)
def test_cuts_equal_the_families(name):
    """A fused parameter is split as its tensors are. Megatron-Core's own projections to a latent are split, ours are not."""
    family, changes = CASES[name]
    config = of_transformers({"model_type": family, **TINY, **changes})
    cuts = {tensor.name: tensor.split for tensor in tensors({"model_type": family, **TINY, **changes})}
    experts = {tensor.name: tensor.expert for tensor in tensors({"model_type": family, **TINY, **changes})}
    rows = {tensor.name: tensor.shape[0] for tensor in tensors({"model_type": family, **TINY, **changes})}
    parameters = models.family(config.model_type).parameters(config)
    assert parameters
    for parameter in parameters.values():
        if isinstance(parameter.split, tuple) and len(parameter.sources) > 1:  # its parts are those of its tensors, one by one
            parts = [(rows[name],) if cuts[name] == "rows" else cuts[name] for name in parameter.sources]
            assert parameter.split == tuple(count for part in parts for count in part)
            continue
        for source in parameter.sources:
            down = source.endswith(("q_a_proj.weight", "kv_a_proj_with_mqa.weight"))
            one = len(parameter.sources) == 1
            split = "none" if down else "rows" if parameter.split == "halves" and not one else parameter.split
            assert cuts[source] == split, source
            assert experts[source] in (parameter.expert, None)  # None: a tensor of all experts


def test_an_unsupported_family_is_named():
    with pytest.raises(ValueError, match="'bloom' models are not known; expected one of llama, mistral"):
        tensors({"model_type": "bloom"})


def test_a_missing_key_is_named():
    with pytest.raises(KeyError, match="hidden_size"):
        tensors({"model_type": "llama", "num_hidden_layers": 1})
