"""Check a recipe against its models' config.json, for the chosen train backend.

The checks cover the policy and, if the recipe has them, critic, teacher and reward model. All are sharded like the policy, so
the same keys must fit them all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from launch.preflight import libraries
from launch.recipes.model_files import is_inside, model_folder, planning_config
from pipeline import config, models
from pipeline.algorithms import build
from pipeline.config import (
    ComponentConfig,
    LoRAConfig,
    PolicyConfig,
    Problem,
    Recipe,
    RecipeError,
    VLLMConfig,
    check_expert_layout,
    collected,
    determinism,
    expert_tensor_parallel_size,
    generates,
    problems_of,
    uses_megatron,
)
from pipeline.models import config_values, frozen_names, rope
from pipeline.models.backend_support import (
    check_attention,
    check_fsdp,
    check_indexer,
    check_megatron_attention,
    check_routing,
    expert_count,
)
from pipeline.models.mixers import has_states
from pipeline.models.quantized import FORMATS, format_name
from pipeline.models.shape import ModelShape
from pipeline.models.tensors import can_describe, tensors
from pipeline.train.adapters import modules
from pipeline.train.adapters.adapted_layers import family_not_served
from pipeline.train.adapters.modules import not_served_modules
from pipeline.train.adapters.spec import refits_adapters

MEGATRON = "policy.megatron_cfg"
SCALED_ROPE_TYPES = (
    "su",
    "longrope",
    "llama3",
    "yarn",
    "deepseek_yarn",
    "deepseek_llama_scaling",
)  # max_position_embeddings includes their factor in vLLM
PLAIN = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""The values that most families support with Megatron-Core. Where transformers describes models, pipeline/models checks."""
BIASED = ("gpt_oss", "glm4", "glm4_moe")  # families with biases of attention
BALANCED = (
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "minimax_m2",
    "nemotron_h",
)  # families with a bias that balances the load of experts
NOT_IN_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4")
"""Values of model_type that vLLM refuses to serve in float16 (vllm/config/model.py, _FLOAT16_NOT_SUPPORTED_MODELS)."""
TRY_FSDP = "Try policy.dtensor_cfg.enabled=true with policy.megatron_cfg.enabled=false"
INDEX_TOPK = 2048
"""transformers' default of the keys that an indexer chooses."""
GENERATORS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")  # ends of the names of models that sample


def problems(recipe: Recipe, pending: Sequence[os.PathLike] = ()) -> Iterator[Problem]:
    """Yield problems of the recipe's models.

    pending: the folders of needed runs. Models that these runs are still to write are checked in the job.
    """
    for section, policy in config.models(recipe).items():
        section_problems: list[Problem] = []
        if not is_inside(policy.model_name, pending):
            with collected(section_problems):
                folder = model_folder(f"{section}.model_name", policy.model_name)
                section_problems += libraries.unknown_overrides(section, policy, folder)
                model = planning_config(policy, pending, f"{section}.model_name")  # refuses values of a wrong type
                section_problems += libraries.unknown_parts(f"{section}.model_name", model) if model else []
        yield from section_problems
        if not section_problems:  # else further checks would use wrong values
            yield from _against_layout(recipe, section, policy, pending)
    for section, policy in config.served_models(recipe).items():
        yield from _served_problems(recipe, f"{section}.model_name", policy, pending)


def _served_problems(recipe: Recipe, key: str, policy: PolicyConfig, pending: Sequence[os.PathLike]) -> Iterator[Problem]:
    """Yield problems of a judge or a reward model that engines serve beside the policy."""
    model_problems: list[Problem] = []
    if not is_inside(policy.model_name, pending):
        with collected(model_problems):
            model_folder(key, policy.model_name)
            model = planning_config(policy, pending, key)
            if model:
                model_problems += _check_quantization(key, policy.model_name, model)
            if model and key == "evaluate.reward_model.model_name":
                model_problems += _check_classifier(key, policy.model_name, model)
            if model and key.endswith("judge.model_name"):
                model_problems += _check_served_precision(policy, model)
            if model and key == "judge.model_name":
                model_problems += _check_served_judge(recipe, policy, model)
    yield from model_problems


