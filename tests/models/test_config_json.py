"""Compare config.json as parsed without transformers with transformers' own configuration, attribute by attribute."""

import json
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from launch.recipes.model_files import KNOWN, planning_config
from pipeline import models
from pipeline.config import MEGATRON_MODEL_TYPES, DTensorConfig, MegatronConfig, PolicyConfig
from pipeline.models import decoder
from pipeline.models.config_json import check_attention, check_megatron_attention, parse_config, unsupported
from pipeline.models.sizes import MODEL_TYPES
from tests.models.cases import configs
from tests.models.test_families import REFUSED, changed
from tests.models.test_tensors import CASES, TINY
from tests.problems import named

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 0.7}
LINEAR = {"rope_type": "linear", "factor": 8.0}
CHANGES = {
    "llama": [
        {"rope_theta": 5e5, "rope_scaling": LINEAR},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ],
    "mistral": [{"sliding_window": None}, {"sliding_window": 8}],
    "ministral": [{"sliding_window": None}, {"layer_types": ["full_attention", "sliding_attention"] * 2}],
    "qwen2": [{"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8}, {"sliding_window": 8}],
    "qwen3": [{"use_sliding_window": True, "max_window_layers": 9}, {"rope_scaling": {**YARN, "mscale": None}}],
    "qwen3_moe": [{"norm_topk_prob": True, "use_sliding_window": True}, {"mlp_only_layers": None}],
    "mixtral": [{"sliding_window": 8, "router_jitter_noise": 0.1}],
    "deepseek_v3": [{"rope_scaling": YARN, "rms_norm_eps": 1e-5}, {"num_key_value_heads": 2, "topk_group": 2}],
    "nemotron_h": [
        {"mlp_hidden_act": "silu", "n_group": 2},
        {"time_step_min": 0.5, "num_nextn_predict_layers": 1},
        {"mamba_n_groups": 4, "mamba_d_conv": 3, "mamba_chunk_size": 7, "mamba_dt_min": 0.5},
    ],
    "gemma3_text": [
        {"sliding_window": 8, "sliding_window_pattern": 2},
        {"rope_scaling": LINEAR, "rope_local_base_freq": 5.0, "rope_theta": 7.0},
    ],
    "glm4": [{"partial_rotary_factor": 0.25, "rope_theta": 5.0}, {"rms_norm_eps": 1e-6}],
    "glm4_moe": [{"n_group": 2, "routed_scaling_factor": 2.5}, {"partial_rotary_factor": 1.0, "rope_scaling": LINEAR}],
    "gpt_oss": [{"layer_types": ["full_attention"] * 4, "rope_scaling": None}, {"sliding_window": 8}],
    "qwen3_5_text": [{"full_attention_interval": 2, "rope_theta": 5.0}, {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5}],
    "qwen3_5_moe_text": [{"layer_types": ["linear_attention", "full_attention"] * 2}, {"rope_scaling": LINEAR}],
}
READ = [(name, {}) for name in CASES] + [(family, more) for family, found in CHANGES.items() for more in found]
assert CHANGES.keys() == set(MODEL_TYPES)


def check_read(config: dict, of_transformers: PreTrainedConfig) -> None:
    for name, ours in vars(parse_config(config)).items():
        theirs = getattr(of_transformers, name, None)
        if name == "head_dim" and theirs is None:  # modules then divide
            theirs = of_transformers.hidden_size // of_transformers.num_attention_heads
        if name == "max_position_embeddings" and ours is None:
            continue
        if name == "rope_parameters":  # of which transformers keeps the old names besides
            theirs = {key: value for key, value in theirs.items() if key in ours}
        if name in ("attention_bias", "attn_logit_softcapping") and not hasattr(of_transformers, name):
            theirs = ours
        assert ours == theirs, name


@pytest.mark.parametrize(("name", "more"), READ, ids=[f"{name}-{','.join(more)}" for name, more in READ])
def test_every_attribute_equals_transformers(name, more, tmp_path):
    family, changes = CASES[name]
    config = {"model_type": family, **TINY, **changes, **more}
    theirs = AutoConfig.for_model(**deepcopy(config))  # it writes into the parts
    check_read(config, theirs)
    theirs.save_pretrained(tmp_path)
    check_read(json.loads((tmp_path / "config.json").read_text()), AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize("name", sorted(str(path.relative_to(KNOWN).with_suffix("")) for path in KNOWN.glob("*/*.json")))
def test_known_models_are_read_alike(name):
    config = {key: value for key, value in planning_config(PolicyConfig(model_name=name)).items() if key != "text_config"}
    check_read(config, AutoConfig.for_model(**{k: v for k, v in config.items() if k != "quantization_config"}))


# ---- the same configurations are refused


def written(config: PreTrainedConfig, folder) -> dict:
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", configs())
def test_megatron_core_gets_the_same_from_both(name, tmp_path):
    config = configs()[name]
    ours = parse_config(written(config, tmp_path))
    assert models.family(ours.model_type).transformer(ours) == models.family(config.model_type).transformer(config)
    assert parameters(ours) == parameters(config)


def parameters(config: Any) -> dict[str, tuple]:
    """Return parameters without their functions, of which equal ones may be two objects."""
    found = models.family(config.model_type).parameters(config)
    return {name: (parameter.sources, parameter.split, parameter.expert) for name, parameter in found.items()}


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED, ids=[f"{name} {message}" for name, _, message in REFUSED])
def test_megatron_core_refuses_the_same(name, changes, message, tmp_path):
    ours = parse_config(written(changed(name, changes), tmp_path))
    with pytest.raises(ValueError, match=r"^policy.model_name: .* with") as error:
        models.family(ours.model_type).transformer(ours)
    assert message in str(error.value)


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
    for one in (parse_config(config), AutoConfig.for_model(**config)):
        if message is None:
            check_attention(one, 65)
            continue
        with pytest.raises(ValueError, match=f"^policy.model_name: {family} .*{message}"):
            check_attention(one, 65)


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
    for one in (parse_config(config), AutoConfig.for_model(**config)):
        if not refused:
            check_megatron_attention(one, longest)
            continue
        with pytest.raises(ValueError, match=f"{family} has layers with sliding_attention .window 64, sequences of up to 65"):
            check_megatron_attention(one, longest)


def problems(family: str, policy: PolicyConfig) -> set[tuple[str, str]]:
    name, changes = CASES[family]
    return named(unsupported({"model_type": name, **TINY, **changes}, policy))


MODEL = ("policy.model_name", "unsupported")


def test_a_model_unsupported_by_a_train_backend_is_a_problem():
    megatron = PolicyConfig(megatron_cfg=MegatronConfig(enabled=True), max_total_sequence_length=64)
    assert problems("llama", megatron) == problems("qwen3_moe", replace(megatron, megatron_cfg=MegatronConfig())) == set()
    assert problems("llama_biased", megatron) == {MODEL}
    assert problems("gpt_oss", megatron) == problems("gemma3_text", megatron) == problems("glm4_moe", megatron) == set()
    assert problems("gpt_oss_no_biases", megatron) == problems("gemma3_text_untied", megatron) == {MODEL}
    cut = PolicyConfig(dtensor_cfg=DTensorConfig(tensor_parallel_size=2), max_total_sequence_length=64)
    assert problems("llama_biased", cut) == set()
    assert problems("deepseek_v3", cut) == problems("mixtral", cut) == set()
    assert list(unsupported({"model_type": "bloom"}, cut)) == []


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
    assert named(unsupported(config, policy)) == ({(EXPERTS, code)} if code else set())


def test_every_megatron_family_is_read():
    assert set(MEGATRON_MODEL_TYPES) <= set(MODEL_TYPES)
