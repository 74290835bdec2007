"""Models whose attention or experts a train backend does not support are refused, before submission and in the job."""

from dataclasses import replace
from typing import Any

import pytest

from launch.preflight import architecture
from pipeline.config import DTensorConfig, GenerationConfig, MegatronConfig, PolicyConfig, VLLMConfig
from pipeline.models import decoder
from pipeline.models.backend_support import check_attention, check_megatron_attention
from pipeline.models.hugging_face import config_of
from tests.models.test_tensors import CASES, TINY
from tests.problems import named


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma3_text", {"sliding_window": 64, "attn_logit_softcapping": 50.0}, None),
        ("mistral", {"sliding_window": 64}, None),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type dynamic"),
        ("qwen2", {"layer_types": ["indexed_attention"] * TINY["num_hidden_layers"]}, "layers with indexed_attention"),
        ("gpt_oss", {"num_local_experts": 4}, None),
    ],
)
def test_attention_that_cannot_be_packed_is_refused(family, changes, message):
    config = {"model_type": family, **TINY, **changes}
    if message is None:
        check_attention(config_of(config))
        return
    with pytest.raises(ValueError, match=f"^policy.model_name: {family} .*{message}"):
        check_attention(config_of(config))


@pytest.mark.parametrize(
    ("family", "changes", "longest", "refused"),
    [
        ("qwen2", {"sliding_window": 64}, 65, False),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, 65, True),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, 64, False),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 4}, 65, False),
        ("mixtral", {"sliding_window": 64, "num_local_experts": 4}, 65, True),
    ],
)
def test_windows_that_a_family_does_not_describe_are_refused_with_megatron(monkeypatch, family, changes, longest, refused):
    monkeypatch.setattr(decoder, "windows", lambda _: {})  # as in a family without them
    config = {"model_type": family, **TINY, **changes}
    if not refused:
        check_megatron_attention(config_of(config), longest)
        return
    with pytest.raises(ValueError, match=f"{family} has layers with sliding_attention .window 64, sequences of up to 65"):
        check_megatron_attention(config_of(config), longest)


def test_scaled_queries_limit_the_length():
    """Neither Megatron-Core's model nor vLLM's scales queries beyond the positions of a model's pretraining; FSDP2's does."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    plain, scaled = (
        {"model_type": "ministral3", **TINY, "rope_parameters": {**rope, "llama_4_scaling_beta": b}} for b in (0, 0.1)
    )
    generation = GenerationConfig(backend="vllm")
    for config, longest, exact in ((plain, 64, True), (scaled, 16, True), (scaled, 17, False)):
        policy = PolicyConfig(max_total_sequence_length=longest, generation=generation)
        problems = named(architecture._check_query_scale(policy, config))
        assert problems == (set() if exact else {("policy.max_total_sequence_length", "too-large")})
        if exact:
            check_megatron_attention(config_of(config), longest)
        else:
            with pytest.raises(ValueError, match="ministral3 scales queries beyond position 16"):
                check_megatron_attention(config_of(config), longest)


def test_layers_that_differ_limit_the_engine():
    key, heads = "policy.generation.vllm_cfg", {"num_attention_heads": 12, "num_key_value_heads": 6}
    of_full_attention = {**heads, "num_global_key_value_heads": 3, "attention_k_eq_v": True}
    exported = {**heads, "per_layer_config": {"1": {"head_dim": 512, "num_key_value_heads": 3}}}

    def of(vllm: VLLMConfig, config: dict[str, Any]) -> set[tuple[str, str]]:
        return named(architecture._check_engine(key, vllm, "the model's", config))

    for config in (of_full_attention, exported):
        assert of(VLLMConfig(tensor_parallel_size=3), config) == set()
        assert of(VLLMConfig(tensor_parallel_size=2), config) == {(f"{key}.tensor_parallel_size", "not-divisible")}
    shared, staged = {**heads, "num_kv_shared_layers": 2}, VLLMConfig(pipeline_parallel_size=2)
    assert of(staged, shared) == {(f"{key}.pipeline_parallel_size", "unsupported")} and of(staged, heads) == set()


def refused(config: dict[str, Any], policy: PolicyConfig) -> set[tuple[str, str]]:
    return named(architecture._check_support(policy, config, described=True))


def problems(family: str, policy: PolicyConfig, **more: bool) -> set[tuple[str, str]]:
    name, changes = CASES[family]
    return refused({"model_type": name, **TINY, **changes, **more}, policy)


MODEL = ("policy.model_name", "unsupported")


def test_a_model_unsupported_by_a_train_backend_is_a_problem():
    megatron = PolicyConfig(megatron_cfg=MegatronConfig(enabled=True), max_total_sequence_length=64)
    assert problems("llama", megatron) == problems("qwen3_moe", replace(megatron, megatron_cfg=MegatronConfig())) == set()
    assert problems("llama", megatron, attention_bias=True) == {MODEL}
    assert problems("gpt_oss", megatron) == problems("gemma3_text", megatron) == problems("glm4_moe", megatron) == set()
    assert problems("gpt_oss", megatron, attention_bias=False) == problems("gemma4_moe", megatron) == {MODEL}
    assert problems("gemma3_text", megatron, attention_bias=True) == {MODEL}
    cut = PolicyConfig(dtensor_cfg=DTensorConfig(tensor_parallel_size=2), max_total_sequence_length=64)
    assert problems("llama", cut, attention_bias=True) == set()
    sequence = replace(cut, dtensor_cfg=replace(cut.dtensor_cfg, sequence_parallel=True))
    assert problems("deepseek_v3", sequence) == {("policy.dtensor_cfg.sequence_parallel", "unsupported")}
    assert problems("glm4_moe_lite", sequence) == problems("glm_moe_dsa", sequence, index_topk=64) == set()
    assert problems("glm_moe_dsa", cut, index_topk=63) == {MODEL}
    longer = replace(cut, max_total_sequence_length=2049)  # than transformers' default of index_topk
    assert refused({"model_type": "glm_moe_dsa", **TINY}, longer) == {MODEL}
    assert problems("deepseek_v3", cut) == problems("mixtral", cut) == set()
    assert refused({"model_type": "bloom"}, cut) == set()


EXPERTS = "policy.dtensor_cfg.expert_parallel_size"


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"model_type": "bloom"}, "too-large"),
        ({"model_type": "bloom", "num_experts": 6}, "not-divisible"),
        ({"model_type": "bloom", "n_routed_experts": 8}, None),
    ],
)
def test_experts_that_expert_parallel_ranks_cannot_share_are_a_problem(config, code):
    policy = PolicyConfig(dtensor_cfg=DTensorConfig(expert_parallel_size=4))
    assert refused(config, policy) == ({(EXPERTS, code)} if code else set())


@pytest.mark.parametrize("enabled", [False, True])
def test_a_dense_model_has_no_load_to_balance(enabled):
    policy = PolicyConfig(moe_aux_loss_coeff=0.001, megatron_cfg=MegatronConfig(enabled=enabled), max_total_sequence_length=64)
    assert (
        problems("llama", policy) == {("policy.moe_aux_loss_coeff", "has-no-effect")} and problems("mixtral", policy) == set()
    )
