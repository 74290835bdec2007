"""Check combinations of keys from the recipe alone. `launch/preflight/` has the checks that need files or a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipeline.algorithms import ALGORITHMS, build
from pipeline.algorithms.algorithm import Algorithm
from pipeline.algorithms.early_stop import EarlyStopConfig, check_early_stop
from pipeline.config import (
    determinism,
    dtensor_checks,
    hardware,
    megatron_checks,
    schema_validation,
)
from pipeline.config.checkpointing import check_encryption
from pipeline.config.cluster import COLOCATED, OF_NODES, SHARED, ComponentConfig, TimeoutsConfig, ranks, ranks_per_node
from pipeline.config.data import check_data, validates
from pipeline.config.environments import check_environments
from pipeline.config.megatron import MegatronLoRAConfig
from pipeline.config.other_models import (
    check_judge,
    check_reward_model,
    engine_models,
    reward_environment,
    reward_model,
    served_judge_policy,
    serves_judge,
    serves_rewards,
)
from pipeline.config.parallelism import (
    DTENSOR,
    MEGATRON,
    check_divides,
    check_layout,
    colocated,
    components_on_train_nodes,
    named_backend,
)
from pipeline.config.policy import LoRAConfig, PolicyConfig
from pipeline.config.routing_checks import check_load_balancing, check_router_replay
from pipeline.config.schema import Recipe, adapters, engine_ranks, environments_apart, generates, section, trains
from pipeline.recipe.problems import Problem, refuse


def validate(recipe: Recipe) -> None:
    """Raise RecipeError with all problems of a recipe.

    Checks that depend on the train backend run only after it is chosen: `launch/plan/backend_choice.py` then calls this again.
    """
    refuse(problems(recipe))


def problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of single values or, if there are none, the problems of combinations of values."""
    yield from list(schema_validation.value_problems(recipe)) or contradictions(recipe)


