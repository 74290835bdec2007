"""What a recipe says against itself, before anything is loaded. What needs files is in `launch/preflight/`."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config import (
    algorithm_checks,
    async_checks,
    dtensor_checks,
    durations,
    hardware,
    megatron_checks,
    sbatch,
    texts,
    typed,
)
from pipeline.config.algorithms import OFFLINE, ONLINE
from pipeline.config.cluster import COLOCATED, OF_NODES, SHARED, ComponentConfig, TimeoutsConfig, ranks_per_node
from pipeline.config.data import check_data, validates
from pipeline.config.environments import check_environments, unusable_kinds
from pipeline.config.errors import refuse
from pipeline.config.layout import check_divides, check_layout, colocated, named_backend
from pipeline.config.models import check_reward_model, reward_environment, reward_model, serves_rewards
from pipeline.config.policy import PolicyConfig
from pipeline.config.schema import Recipe, engine_ranks, generates, section

LEARN_LOGPROBS = ("sft", "dpo")  # those that sample nothing; rm has no log-probs


def validate(recipe: Recipe) -> None:
    """Raises RecipeError with all that a recipe says against itself: for each problem the key and what would be right.

    What depends on the train backend is only checked once that is chosen: `launch/backend.py` calls this again.
    """
    refuse(problems(recipe))


def problems(recipe: Recipe) -> Iterator[str]:
    """What a recipe says against itself; the contradictions only where each value by itself can be used."""
    alone = [*typed.refused(recipe), *(problem for _, problem in unusable(recipe))]
    yield from alone or contradictions(recipe)


def unusable(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (key, problem) for values that are wrong whatever the others are, beyond their types, bounds and choices."""
    yield from _check_must_save_by(recipe.checkpointing.checkpoint_must_save_by)
    yield from unusable_kinds(recipe)
    yield from texts.unusable(recipe)
    yield from sbatch.problems(recipe)


def _check_must_save_by(text: str | None) -> Iterator[tuple[str, str]]:
    key = "checkpointing.checkpoint_must_save_by"
    try:
        if text is not None and durations.seconds(text) == 0:
            yield key, f"{key}: {text} leaves no time at all; above 0, or null"
    except ValueError as error:
        yield key, f"{key}: {error}, in quotes"


def contradictions(recipe: Recipe) -> Iterator[str]:
    """What values say against each other."""
    yield from algorithm_checks.check_algorithm(recipe)
    yield from async_checks.check_async(recipe)
    yield from _check_packing(recipe.policy)
    yield from _check_storage(recipe.cluster.timeouts)
    yield from _check_world(recipe)
    if recipe.algorithm in (*ONLINE, *OFFLINE):
        yield from _check_validation(recipe)
    if generates(recipe):
        yield from _check_sampling(recipe)
    elif recipe.algorithm in LEARN_LOGPROBS and (temperature := recipe.policy.generation.temperature) != 1:
        yield (
            f"policy.generation.temperature: {temperature} divides the logits of every log-prob, and {recipe.algorithm} learns"
            " the model's own, as nothing is sampled; 1, or leave it out"
        )
    yield from check_data(recipe)
    yield from check_environments(recipe)
    yield from hardware.problems(recipe)


def _check_storage(timeouts: TimeoutsConfig) -> Iterator[str]:
    if timeouts.storage is not None and timeouts.storage >= timeouts.save:
        yield (
            f"cluster.timeouts.storage: {timeouts.storage:g} s of waiting for a disk would not fit into cluster.timeouts.save,"
            f" {timeouts.save:g} s; less than that"
        )


def _check_packing(policy: PolicyConfig) -> Iterator[str]:
    for key in ("train_mb_tokens", "logprob_mb_tokens"):
        tokens = getattr(policy.sequence_packing, key)
        if policy.sequence_packing.enabled and tokens < policy.max_total_sequence_length:
            yield (
                f"policy.sequence_packing.{key}: {tokens} cannot hold one sequence of policy.max_total_sequence_length"
                f" {policy.max_total_sequence_length}; at least that"
            )


def _check_world(recipe: Recipe) -> Iterator[str]:
    yield from check_reward_model(recipe)
    if named_backend(recipe.policy) == "megatron":
        yield from megatron_checks.check_megatron(recipe.policy)
    else:
        yield from dtensor_checks.check_dtensor(recipe)
    yield from check_layout(recipe)
    if generates(recipe):
        yield from _check_engine(recipe)
        yield from _check_quantisation(recipe)
    if colocated(recipe):
        yield from _check_colocated(recipe)
    if recipe.cluster.share_nodes:
        yield from _check_shared_nodes(recipe)
    yield from _check_gpus(recipe)
    yield from sbatch.of_guests(recipe)


def components(recipe: Recipe) -> dict[str, ComponentConfig]:
    """Return the components that the job has, in rank order."""
    cluster = recipe.cluster
    parts = {"train": cluster.train}
    if generates(recipe):
        parts["generate"] = cluster.generate
    if serves_rewards(recipe):
        parts["reward"] = cluster.reward
    return parts


