"""What a recipe says against itself, before anything is loaded. What needs the model's files is in `launch/preflight.py`."""

from __future__ import annotations

from omegaconf import OmegaConf

from pipeline.config import algorithm_checks, megatron_checks
from pipeline.config.algorithms import OFFLINE, ONLINE
from pipeline.config.errors import RecipeError
from pipeline.config.layout import asked_backend, check_divides, check_layout
from pipeline.config.models import check_reward_model
from pipeline.config.schema import PRECISIONS, PolicyConfig, Recipe, generates, section

CHOICES = {
    "algorithm": (*ONLINE, *OFFLINE),
    "policy.precision": tuple(PRECISIONS),
    "policy.generation.backend": ("vllm", "transformers"),
    "policy.generation.refit_transport": ("planned", "delta", "broadcast"),
    "data.overlong_prompts": ("error", "drop"),
    "data.bad_records": ("error", "drop"),
    "cluster.executor": ("auto", "slurm", "local"),
}

AT_LEAST = {
    "policy.train_global_batch_size": 1,
    "policy.train_micro_batch_size": 1,
    "policy.logprob_batch_size": 1,
    "policy.max_total_sequence_length": 2,
    "policy.dtensor_cfg.tensor_parallel_size": 1,
    "policy.sequence_packing.train_mb_tokens": 1,
    "policy.sequence_packing.logprob_mb_tokens": 1,
    "policy.generation.max_new_tokens": 1,
    "policy.generation.max_num_seqs": 1,
    "policy.generation.vllm_cfg.tensor_parallel_size": 1,
    "policy.generation.vllm_cfg.pipeline_parallel_size": 1,
    "policy.generation.vllm_cfg.expert_parallel_size": 1,
    "policy.generation.refit_cfg.bucket_bytes": 1,
    "checkpointing.save_period": 1,
    "cluster.train.nodes": 1,
    "cluster.generate.nodes": 1,
    "cluster.network.nic_gb_per_s": 1e-3,
    "cluster.network.node_gb_per_s": 1e-3,
    "cluster.network.memory_gb_per_s": 1e-3,
    "cluster.network.latency_us": 0,
}


def validate(recipe: Recipe) -> None:
    """What the recipe says against itself. Raises RecipeError with the key and what would be right.

    What depends on the train backend is only checked once that is chosen: `launch/backend.py` calls this again.
    """
    config = OmegaConf.structured(recipe)
    for key, choices in (CHOICES | algorithm_checks.CHOICES | megatron_checks.CHOICES).items():
        if (value := OmegaConf.select(config, key)) not in choices:
            raise RecipeError(f"{key}: '{value}' is not one of: {', '.join(str(c) for c in choices if c is not None)}")
    for key, least in (AT_LEAST | algorithm_checks.AT_LEAST | megatron_checks.AT_LEAST).items():
        value = OmegaConf.select(config, key)
        if value is not None and value < least:  # what may not be null, the schema has refused
            raise RecipeError(f"{key}: {value} is too small; at least {least}")
    algorithm_checks.check_algorithm(recipe)
    _check_packing(recipe.policy)
    _check_world(recipe)
    _check_validation(recipe)
    if generates(recipe):
        _check_sampling(recipe)


def _check_packing(policy: PolicyConfig) -> None:
    for key in ("train_mb_tokens", "logprob_mb_tokens"):
        tokens = getattr(policy.sequence_packing, key)
        if policy.sequence_packing.enabled and tokens < policy.max_total_sequence_length:
            raise RecipeError(
                f"policy.sequence_packing.{key}: {tokens} cannot hold one sequence of policy.max_total_sequence_length"
                f" {policy.max_total_sequence_length}; at least that"
            )


def _check_world(recipe: Recipe) -> None:
    check_reward_model(recipe)
    if asked_backend(recipe.policy) == "megatron":
        megatron_checks.check_megatron(recipe.policy)
    check_layout(recipe)
    if generates(recipe):
        _check_engine(recipe)
    if recipe.policy.generation.colocated.enabled:
        raise RecipeError(
            "policy.generation.colocated.enabled: true is not supported yet; train and generate ranks are disjoint"
        )


def _check_engine(recipe: Recipe) -> None:
    generation, key = recipe.policy.generation, "policy.generation.vllm_cfg"
    tensor, stages = generation.vllm_cfg.tensor_parallel_size, generation.vllm_cfg.pipeline_parallel_size
    expert = generation.vllm_cfg.expert_parallel_size
    if generation.backend == "transformers":
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"):
            if getattr(generation.vllm_cfg, name) > 1:
                raise RecipeError(f"{key}.{name}: the transformers backend keeps a whole model on each rank; it must be 1")
    product = (
        f"{key}.tensor_parallel_size"
        if stages == 1
        else f"{key}: tensor_parallel_size {tensor} x pipeline_parallel_size {stages}"
    )
    check_divides(product, tensor * stages, recipe.cluster.generate, "generate")
    if expert not in (1, tensor):
        raise RecipeError(
            f"{key}.expert_parallel_size: {expert}, but vLLM spreads experts over the ranks of tensor_parallel_size {tensor},"
            f" or cuts each of them over those; {tensor} or 1"
        )


def _check_validation(recipe: Recipe) -> None:
    wanted = [key for key in ("val_period", "val_at_start", "val_at_end") if getattr(section(recipe), key)]
    if wanted and recipe.data.validation is None:
        raise RecipeError(
            f"{recipe.algorithm}.{wanted[0]}: there is nothing to validate on; data.validation must name a data set"
        )


def _check_sampling(recipe: Recipe) -> None:
    generation = recipe.policy.generation
    if generation.top_p != 1.0 or generation.top_k is not None:
        raise RecipeError(
            "policy.generation.top_p, top_k: training needs log-probs of the distribution that was sampled from, and the train"
            " backend computes those of the full one; leave top_p at 1.0 and top_k at null"
        )
    if generation.temperature <= 0:
        raise RecipeError(
            f"policy.generation.temperature: {generation.temperature} has no log-probs to train on; it must be above 0"
        )
    if generation.vllm_cfg.max_model_len < recipe.policy.max_total_sequence_length:
        raise RecipeError(
            f"policy.generation.vllm_cfg.max_model_len: {generation.vllm_cfg.max_model_len} is below"
            f" policy.max_total_sequence_length {recipe.policy.max_total_sequence_length}"
        )
    if recipe.data.train.env_name not in recipe.env:
        raise RecipeError(
            f"data.train.env_name: '{recipe.data.train.env_name}' is not a key under env;"
            f" there are: {', '.join(recipe.env) or 'none'}"
        )
