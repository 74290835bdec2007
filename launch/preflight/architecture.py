"""What can be said against a recipe from its models' config.json, for the train backend that was chosen.

The policy, and with it a critic, a teacher or a reward model: all are cut as the policy is, so the same keys must fit them all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.model_files import described, inside, model_folder
from launch.model_shape import ModelShape
from launch.preflight import libraries
from pipeline import config
from pipeline.config import (
    MEGATRON_MODEL_TYPES,
    PolicyConfig,
    Recipe,
    VLLMConfig,
    check_expert_layout,
    collected,
    expert_tensor_parallel_size,
    generates,
    uses_megatron,
)
from pipeline.models.reading import refusals
from pipeline.models.sizes import MODEL_TYPES

MEGATRON = "policy.megatron_cfg"
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
KNOWN_TO_POSITIONS = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")  # by vLLM's rule
MLA_ROPE_TYPES = ("default", "yarn")
PLAIN = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}  # what pipeline/models describes, where a key is given


def problems(recipe: Recipe, pending: list[Path] = ()) -> Iterator[str]:
    """What is wrong with the models. One that is yet to come out of one of the run folders `pending` is checked in the job."""
    for section, policy in config.models(recipe).items():
        found: list[str] = []
        if not inside(policy.model_name, pending):
            with collected(found):
                folder = model_folder(f"{section}.model_name", policy.model_name)
                found += libraries.unknown_overrides(section, policy, folder)
                described(policy, pending, f"{section}.model_name")  # which refuses overrides of another type
        yield from found
        if not found:  # else the rest would judge by what is wrong
            yield from _against_layout(recipe, section, policy, pending)


def against_layout(recipe: Recipe, pending: list[Path] = ()) -> Iterator[str]:
    """The same of models that need not be here, if they are described in recipes/models."""
    for section, policy in config.models(recipe).items():
        yield from _against_layout(recipe, section, policy, pending)


def _against_layout(recipe: Recipe, section: str, policy: PolicyConfig, pending: list[Path]) -> Iterator[str]:
    key, model, found = f"{section}.model_name", None, []
    with collected(found):
        model = described(policy, pending, key)
    if model is not None:
        found += _of_model(recipe, section, policy, model)
    if model is not None and not found:  # what the backends say in the job, where it is not one of these
        with collected(found):
            if model.get("model_type") in MODEL_TYPES:
                ModelShape.of(model, key)  # which says what config.json lacks
            found += [problem.replace("policy.model_name", key) for problem in refusals(model, policy)]
    yield from found


def _of_model(recipe: Recipe, section: str, policy: PolicyConfig, model: dict[str, Any]) -> Iterator[str]:
    key = f"{section}.model_name"
    if section == f"env.{config.reward_environment(recipe)}":
        yield from _check_classifier(key, policy.model_name, model)
    if uses_megatron(policy):
        yield from _check_megatron(key, policy, model)
    yield from _check_attention(section, policy, model)
    if section == "policy" and generates(recipe) and model.get("num_attention_heads"):
        yield from _check_engine(policy.generation.vllm_cfg, model)
        yield from _check_sampled_length(recipe, model)


def _check_classifier(key: str, name: str, model: dict[str, Any]) -> Iterator[str]:
    """That it is a reward model: `score.weight` of another model would be drawn at random."""
    wanted = "a reward model is a sequence classifier with one label, as algorithm rm leaves it in a run's hf/"
    kinds = model.get("architectures") or []
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        yield f"{key}: {name} is a {', '.join(kinds) or 'model of an unknown kind'}; {wanted}"
        return
    labels = model.get("num_labels") or len(model.get("id2label") or (0, 1))  # two, if nothing is said
    if labels != 1:
        yield f"{key}: {name} has {labels} labels; {wanted}"


def _check_attention(section: str, policy: PolicyConfig, model: dict[str, Any]) -> Iterator[str]:
    whose = "the model's" if section == "policy" else f"{section}.model_name's"
    heads = model.get("num_attention_heads")
    if heads:
        if uses_megatron(policy):
            train_key, train_size = f"{MEGATRON}.tensor_model_parallel_size", policy.megatron_cfg.tensor_model_parallel_size
        else:
            train_key, train_size = "policy.dtensor_cfg.tensor_parallel_size", policy.dtensor_cfg.tensor_parallel_size
        yield from _check_heads(train_key, train_size, whose, heads, model.get("num_key_value_heads") or heads, False)
    limit = _longest(model)
    if limit and policy.max_total_sequence_length > limit:
        yield (
            f"policy.max_total_sequence_length: {policy.max_total_sequence_length} is beyond {whose}"
            f" max_position_embeddings; at most {limit}"
        )


def _longest(model: dict[str, Any]) -> int:
    """Tokens that the model's positions reach; YaRN's reach beyond what it was trained with. 0: not said."""
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    stretched = 0
    if "yarn" in (rope.get("rope_type"), rope.get("type")):
        stretched = int(rope.get("factor", 1) * rope.get("original_max_position_embeddings", 0))
    return max(model.get("max_position_embeddings") or 0, stretched)


def _check_sampled_length(recipe: Recipe, model: dict[str, Any]) -> Iterator[str]:
    """As vLLM has it (vllm/config/model.py, _get_and_verify_max_len): of YaRN's factor it takes max_position_embeddings to know
    already, others stretch that."""
    generation = recipe.policy.generation
    environment = {**os.environ, **recipe.cluster.generate.env_vars, **generation.vllm_cfg.env_vars}
    allowed = environment.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "").strip().lower() in ("1", "true")
    if generation.backend != "vllm" or allowed or recipe.policy.max_total_sequence_length > _longest(model):
        return  # of the last, which sampled sequences follow, _check_attention tells
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    stretch = 1 if (rope.get("rope_type") or rope.get("type")) in KNOWN_TO_POSITIONS else rope.get("factor") or 1
    limit = int(stretch * (model.get("model_max_length") or model.get("max_position_embeddings") or 0))
    if limit and generation.vllm_cfg.max_model_len > limit:
        yield (
            f"policy.generation.vllm_cfg.max_model_len: {generation.vllm_cfg.max_model_len} is beyond what vLLM takes the"
            f" model's positions to reach; at most {limit}, or policy.hf_config_overrides.max_position_embeddings"
        )


def _check_engine(vllm: VLLMConfig, model: dict[str, Any]) -> Iterator[str]:
    key, heads = "policy.generation.vllm_cfg", model["num_attention_heads"]
    kv_heads = model.get("num_key_value_heads") or heads
    yield from _check_heads(f"{key}.tensor_parallel_size", vllm.tensor_parallel_size, "the model's", heads, kv_heads, True)
    experts = model.get("num_experts") or model.get("num_local_experts") or model.get("n_routed_experts")
    if vllm.expert_parallel_size > 1 and not experts:
        yield f"{key}.expert_parallel_size: {vllm.expert_parallel_size}, but the model has no experts; 1"
    elif vllm.expert_parallel_size > 1 and experts % vllm.expert_parallel_size:
        yield (f"{key}.expert_parallel_size: {vllm.expert_parallel_size} does not divide the model's {experts} experts")
    if vllm.pipeline_parallel_size > (layers := model.get("num_hidden_layers", vllm.pipeline_parallel_size)):
        yield (f"{key}.pipeline_parallel_size: {vllm.pipeline_parallel_size} stages, but the model has {layers} layers")


def _check_heads(key: str, size: int, whose: str, heads: int, kv_heads: int, replicates: bool) -> Iterator[str]:
    """`replicates`: several ranks may keep the same key-value head, as in vLLM; the train backends do not do that."""

    def fits(k: int) -> bool:
        return heads % k == 0 and (kv_heads % k == 0 or (replicates and k % kv_heads == 0))

    if not fits(size):
        allowed = ", ".join(str(k) for k in range(1, heads + 1) if fits(k))
        yield (
            f"{key}: {size} does not divide {whose} {heads} attention heads and {kv_heads} key-value heads;"
            f" one of {allowed} would"
        )


# ---- Megatron-Core ------------------------------------------------------------------------------------------------------


def _check_megatron(key: str, policy: PolicyConfig, model: dict[str, Any]) -> Iterator[str]:
    family = model.get("model_type")
    if family not in MEGATRON_MODEL_TYPES:
        yield (
            f"{MEGATRON}.enabled, {key}: this backend has no '{family}' models, only {', '.join(MEGATRON_MODEL_TYPES)};"
            " policy.dtensor_cfg.enabled=true trains others"
        )
        return
    if model.get("quantization_config"):
        yield (
            f"{key}: the checkpoint is quantized ({model['quantization_config'].get('quant_method')}), which the"
            " Megatron backend does not read; give one in bfloat16 or float32"
        )
    for name, only in PLAIN.items():
        if model.get(name, only) != only:
            yield (
                f"{key}: the Megatron backend has no {family} models with {name}={model[name]}, only with {only};"
                " policy.dtensor_cfg.enabled=true trains others"
            )
    found: list[str] = []
    with collected(found):
        shape = ModelShape.of(model, key)
    if found:
        yield from found
        return
    yield from _check_positions(key, policy, model, family)
    yield from _check_stages(policy, shape)
    yield from _check_widths(policy, shape)
    yield from _check_experts(policy, shape, family)


def _check_positions(key: str, policy: PolicyConfig, model: dict[str, Any], family: str) -> Iterator[str]:
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    known = MLA_ROPE_TYPES if family == "deepseek_v3" else ROPE_TYPES
    if kind not in known:
        yield (
            f"{key}: the model's rope_type '{kind}' is not one of those that the Megatron backend has for"
            f" {family}: {', '.join(known)}; policy.dtensor_cfg.enabled=true may do"
        )
    # Of these families Mixtral slides whenever it has a window, the others only where use_sliding_window says so.
    window = model.get("sliding_window") if model.get("use_sliding_window", family == "mixtral") else None
    kinds = model.get("layer_types")
    slides = "sliding_attention" in kinds if kinds else model.get("max_window_layers", 0) < model["num_hidden_layers"]
    if window and window < policy.max_total_sequence_length and slides:
        yield (
            f"policy.max_total_sequence_length: {policy.max_total_sequence_length} is beyond the model's sliding window of"
            f" {window}, which the Megatron backend does not have; at most {window}, or policy.dtensor_cfg.enabled=true"
        )


def _check_stages(policy: PolicyConfig, shape: ModelShape) -> Iterator[str]:
    """As TransformerConfig and get_num_layers_to_build have it: stages hold equally many layers, but for the first and last."""
    m = policy.megatron_cfg
    first, last = m.num_layers_in_first_pipeline_stage, m.num_layers_in_last_pipeline_stage
    stages = m.pipeline_model_parallel_size - (first is not None) - (last is not None)
    layers = shape.layers - (first or 0) - (last or 0)
    if (layers > 0 and layers % stages == 0) if stages else layers == 0:
        return
    if first is None and last is None:
        yield (
            f"{MEGATRON}.pipeline_model_parallel_size: {stages} does not divide the model's {shape.layers} layers; another"
            " size, or num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
        )
        return
    yield (
        f"{MEGATRON}.num_layers_in_first_pipeline_stage {first}, num_layers_in_last_pipeline_stage {last}: of the model's"
        f" {shape.layers} layers that leaves {layers} for the {stages} other stages; each must get the same number, at least 1"
    )


def _check_widths(policy: PolicyConfig, shape: ModelShape) -> Iterator[str]:
    size = policy.megatron_cfg.tensor_model_parallel_size
    for name, width in (("MLP", shape.dense_width), ("shared experts", shape.shared_width)):
        if width % size:
            yield (
                f"{MEGATRON}.tensor_model_parallel_size: {size} does not divide the intermediate size {width} of the model's"
                f" {name}"
            )


def _check_experts(policy: PolicyConfig, shape: ModelShape, family: str) -> Iterator[str]:
    m = policy.megatron_cfg
    if m.moe_router_bias_update_rate and family != "deepseek_v3":
        yield f"{MEGATRON}.moe_router_bias_update_rate: {family} models have no such bias; it must be 0"
    if not shape.experts:
        for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
            if (getattr(m, name) or 1) > 1:
                yield f"{MEGATRON}.{name}: {getattr(m, name)}, but the model has no experts; it must be 1"
        return
    yield from check_expert_layout(policy)
    if shape.experts % m.expert_model_parallel_size:
        yield (
            f"{MEGATRON}.expert_model_parallel_size: {m.expert_model_parallel_size} does not divide the model's"
            f" {shape.experts} experts"
        )
    if shape.expert_width % expert_tensor_parallel_size(m):
        yield (
            f"{MEGATRON}.expert_tensor_parallel_size: {expert_tensor_parallel_size(m)} does not divide the intermediate size"
            f" {shape.expert_width} of the model's experts"
        )