def _check_gpus(recipe: Recipe) -> Iterator[str]:
    """Yield a problem for each component with more ranks than GPUs on a node."""
    for name, component in components(recipe).items():
        alone = name == "generate" and colocated(recipe) and engine_ranks(recipe.policy.generation.vllm_cfg) == 1
        if 0 < component.gpus_per_node < ranks_per_node(component) and not alone:
            yield (
                f"cluster.{name}.ranks_per_node: got {component.ranks_per_node}; expected at most gpus_per_node="
                f"{component.gpus_per_node}, since NCCL refuses two ranks on one GPU. Try cluster.{name}.ranks_per_node=null,"
                " which is one per GPU"
            )


def _check_shared_nodes(recipe: Recipe) -> Iterator[str]:
    """Yield a problem for each key in which components on the same nodes cannot differ, or if they also take turns."""
    key = "cluster.share_nodes"
    if colocated(recipe):
        yield (
            f"{key}: got true; expected false with {COLOCATED}=true, where train and generate ranks take turns on all GPUs of"
            f" their nodes. Try {key}=false, or {COLOCATED}=false and a gpus_per_node for each component"
        )
        return
    for name, component in components(recipe).items():
        for setting in OF_NODES:
            if (asked := getattr(component, setting)) != (shared := getattr(recipe.cluster.train, setting)):
                yield (
                    f"cluster.{name}.{setting}: got {asked}; expected {shared}, as cluster.train has, since {key}=true puts"
                    f" them on the same nodes. Try without it, or {key}=false"
                )


def _check_colocated(recipe: Recipe) -> Iterator[str]:
    key, train, generate = COLOCATED, recipe.cluster.train, recipe.cluster.generate
    for name in SHARED:
        if (asked := getattr(generate, name)) != (shared := getattr(train, name)):
            yield (
                f"cluster.generate.{name}: {asked}, but with {key}=true the generate ranks are on the nodes and GPUs of"
                f" cluster.train, where it is {shared}; leave it out, or {key}=false"
            )
    if serves_rewards(recipe):
        yield (
            f"{key}: true is one allocation of train and generate ranks, in which a reward model has no ranks of its own;"
            f" env.{reward_environment(recipe)}.served_by=train, or {key}=false"
        )
    elif (judge := reward_model(recipe)) and not judge.cpu_offload:
        yield (
            f"env.{reward_environment(recipe)}.cpu_offload: false keeps the reward model on GPUs that the engines fill while"
            f" they sample ({key}=true); true, or {key}=false"
        )


def _check_engine(recipe: Recipe) -> Iterator[str]:
    generation, key = recipe.policy.generation, "policy.generation.vllm_cfg"
    tensor, stages = generation.vllm_cfg.tensor_parallel_size, generation.vllm_cfg.pipeline_parallel_size
    expert = generation.vllm_cfg.expert_parallel_size
    if generation.backend == "transformers":
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"):
            if getattr(generation.vllm_cfg, name) > 1:
                yield f"{key}.{name}: the transformers backend keeps a whole model on each rank; it must be 1"
    product = (
        f"{key}.tensor_parallel_size"
        if stages == 1
        else f"{key}: tensor_parallel_size {tensor} x pipeline_parallel_size {stages}"
    )
    yield from check_divides(product, tensor * stages, recipe.cluster.generate, "generate")
    if expert not in (1, tensor):
        yield (
            f"{key}.expert_parallel_size: {expert}, but vLLM spreads experts over the ranks of tensor_parallel_size {tensor},"
            f" or cuts each of them over those; {tensor} or 1"
        )


def _check_quantisation(recipe: Recipe) -> Iterator[str]:
    generation, key = recipe.policy.generation, "policy.generation.vllm_cfg"
    if generation.vllm_cfg.precision != "fp8":
        if generation.vllm_cfg.quantization_ignored_layer_kws:
            yield f"{key}.quantization_ignored_layer_kws: nothing is quantised; {key}.precision must be fp8, or this null"
        return
    if generation.backend != "vllm":
        yield f"{key}.precision: fp8 is vLLM's; auto, or policy.generation.backend=vllm"
    if recipe.policy.precision != "bfloat16":
        yield f"{key}.precision: vLLM computes fp8 layers of a bfloat16 model; auto, or policy.precision=bfloat16"
    if recipe.cluster.generate.gpus_per_node == 0:
        yield f"{key}.precision: fp8 needs GPUs, and cluster.generate.gpus_per_node is 0; auto"


def _check_validation(recipe: Recipe) -> Iterator[str]:
    wanted = [key for key in ("val_period", "val_at_start", "val_at_end") if getattr(section(recipe), key)]
    if wanted and not validates(recipe):
        yield f"{recipe.algorithm}.{wanted[0]}: there is nothing to validate on; data.validation must name a data set"


def _check_sampling(recipe: Recipe) -> Iterator[str]:
    generation = recipe.policy.generation
    if (sampled := generation.vllm_cfg.max_model_len) != (trained := recipe.policy.max_total_sequence_length):
        yield (
            f"policy.generation.vllm_cfg.max_model_len: {sampled} is {'below' if sampled < trained else 'above'}"
            f" policy.max_total_sequence_length {trained}, and what is sampled is trained on, whole; leave it out"
        )