def against_layout(recipe: Recipe, pending: Sequence[os.PathLike] = ()) -> Iterator[Problem]:
    """Yield problems of the models with the recipe's parallel layout.

    Models that are not on this machine are checked too if recipes/models describes them.
    """
    for section, policy in config.models(recipe).items():
        yield from _against_layout(recipe, section, policy, pending)


def _against_layout(recipe: Recipe, section: str, policy: PolicyConfig, pending: Sequence[os.PathLike]) -> Iterator[Problem]:
    key, layout_problems = f"{section}.model_name", []
    with collected(layout_problems):
        if (model := planning_config(policy, pending, key)) is None:
            return
        layout_problems += _model_problems(recipe, section, policy, model)
        if not layout_problems and (config.trains(recipe) or section != "policy"):  # errors that the backends raise in the job
            layout_problems += _check_support(policy, model, is_described(recipe))
            if is_described(recipe):
                values = section == "value" or build(recipe).needs.head == "values"
                layout_problems += frozen_problems(section, policy, model, values)
    yield from (replace(problem, key=key) if problem.key == "policy.model_name" else problem for problem in layout_problems)


def frozen_problems(section: str, policy: PolicyConfig, model: dict[str, Any], values: bool) -> Iterator[Problem]:
    """Yield the problems of the patterns in `freeze_parameters` of a recipe's section.

    values: whether the model has a value head. Imports torch and transformers if there are patterns.
    """
    if not policy.freeze_parameters:
        return
    groups = frozen_names.known_groups(model, uses_megatron(policy), values)
    names = [name for sources in groups.values() for name in sources]
    yield from frozen_names.problems(policy.freeze_parameters, names, groups, f"{section}.freeze_parameters")
    if policy.moe_aux_loss_coeff:
        count = expert_count(model)
        routers = [t.name for t in tensors(model) if t.part == "router" and t.shape[:-1] == (count,)]
        ends = tuple(name[name.index("layers.") :] for name in routers)  # multimodal checkpoints have other prefixes
        trained = set(names) - frozen_names.matched(policy.freeze_parameters, names)
        if not any(name.endswith(ends) for name in trained):
            message = f"got {policy.moe_aux_loss_coeff:g}, but {section}.freeze_parameters freezes all routers; expected 0"
            yield Problem("policy.moe_aux_loss_coeff", "contradiction", message)


def adapter_problems(lora_cfg: LoRAConfig, model: Mapping[str, Any], served: bool = False) -> Iterator[Problem]:
    """Yield a problem for each name of an FSDP2 adapter that no layer has, and for adapters that engines cannot serve.

    served: whether refits send only the adapters to the engines. Imports torch and transformers if there are adapters.
    """
    if not lora_cfg.enabled:
        return
    from pipeline.models import hugging_face  # imports torch and transformers, which submission may lack
    from pipeline.train import lora

    hf = hugging_face.meta_model(hugging_face.config_of(model, whole=True))
    try:
        adapters = lora.inject(hf, lora_cfg, hugging_face.layout(hf))
    except RecipeError as error:
        yield from error.problems
        return
    if served:
        yield from lora.not_served(adapters)


def asks_description(recipe: Recipe) -> bool:
    """Return whether checks here need transformers' description of the recipe's models, whose import takes seconds.

    A recipe that trains whole models with FSDP2 on CPUs leaves these checks to its ranks.
    """
    frozen = any(policy.freeze_parameters for policy in config.models(recipe).values())
    return bool(uses_megatron(recipe.policy) or frozen or config.adapters(recipe.policy) or config.has_gpus(recipe))


def is_described(recipe: Recipe) -> bool:
    """Return whether checks here ask transformers to describe the recipe's models; without it, ranks check them."""
    return asks_description(recipe) and can_describe()


