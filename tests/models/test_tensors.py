"""Compare the tensors of a config.json with transformers' model, and with those that conversions to Megatron-Core read."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline import models
from pipeline.models import FAMILIES
from pipeline.models.hugging_face import config_of
from pipeline.models.shape import ModelShape, UnknownShape
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
GEMMA4 = {"head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True}
GLM_EXPERTS = {"n_routed_experts": 4, "moe_intermediate_size": 12}
CASES = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True, "head_dim": 16}),
    "mistral": ("mistral", {"head_dim": 12}),
    "ministral": ("ministral", {"head_dim": 12}),
    "ministral3": ("ministral3", {"head_dim": 12}),
    "gemma4": ("gemma4_text", GEMMA4),
    "gemma4_moe": ("gemma4_text", {**GEMMA4, **EXPERTS, "enable_moe_block": True, "top_k_experts": 2}),
    "gemma4_per_layer": ("gemma4_text", {**GEMMA4, "hidden_size_per_layer_input": 6, "num_kv_shared_layers": 2}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "head_dim": 16}),
    "qwen3_moe_some_dense": ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [3], "decoder_sparse_step": 2}),
    "mixtral": ("mixtral", {"num_local_experts": 3}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "n_shared_experts": 2, "num_nextn_predict_layers": 1}),
    "deepseek_v3_no_query_latent": ("deepseek_v3", {**LATENT, "q_lora_rank": None}),
    "deepseek_v3_all_dense": ("deepseek_v3", {**LATENT, "first_k_dense_replace": 9}),
    "nemotron_h": ("nemotron_h", {**HYBRID, "hybrid_override_pattern": "M*-M"}),
    "nemotron_h_moe": ("nemotron_h", {**HYBRID, "hybrid_override_pattern": "ME*E", "moe_latent_size": 10}),
    "gemma3_text": ("gemma3_text", {"head_dim": 16}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "head_dim": 16}),
    "glm4": ("glm4", {"head_dim": 12, "pad_token_id": None}),
    "glm4_no_biases": ("glm4", {"head_dim": 12, "pad_token_id": None, "attention_bias": False, "tie_word_embeddings": True}),
    "glm4_moe": ("glm4_moe", {**GLM_EXPERTS, "attention_bias": True, "use_qk_norm": True, "head_dim": 12}),
    "glm4_moe_plain": ("glm4_moe", {**GLM_EXPERTS, "first_k_dense_replace": 9, "num_nextn_predict_layers": 1}),
    "glm4_moe_lite": ("glm4_moe_lite", {**{k: v for k, v in LATENT.items() if k != "first_k_dense_replace"}, "n_group": 1}),
    "glm_moe_dsa": ("glm_moe_dsa", {**LATENT, "n_group": 1, "index_n_heads": 2, "index_head_dim": 8}),
    "minimax_m2": ("minimax_m2", {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 4}),
    "qwen3_5_text": ("qwen3_5_text", {**DELTA_NET, "head_dim": 16}),
    "qwen3_5_text_tied": ("qwen3_5_text", {**DELTA_NET, "full_attention_interval": 2, "tie_word_embeddings": True}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 20}),
}
assert {family for family, _ in CASES.values()} >= set(FAMILIES)


@pytest.fixture(params=CASES)
def described(request) -> dict:
    """Return config.json as a model's authors write it: transformers' defaults may be missing."""
    family, changes = CASES[request.param]
    return {"model_type": family, **TINY, **changes}


def test_every_parameter_is_counted_once_in_its_part(described):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**described))
    parts = [(tensor.part, tensor.numel) for tensor in tensors(described)]
    assert sum(numel for part, numel in parts if part != "buffer") == sum(p.numel() for p in model.parameters())
    tables = [module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    assert sum(numel for part, numel in parts if part == "embedding") == sum(tables)
    shape = ModelShape.of(described)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert (shape.output == 0) == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    mixtures = [n for n, module in model.named_modules() if n.endswith(".experts")]
    assert shape.sparse_layers == len(mixtures) and (shape.experts > 0) == bool(mixtures)


def test_layers_and_experts_follow_the_names(described):
    assert any(tensor.layer is not None for tensor in tensors(described))
    for tensor in tensors(described):
        names = tensor.name.split(".")
        assert tensor.layer == (int(names[names.index("layers") + 1]) if "layers" in names else None)
        numbered = "experts" in names and names[names.index("experts") + 1].isdigit()
        assert tensor.expert == (int(names[names.index("experts") + 1]) if numbered else None)
        assert (tensor.part == "routed") == ("experts" in names)


@pytest.mark.parametrize("name", [n for n, (family, _) in CASES.items() if family in FAMILIES and "gemma4_" not in n])
def test_conversions_to_megatron_core_read_every_tensor_once(name):
    family, changes = CASES[name]
    config = {"model_type": family, **TINY, **changes}
    parameters = models.family(family).parameters(config_of(config))
    experts = {tensor.name: tensor.expert for tensor in tensors(config)}
    sources = [source for parameter in parameters.values() for source in parameter.sources]
    assert sorted(set(sources)) == sorted(experts)
    for parameter in parameters.values():
        assert {experts[source] for source in parameter.sources} <= {parameter.expert, None}  # None: a tensor of all experts


PARTS = {  # of families that only FSDP2 trains: the parts that the names of their tensors have
    "gemma2": {"embedding", "attention", "mlp", "norm"},
    "phi3": {"embedding", "output", "attention", "mlp", "norm"},
    "olmo2": {"embedding", "output", "attention", "mlp", "norm"},
    "qwen2_moe": {"embedding", "output", "attention", "routed", "router", "shared", "norm"},
}


@pytest.mark.parametrize("family", PARTS)
def test_families_of_transformers_alone_are_described_too(family):
    changes = {"num_experts": 4} if "moe" in family else {}
    config = {"model_type": family, **TINY, "pad_token_id": 0, **changes}
    shape = ModelShape.of(config)
    assert {tensor.part for tensor in tensors(config)} == PARTS[family]
    assert (shape.layers, shape.heads, shape.kv_heads, shape.experts) == (4, 4, 2, 4 if changes else 0)


@pytest.mark.parametrize("family", ["gpt2", "bloom", "opt", "falcon", "jetmoe", "granitemoe", "bamba", "mpt", "gemma3n_text"])
def test_families_with_other_names_or_sizes_have_no_shape(family):
    with pytest.raises(UnknownShape, match=r"^policy.model_name: "):
        ModelShape.of({"model_type": family, "num_hidden_layers": 2})


def test_latent_attention_of_another_family_is_known():
    config = {"model_type": "deepseek_v2", **TINY, **LATENT, "moe_intermediate_size": 12, "n_routed_experts": 4}
    shape = ModelShape.of(config)
    assert shape.latent and shape.kv_width == LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]


def test_models_that_cannot_be_described_are_named():
    with pytest.raises(ValueError, match=r"policy.model_name: transformers .* has no models of type 'lama'"):
        tensors({"model_type": "lama"})
    with pytest.raises(ValueError, match=r"policy.model_name: transformers refuses this config.json of a llama model"):
        tensors({"model_type": "llama", "hidden_size": "large"})
    with pytest.raises(UnknownShape, match=r"value.model_name: the sizes of 'lfm2' models are not known"):
        kinds = ["conv", "full_attention"] * 2
        ModelShape.of({"model_type": "lfm2", **TINY, "layer_types": kinds}, "value.model_name")