def contradictions(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of combinations of values."""
    if recipe.algorithm in ALGORITHMS:
        yield from _check_algorithm(recipe, build(recipe))
    if not trains(recipe):
        yield from _check_without_trainers(recipe)
    else:
        yield from _check_packing(recipe.policy)
        yield from _check_world(recipe)
        yield from check_data(recipe)
    yield from _check_plan(recipe)
    yield from determinism.problems(recipe, components(recipe))
    yield from _check_environment_ranks(recipe)
    yield from _check_storage(recipe.cluster.timeouts)
    yield from check_encryption(recipe.checkpointing, recipe.run_dir)
    yield from check_environments(recipe.env)
    yield from check_judge(recipe)
    yield from hardware.problems(recipe)


def _check_algorithm(recipe: Recipe, algorithm: Algorithm) -> Iterator[Problem]:
    yield from algorithm.problems()
    yield from _check_validation(recipe)
    if generates(recipe):
        yield from _check_sampling(recipe)
    elif algorithm.needs.head == "logprobs" and (temperature := recipe.policy.generation.temperature) != 1:
        message = (
            f"got {temperature}; expected 1, since {recipe.algorithm} samples nothing and trains on log-probs at temperature 1"
        )
        yield Problem("policy.generation.temperature", "contradiction", message)


def _check_storage(timeouts: TimeoutsConfig) -> Iterator[Problem]:
    if timeouts.storage is not None and timeouts.storage >= timeouts.save:
        message = f"got {timeouts.storage:g} s; expected less than cluster.timeouts.save, {timeouts.save:g} s"
        yield Problem("cluster.timeouts.storage", "too-large", message)


def _check_plan(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for each mean length of the section `plan` that no sequence of the recipe can have."""
    total_key, total = "policy.max_total_sequence_length", recipe.policy.max_total_sequence_length
    inputs = {total_key: total} | ({"data.max_input_seq_length": recipe.data.max_input_seq_length} if trains(recipe) else {})
    sampled = {total_key: total, "policy.generation.max_new_tokens": recipe.policy.generation.max_new_tokens}
    answers = inputs if not (trains(recipe) and generates(recipe)) else sampled  # tasks of an evaluation have their own limits
    prompt, answer = recipe.plan.prompt_tokens, recipe.plan.answer_tokens
    fitting = True
    for name, given, limits in (("prompt_tokens", prompt, inputs), ("answer_tokens", answer, answers)):
        key = min(limits, key=limits.__getitem__)
        if given is not None and given > limits[key]:
            fitting = False
            message = f"got {given:g}; expected at most {limits[key]}, the value of {key}. Try less, or a larger {key}"
            yield Problem(f"plan.{name}", "too-large", message)
    if fitting and prompt is not None and answer is not None and prompt + answer > total:
        message = f"got {answer:g}; expected at most {total - prompt:g}, {total_key} less plan.prompt_tokens"
        yield Problem("plan.answer_tokens", "too-large", f"{message}. Try less, or a larger {total_key}")


def _check_packing(policy: PolicyConfig) -> Iterator[Problem]:
    for key in ("train_mb_tokens", "logprob_mb_tokens"):
        tokens, longest = getattr(policy.sequence_packing, key), policy.max_total_sequence_length
        if policy.sequence_packing.enabled and tokens is not None and tokens < longest:
            message = f"got {tokens}; expected at least policy.max_total_sequence_length, {longest}, to hold one sequence"
            yield Problem(f"policy.sequence_packing.{key}", "too-small", message)


def _check_world(recipe: Recipe) -> Iterator[Problem]:
    yield from check_reward_model(recipe)
    if named_backend(recipe.policy) == "megatron":
        yield from megatron_checks.check_megatron(recipe.policy)
    else:
        yield from dtensor_checks.check_dtensor(recipe)
    yield from dtensor_checks.check_lora(recipe)
    yield from _check_lora_refit(recipe)
    yield from check_router_replay(recipe)
    yield from check_load_balancing(recipe)
    yield from _check_frozen(recipe.policy)
    yield from check_layout(recipe)
    if generates(recipe):
        yield from _check_engines(recipe)
    if colocated(recipe):
        yield from _check_colocated(recipe)
    if recipe.cluster.share_nodes:
        yield from _check_shared_nodes(recipe)
    yield from _check_gpus(recipe)
    for name in components_on_train_nodes(recipe):
        if getattr(recipe.cluster, name).sbatch_options:
            message = "got options, but its ranks are on cluster.train's nodes. Try cluster.train.sbatch_options"
            yield Problem(f"cluster.{name}.sbatch_options", "has-no-effect", message)


def _check_frozen(policy: PolicyConfig) -> Iterator[Problem]:
    if policy.freeze_parameters and adapters(policy) is not None:
        message = "got patterns with adapters, which freeze all other weights; expected none. Try without it"
        yield Problem("policy.freeze_parameters", "contradiction", message)


def has_gpus(recipe: Recipe) -> bool:
    """Return whether a component of the job has GPUs."""
    return any(component.gpus_per_node for component in components(recipe).values())


def components(recipe: Recipe) -> dict[str, ComponentConfig]:
    """Return name -> component of the job, in rank order."""
    cluster = recipe.cluster
    parts = {"train": cluster.train} if trains(recipe) else {}
    if generates(recipe):
        parts["generate"] = cluster.generate
    if serves_rewards(recipe):
        parts["reward"] = cluster.reward
    if serves_judge(recipe):
        parts["judge"] = cluster.judge
    if environments_apart(recipe):
        parts["environment"] = cluster.environment
    return parts


def model_components(recipe: Recipe) -> dict[str, ComponentConfig]:
    """Return name -> component of the job, in rank order, for the components that hold models."""
    return {name: component for name, component in components(recipe).items() if name != "environment"}


def _check_environment_ranks(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of cluster.environment."""
    cluster = recipe.cluster
    if cluster.environment.nodes and not generates(recipe):
        message = f"got {cluster.environment.nodes}, but {recipe.algorithm} has no environments; expected 0"
        yield Problem("cluster.environment.nodes", "has-no-effect", message)
    if gpus := cluster.environment.gpus_per_node:
        message = f"got {gpus}; expected 0, since environments hold no model. For a model that judges, see help=judge"
        yield Problem("cluster.environment.gpus_per_node", "unsupported", message)


def _check_without_trainers(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of a job that has no train ranks."""
    yield from check_reward_model(recipe)
    yield from _check_engines(recipe)
    yield from _check_gpus(recipe)
    yield from _check_served_engines(recipe)
    own = f"{recipe.algorithm} has no train ranks"
    if recipe.policy.generation.colocated.enabled:
        yield Problem(COLOCATED, "has-no-effect", f"got true, but {own} to share GPUs with. Try false")
    if recipe.cluster.share_nodes:
        yield Problem("cluster.share_nodes", "has-no-effect", f"got true, but {own} to share nodes with. Try false")
    if (judge := reward_model(recipe)) and not serves_rewards(recipe):
        key = f"env.{reward_environment(recipe)}.served_by"
        yield Problem(key, "unsupported", f"got {judge.served_by}, but {own}. Try reward, which gives it ranks of its own")


def _check_served_engines(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem if the judge and the reward model of an evaluation leave no engine to the policy."""
    per_engine = engine_ranks(recipe.policy.generation.vllm_cfg)
    engines = ranks(recipe.cluster.generate) // per_engine
    if engines and engine_models(recipe, engines)[0] != "policy" and len(served := engine_models(recipe, 0)) >= engines:
        needed = (len(served) + 1) * per_engine
        message = (
            f"got {engines} engines, but {', '.join(served)} need {len(served)}, and the policy needs at least one; expected at"
            f" least {needed} ranks"
        )
        yield Problem("cluster.generate.ranks_per_node", "too-small", message)


def _check_gpus(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for each component with more ranks than GPUs on a node."""
    for name, component in components(recipe).items():
        shares = name == "generate" and colocated(recipe) and engine_ranks(recipe.policy.generation.vllm_cfg) == 1
        if 0 < component.gpus_per_node < ranks_per_node(component) and not shares:
            key = f"cluster.{name}.ranks_per_node"
            message = (
                f"got {component.ranks_per_node}; expected at most gpus_per_node={component.gpus_per_node}, since NCCL refuses"
                f" two ranks on one GPU. Try {key}=null, which is one per GPU"
            )
            yield Problem(key, "too-large", message)


def _check_shared_nodes(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of cluster.share_nodes: ranks that also take turns on GPUs, and differing settings of shared nodes."""
    key = "cluster.share_nodes"
    if colocated(recipe):
        message = (
            f"got true; expected false with {COLOCATED}=true, where train and generate ranks take turns on all GPUs of their"
            f" nodes. Try {key}=false, or {COLOCATED}=false and a gpus_per_node for each component"
        )
        yield Problem(key, "contradiction", message)
        return
    for name, component in model_components(recipe).items():
        yield from _as_train_has(recipe, name, component, OF_NODES, f"{key}=true puts all components on the same nodes", key)


def _as_train_has(
    recipe: Recipe, name: str, component: ComponentConfig, settings: Iterable[str], why: str, key: str
) -> Iterator[Problem]:
    """Yield a problem for each setting of a component that differs from cluster.train's. key: the key that forbids it."""
    for setting in settings:
        if (given := getattr(component, setting)) != (shared := getattr(recipe.cluster.train, setting)):
            message = f"got {given}; expected {shared}, the value of cluster.train, since {why}. Try without it, or {key}=false"
            yield Problem(f"cluster.{name}.{setting}", "contradiction", message)


def _check_colocated(recipe: Recipe) -> Iterator[Problem]:
    key, on = COLOCATED, f"{COLOCATED}=true"
    why = f"with {on} the generate ranks use its nodes and GPUs"
    yield from _as_train_has(recipe, "generate", recipe.cluster.generate, SHARED, why, key)
    environment = f"env.{reward_environment(recipe)}"
    if serves_rewards(recipe):
        message = f"got reward; expected train, since with {on} the reward model can have no ranks of its own. Try {key}=false"
        yield Problem(f"{environment}.served_by", "contradiction", message)
    elif (judge := reward_model(recipe)) and not judge.cpu_offload:
        message = f"got false; expected true, since with {on} the engines fill the GPUs while they sample. Try {key}=false"
        yield Problem(f"{environment}.cpu_offload", "contradiction", message)


def _check_engines(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of the layouts of engines: the policy's, and those of cluster.judge."""
    served = {"policy.generation": ("generate", recipe.policy)}
    if serves_judge(recipe):
        served["judge"] = "judge", served_judge_policy(recipe)
    for key, (name, model) in served.items():
        yield from _check_engine(f"{key}.vllm_cfg", model, name, getattr(recipe.cluster, name))
        yield from _check_quantisation(key, model, name, getattr(recipe.cluster, name))


def _check_engine(key: str, model: PolicyConfig, name: str, component: ComponentConfig) -> Iterator[Problem]:
    generation = model.generation
    tensor, expert = generation.vllm_cfg.tensor_parallel_size, generation.vllm_cfg.expert_parallel_size
    if generation.backend == "transformers":
        for size_key in ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"):
            if (size := getattr(generation.vllm_cfg, size_key)) > 1:
                message = f"got {size}; expected 1, since the transformers backend keeps a whole model on each rank"
                yield Problem(f"{key}.{size_key}", "unsupported", message)
    sizes = {
        size_key: getattr(generation.vllm_cfg, size_key) for size_key in ("tensor_parallel_size", "pipeline_parallel_size")
    }
    yield from check_divides(key, sizes, component, name)
    if expert not in (1, tensor):
        message = f"got {expert}; expected 1 or tensor_parallel_size, {tensor}: vLLM spreads experts over all of its ranks"
        yield Problem(f"{key}.expert_parallel_size", "not-a-choice", message)


def _check_quantisation(section: str, model: PolicyConfig, name: str, component: ComponentConfig) -> Iterator[Problem]:
    generation, key = model.generation, f"{section}.vllm_cfg.precision"
    if generation.vllm_cfg.precision != "fp8":
        if generation.vllm_cfg.quantization_ignored_layer_kws:
            ignored = f"{section}.vllm_cfg.quantization_ignored_layer_kws"
            yield Problem(ignored, "has-no-effect", f"got layers, but nothing is quantized. Try {key}=fp8, or null here")
        return
    if generation.backend != "vllm":
        yield Problem(key, "contradiction", "got fp8, which needs vLLM; expected auto. Try policy.generation.backend=vllm")
    if model.precision != "bfloat16":
        own = f"{section.partition('.')[0]}.precision=bfloat16"
        message = f"got fp8; expected auto, since vLLM quantizes only bfloat16 models. Try {own}"
        yield Problem(key, "contradiction", message)
    if component.gpus_per_node == 0:
        yield Problem(key, "needs-gpu", f"got fp8 with cluster.{name}.gpus_per_node=0; expected auto")


def _check_validation(recipe: Recipe) -> Iterator[Problem]:
    wanted = [key for key in ("val_period", "val_at_start", "val_at_end") if getattr(section(recipe), key)]
    if wanted and not validates(recipe):
        message = "got validation without a validation data set; expected one at data.validation"
        yield Problem(f"{recipe.algorithm}.{wanted[0]}", "missing-value", message)
    if isinstance(keys := section(recipe), EarlyStopConfig):
        during = bool(validates(recipe) and (keys.val_period or keys.val_at_start))
        yield from check_early_stop(recipe.algorithm, keys, during)


def _check_sampling(recipe: Recipe) -> Iterator[Problem]:
    generation, key = recipe.policy.generation, "policy.generation"
    if (sampled := generation.vllm_cfg.max_model_len) != (trained := recipe.policy.max_total_sequence_length):
        message = (
            f"got {sampled}; expected policy.max_total_sequence_length, {trained}, since training uses whole answers. Try"
            " without it"
        )
        yield Problem(f"{key}.vllm_cfg.max_model_len", "contradiction", message)


# ---- policy.generation.lora_refit -----------------------------------------------------------------------------------------


SERVED_DIM = 512
"""The greatest rank of adapters that vLLM serves. A test compares it with vLLM."""


def _check_lora_refit(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for each value with which engines cannot serve adapters."""
    policy, generation = recipe.policy, recipe.policy.generation
    if generation.lora_refit != "adapter":
        return
    key, (section, lora) = "policy.generation.lora_refit", _adapters(policy)
    stages = generation.vllm_cfg.pipeline_parallel_size
    for found, what, why in (
        (not lora.enabled, f"{section}.enabled=false", "there are no adapters"),
        (lora.use_dora, f"{section}.use_dora=true", "vLLM has no DoRA"),
        (lora.dim > SERVED_DIM, f"{section}.dim={lora.dim}", f"vLLM serves ranks up to {SERVED_DIM}"),
        (generation.backend != "vllm", f"policy.generation.backend={generation.backend}", "it serves merged weights"),
        (policy.random_init, "policy.random_init=true", "engines read the base weights from files"),
        (generation.refit_transport == "delta", "policy.generation.refit_transport=delta", "it compares whole weights"),
        (generation.colocated.enabled, "policy.generation.colocated.enabled=true", "sleeping engines drop the base weights"),
        (stages > 1, f"policy.generation.vllm_cfg.pipeline_parallel_size={stages}", "a stage has only some of the layers"),
    ):
        if found:
            yield Problem(key, "contradiction", f"got adapter with {what}; expected merged, since {why}. Try {key}=merged")


def _adapters(policy: PolicyConfig) -> tuple[str, LoRAConfig | MegatronLoRAConfig]:
    """Return (key, section) of the backend's adapters. If the backend is not chosen yet, take the adapters that are enabled."""
    dtensor, megatron, backend = policy.dtensor_cfg.lora_cfg, policy.megatron_cfg.peft, named_backend(policy)
    if backend == "megatron" or (backend is None and megatron.enabled and not dtensor.enabled):
        return f"{MEGATRON}.peft", megatron
    return f"{DTENSOR}.lora_cfg", dtensor