def _check_support(policy: PolicyConfig, model: dict[str, Any], described: bool) -> Iterator[Problem]:
    """Yield a problem for attention or parallelism that the train backend does not support with this model."""
    yield from problems_of(lambda: check_routing(model, policy))
    if not uses_megatron(policy):
        yield from problems_of(lambda: check_fsdp(model, policy.dtensor_cfg))
        if described:
            yield from problems_of(lambda: _check_shared_heads(policy, model))
    indexed = SimpleNamespace(model_type=model.get("model_type"), index_topk=model.get("index_topk", INDEX_TOPK))
    yield from problems_of(lambda: check_indexer(indexed, policy.max_total_sequence_length))
    if model.get("model_type") in models.FAMILIES:
        kind, parameters = _rope(model)
        attention = {"layer_types": model.get("layer_types"), "rope_parameters": {**parameters, "rope_type": kind}}
        yield from problems_of(lambda: check_attention(SimpleNamespace(model_type=model["model_type"], **attention)))
    if uses_megatron(policy) and described:
        from pipeline.models import hugging_face  # imports torch and transformers

        length = policy.max_total_sequence_length
        yield from problems_of(lambda: check_megatron_attention(hugging_face.config_of(model), length))


def _check_shared_heads(policy: PolicyConfig, model: dict[str, Any]) -> None:
    """Raise RecipeError if ranks would share key-value heads, and the model's plan does not cut its keys and values."""
    size, heads = policy.dtensor_cfg.tensor_parallel_size, model.get("num_key_value_heads")
    if heads and heads % size:
        from pipeline.models import hugging_face  # imports torch and transformers, which submission may lack
        from pipeline.train import tensor_parallel

        hf = hugging_face.meta_model(hugging_face.config_of(model, whole=True))
        tensor_parallel.shared_heads(hf, tensor_parallel.expand(hf), size, policy.dtensor_cfg.sequence_parallel)


def _model_problems(recipe: Recipe, section: str, policy: PolicyConfig, model: dict[str, Any]) -> Iterator[Problem]:
    key = f"{section}.model_name"
    if section == f"env.{config.reward_environment(recipe)}":
        yield from _check_classifier(key, policy.model_name, model)
    yield from _check_deterministic(recipe, policy, model)
    if served := section == "policy" and refits_adapters(recipe):
        yield from family_not_served(model.get("model_type"))
    yield from _check_quantization(key, policy.model_name, model)
    yield from _check_attention(recipe, section, policy, model)
    samples = section == "policy" and generates(recipe) and not config.only_scores(recipe)
    if samples and policy.generation.backend == "vllm":
        yield from _check_generator(key, policy.model_name, model)
        yield from _check_served_precision(policy, model)
    if samples and model.get("num_attention_heads"):
        yield from _check_engine("policy.generation.vllm_cfg", policy.generation.vllm_cfg, "the model's", model)
        if policy.max_total_sequence_length <= _longest(model):  # _check_attention reports the other case
            yield from _check_sampled_length("policy", policy, recipe.cluster.generate, model)
        yield from _check_query_scale(policy, model)
    if uses_megatron(policy):  # may raise RecipeError
        yield from _check_megatron(key, policy, model, served, is_described(recipe))
    elif is_described(recipe):
        yield from adapter_problems(policy.dtensor_cfg.lora_cfg, model, served)


def _check_classifier(key: str, name: str, model: dict[str, Any]) -> Iterator[Problem]:
    """Check that the model is a reward model; in another model `score.weight` would be random."""
    kinds = model.get("architectures") or []
    labels = model.get("num_labels") or len(model.get("id2label") or (0, 1))  # transformers' default is two
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        fault = f"which is a {', '.join(kinds) or 'model of an unknown kind'}"
    elif labels != 1:
        fault = f"which has {labels} labels"
    else:
        return
    expected = "expected a reward model: a sequence classifier with one label, such as hf/ in the run folder of algorithm rm"
    yield Problem(key, "unavailable-model", f"got {name}, {fault}; {expected}")


def _check_deterministic(recipe: Recipe, policy: PolicyConfig, model: dict[str, Any]) -> Iterator[Problem]:
    """Refuse state spaces and delta nets, whose kernels in torch and vLLM sum along a sequence in an undefined order."""
    if not (policy.deterministic and config.has_gpus(recipe)):
        return
    if has_states(model):
        message = (
            f"got true with {policy.model_name}, whose state-space layers have no deterministic kernels on GPUs; expected a"
            f" model whose layers all have attention. Try {determinism.KEY}=false"
        )
        yield Problem(determinism.KEY, "unsupported", message)


def _check_generator(key: str, name: str, model: dict[str, Any]) -> Iterator[Problem]:
    """Check that vLLM builds a model that samples. vLLM chooses the class by `architectures`, trainers by `model_type`."""
    kinds = model.get("architectures") or []
    if kinds and not any(kind.endswith(GENERATORS) for kind in kinds):
        message = (
            f"got {name} with architectures={kinds} in config.json, from which vLLM does not sample; expected a name that ends"
        )
        yield Problem(key, "unavailable-model", f"{message} in {' or '.join(GENERATORS)}")


def _check_served_precision(policy: PolicyConfig, model: dict[str, Any]) -> Iterator[Problem]:
    """Refuse a family whose activations exceed float16's range, as vLLM does."""
    family = model.get("model_type")
    if policy.precision == "float16" and family in NOT_IN_FLOAT16 and policy.generation.backend == "vllm":
        message = f"got float16; expected bfloat16 or float32. vLLM serves no {family} model ({policy.model_name}) in float16"
        yield Problem("policy.precision", "unsupported", message)


def _indivisible(key: str, size: int, total: int, quantity: str, hint: str = "") -> Iterator[Problem]:
    if total % size:
        yield Problem(key, "not-divisible", f"got {size}; expected a divisor of {quantity} {total}{hint}")


# ---- attention and lengths ----------------------------------------------------------------------------------------------


def _check_attention(recipe: Recipe, section: str, policy: PolicyConfig, model: dict[str, Any]) -> Iterator[Problem]:
    owner = _owner(section)
    if heads := model.get("num_attention_heads"):
        key, size = "policy.dtensor_cfg.tensor_parallel_size", policy.dtensor_cfg.tensor_parallel_size
        if uses_megatron(policy):
            key, size = f"{MEGATRON}.tensor_model_parallel_size", policy.megatron_cfg.tensor_model_parallel_size
        for kv_heads in _kv_heads(model):
            yield from _check_heads(key, size, owner, heads, kv_heads)
    limit = _longest(model)
    if limit and policy.max_total_sequence_length > limit and not _extrapolates(recipe, model):
        message = f"got {policy.max_total_sequence_length}; expected at most {limit}, {owner} max_position_embeddings"
        own = policy.max_total_sequence_length != recipe.policy.max_total_sequence_length
        teacher = own and section in config.teacher_policies(recipe)
        yield Problem(f"{section if teacher else 'policy'}.max_total_sequence_length", "too-large", message)


def _owner(section: str) -> str:
    return "the model's" if section == "policy" else f"{section}.model_name's"


def _extrapolates(recipe: Recipe, model: Mapping[str, Any]) -> bool:
    """Return whether a model computes positions beyond its max_position_embeddings, which engines refuse.

    Models do with RoPE or without positions; those of other models are rows of a table.
    """
    computed = model.get("model_type") in models.FAMILIES or any(model.get(name) for name in rope.SPELLINGS)
    return computed and not generates(recipe)


def notes(recipe: Recipe, pending: Sequence[os.PathLike] = ()) -> Iterator[str]:
    """Yield a note for each model that may get longer sequences than it was trained on."""
    for section, policy in config.models(recipe).items():
        with collected([]):  # `problems` reports errors
            model = planning_config(policy, pending, f"{section}.model_name") or {}
            limit, length = _longest(model), policy.max_total_sequence_length
            if 0 < limit < length and _extrapolates(recipe, model):
                what = f"{length} tokens are more than {_owner(section)} max_position_embeddings, {limit}"
                yield f"policy.max_total_sequence_length: {what}. It computes the positions beyond, without having learned them"


def _kv_heads(model: Mapping[str, Any]) -> set[int]:
    """Return the numbers of key-value heads of a config.json's layers: Gemma 4's full attention has fewer than its windows."""
    numbers = [model.get("num_key_value_heads") or model["num_attention_heads"]]
    numbers += [layer.get("num_key_value_heads") for layer in (model.get("per_layer_config") or {}).values()]
    numbers += [model.get("num_global_key_value_heads")] * bool(model.get("attention_k_eq_v"))
    return {number for number in numbers if number}


def _check_heads(key: str, size: int, owner: str, heads: int, kv_heads: int) -> Iterator[Problem]:
    """Check that `size` ranks divide the attention heads, and divide or share the key-value heads."""

    def fits(k: int) -> bool:
        return heads % k == 0 and (kv_heads % k == 0 or k % kv_heads == 0)

    if not fits(size):
        valid_sizes = ", ".join(str(k) for k in range(1, heads + 1) if fits(k))
        message = f"{owner} {heads} attention heads and {kv_heads} key-value heads"
        expected = f"one of {valid_sizes}, which fit" if "," in valid_sizes else f"{valid_sizes}, which fits"
        yield Problem(key, "not-divisible", f"got {size}; expected {expected} {message}")


def _rope(model: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return (type of position embedding, its parameters)."""
    parameters = model.get("rope_scaling") or model.get("rope_parameters") or {}
    return parameters.get("rope_type") or parameters.get("type") or "default", parameters


def _longest(model: dict[str, Any]) -> int:
    """Return the model's context length in tokens, with YaRN's factor; 0 if config.json does not give it."""
    _, rope = _rope(model)
    stretched = 0
    if "yarn" in (rope.get("rope_type"), rope.get("type")):
        stretched = int(rope.get("factor", 1) * rope.get("original_max_position_embeddings", 0))
    return max(model.get("max_position_embeddings") or 0, stretched)


def _check_served_judge(recipe: Recipe, policy: PolicyConfig, model: dict[str, Any]) -> Iterator[Problem]:
    """Check the judge of cluster.judge as its engine does."""
    yield from _check_deterministic(recipe, policy, model)
    if policy.generation.backend == "vllm":
        yield from _check_generator("judge.model_name", policy.model_name, model)
    if model.get("num_attention_heads"):
        yield from _check_engine("judge.vllm_cfg", policy.generation.vllm_cfg, _owner("judge"), model)
        yield from _check_sampled_length("judge", policy, recipe.cluster.judge, model)


def _check_sampled_length(
    section: str, policy: PolicyConfig, component: ComponentConfig, model: dict[str, Any]
) -> Iterator[Problem]:
    """Check max_model_len as vLLM does (vllm/config/model.py, _get_and_verify_max_len).

    vLLM assumes that max_position_embeddings includes YaRN's factor, and multiplies it by other factors.
    """
    generation = policy.generation
    environment = {**os.environ, **component.env_vars}
    is_unlimited = environment.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "").strip().lower() in ("1", "true")
    if generation.backend != "vllm" or is_unlimited:
        return
    kind, rope = _rope(model)
    stretch = 1 if kind in SCALED_ROPE_TYPES else rope.get("factor") or 1
    limit = int(stretch * (model.get("model_max_length") or model.get("max_position_embeddings") or 0))
    if limit and generation.vllm_cfg.max_model_len > limit:
        message = f"got {generation.vllm_cfg.max_model_len}; expected at most {limit}, the model's context length in vLLM"
        hint = f"Try {section}.hf_config_overrides.max_position_embeddings for a longer context"
        key = "policy.generation.vllm_cfg.max_model_len" if section == "policy" else f"{section}.vllm_cfg.max_model_len"
        yield Problem(key, "too-large", f"{message}. {hint}")


def _check_query_scale(policy: PolicyConfig, model: dict[str, Any]) -> Iterator[Problem]:
    """Refuse lengths at which trainers scale queries and vLLM does not: it reads this scale only in Mistral's own format.

    transformers multiplies the query at position p by 1 + beta log(1 + floor(p / original_max_position_embeddings))
    (models/ministral3/modeling_ministral3.py); for vLLM see MistralAttention in model_executor/models/mistral.py.
    """
    _, rope = _rope(model)
    original, length = rope.get("original_max_position_embeddings") or 0, policy.max_total_sequence_length
    if rope.get("llama_4_scaling_beta") and policy.generation.backend == "vllm" and length > original:
        message = (
            f"got {length}; expected at most {original}: training scales the queries of later positions, and vLLM does not"
        )
        yield Problem("policy.max_total_sequence_length", "too-large", f"{message} (llama_4_scaling_beta)")


def _check_engine(key: str, vllm: VLLMConfig, owner: str, model: dict[str, Any]) -> Iterator[Problem]:
    for kv_heads in _kv_heads(model):
        heads = model["num_attention_heads"]
        yield from _check_heads(f"{key}.tensor_parallel_size", vllm.tensor_parallel_size, owner, heads, kv_heads)
    experts = expert_count(model)
    size = vllm.expert_parallel_size
    if size > 1 and not experts:
        yield Problem(f"{key}.expert_parallel_size", "too-large", f"got {size}; expected 1, since the model has no experts")
    elif size > 1:
        yield from _indivisible(f"{key}.expert_parallel_size", size, experts, "the model's number of experts,")
    stages = vllm.pipeline_parallel_size
    if stages > 1 and model.get("num_kv_shared_layers"):
        message = f"got {stages} for a model whose layers share keys and values, which vLLM's stages cannot; expected 1"
        yield Problem(f"{key}.pipeline_parallel_size", "unsupported", message)
    elif stages > (layers := model.get("num_hidden_layers", stages)):
        yield Problem(
            f"{key}.pipeline_parallel_size", "too-large", f"got {stages}; expected at most the model's {layers} layers"
        )


def _check_quantization(key: str, name: str, model: dict[str, Any]) -> Iterator[Problem]:
    """Refuse a quantized checkpoint that ranks do not read in bfloat16."""
    if (quantization := model.get("quantization_config")) and not format_name(quantization):
        kind = f"{quantization.get('quant_method')} with blocks of {quantization.get('weight_block_size')}"
        message = f"got {name}, a quantized checkpoint ({kind}), which no backend reads; expected bfloat16, float32,"
        yield Problem(key, "unsupported", f"{message} {' or '.join(FORMATS)}. Try a copy in bfloat16")


# ---- Megatron-Core ------------------------------------------------------------------------------------------------------


def _check_megatron(key: str, policy: PolicyConfig, model: dict[str, Any], served: bool, described: bool) -> Iterator[Problem]:
    """Check that the Megatron backend supports the model with the recipe's layout and adapters.

    served: whether refits send only the adapters to the engines. described: whether transformers may describe the model.
    Raises RecipeError for a model that it cannot describe, and for adapters of unknown modules.
    """
    family = str(model.get("model_type"))
    if family not in models.FAMILIES:
        message = f"got a '{family}' model; the Megatron backend supports only {', '.join(models.FAMILIES)}"
        yield Problem(key, "unsupported", f"{message}. {TRY_FSDP}, which supports more models")
        return
    if not described:
        for name, only in PLAIN.items():
            if (configured := model.get(name, only)) != only and not (name == "attention_bias" and family in BIASED):
                message = f"got a {family} model with {name}={configured}; the Megatron backend supports only {only}"
                yield Problem(key, "unsupported", message)
        return
    if config_values.MULTIMODAL in model:
        from pipeline.models import hugging_face  # imports torch and transformers
        from pipeline.models.text_model import TextModel

        yield from problems_of(lambda: TextModel(hugging_face.config_of(model, whole=True)).others)
    shape = ModelShape.of(model, key)
    yield from _check_stages(policy, shape)
    if family == "gemma4_text":
        size = policy.megatron_cfg.tensor_model_parallel_size
        for heads in _kv_heads(model):
            yield from _indivisible(f"{MEGATRON}.tensor_model_parallel_size", size, heads, "a layer's key-value heads,")
    for name, width in (("MLP", shape.dense_width), ("shared experts", shape.shared_width)):
        size = policy.megatron_cfg.tensor_model_parallel_size
        yield from _indivisible(
            f"{MEGATRON}.tensor_model_parallel_size", size, int(width), f"the intermediate size of the model's {name},"
        )
    yield from _check_state(policy, shape)
    yield from _check_experts(policy, shape, family)
    yield from _check_adapters(policy, model, served)


def _check_state(policy: PolicyConfig, shape: ModelShape) -> Iterator[Problem]:
    """Check that the ranks can divide the heads of state spaces or delta nets: whole groups each, or parts of one group."""
    if shape.state is None:
        return
    m, state = policy.megatron_cfg, shape.state
    key, size = f"{MEGATRON}.tensor_model_parallel_size", m.tensor_model_parallel_size
    yield from _indivisible(key, size, state.groups, "the number of groups of the model's state spaces,")
    key, ranks, (heads, groups) = f"{MEGATRON}.context_parallel_size", m.context_parallel_size, (state.heads, state.groups)
    if groups % size == 0 and (heads // size % ranks or (groups // size % ranks and ranks % (groups // size))):
        message = f"got {ranks}, which does not divide the {heads} heads ({groups} groups) of the model's state-space layers"
        yield Problem(
            key,
            "not-divisible",
            f"{message} on {size} tensor-parallel ranks; expected a power of two up to {heads} / tensor_model_parallel_size",
        )


def _check_adapters(policy: PolicyConfig, model: dict[str, Any], served: bool) -> Iterator[Problem]:
    """Check the names of the modules that get adapters as the backend does, and that engines can apply them if `served`."""
    from pipeline.models import hugging_face  # imports torch and transformers
    from pipeline.models.text_model import TextModel

    megatron = policy.megatron_cfg
    if not megatron.peft.enabled:
        return
    chosen = modules.choose(megatron.peft, TextModel(hugging_face.config_of(model, whole=True)).parameters)
    if megatron.moe_grouped_gemm and any(module.weight.expert is not None for module in chosen):
        message = "got true, which computes all experts in one kernel; expected null or false, since experts have adapters"
        yield Problem(f"{MEGATRON}.moe_grouped_gemm", "contradiction", message)
    if served:
        yield from not_served_modules(chosen)


def _check_stages(policy: PolicyConfig, shape: ModelShape) -> Iterator[Problem]:
    """Check that all stages but the first and last have equally many layers.

    Follows TransformerConfig and get_num_layers_to_build of Megatron-Core.
    """
    m = policy.megatron_cfg
    if m.pipeline_model_parallel_size == 1:
        return
    first, last = m.num_layers_in_first_pipeline_stage, m.num_layers_in_last_pipeline_stage
    stages = m.pipeline_model_parallel_size - (first is not None) - (last is not None)
    layers = shape.layers - (first or 0) - (last or 0)
    if first is None and last is None:
        hint = ". Try another size, or num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
        key = f"{MEGATRON}.pipeline_model_parallel_size"
        yield from _indivisible(key, stages, layers, "the model's number of layers,", hint)
    elif (layers <= 0 or layers % stages) if stages else layers:
        name = "first" if first is not None else "last"
        message = f"got first {first} and last {last}: of the model's {shape.layers} layers, {layers} remain for the {stages}"
        expected = "other stages; expected the same number of layers in every other stage, at least 1"
        yield Problem(f"{MEGATRON}.num_layers_in_{name}_pipeline_stage", "not-divisible", f"{message} {expected}")


def _check_experts(policy: PolicyConfig, shape: ModelShape, family: str) -> Iterator[Problem]:
    m = policy.megatron_cfg
    if m.moe_router_bias_update_rate and family not in BALANCED:
        message = f"got {m.moe_router_bias_update_rate}; expected 0, since {family} routers have no bias for load balancing"
        yield Problem(f"{MEGATRON}.moe_router_bias_update_rate", "has-no-effect", message)
    if not shape.experts:
        for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
            if (size := getattr(m, name) or 1) > 1:
                yield Problem(f"{MEGATRON}.{name}", "too-large", f"got {size}; expected 1, since the model has no experts")
        return
    yield from check_expert_layout(policy)
    if family == "gpt_oss" and expert_tensor_parallel_size(m) > 1:
        message = f"got {expert_tensor_parallel_size(m)}; expected 1, since tensor parallelism does not split a gpt_oss model's"
        hint = "Try expert_model_parallel_size > 1 with tensor parallelism"
        yield Problem(f"{MEGATRON}.expert_tensor_parallel_size", "unsupported", f"{message} experts. {hint}")
        return
    key, size = f"{MEGATRON}.expert_model_parallel_size", m.expert_model_parallel_size
    yield from _indivisible(key, size, shape.experts, "the model's number of experts,")
    key, size = f"{MEGATRON}.expert_tensor_parallel_size", expert_tensor_parallel_size(m)
    yield from _indivisible(key, size, shape.expert_width, "the intermediate size of the model's experts,")
