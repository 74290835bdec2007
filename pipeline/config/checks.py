"""What a recipe says against itself, before anything is loaded. What needs the model's files is in `launch/preflight.py`."""

from __future__ import annotations

from omegaconf import OmegaConf

from pipeline.config.schema import Recipe, generates, ranks, ranks_per_node


class RecipeError(ValueError):
    """Something in the recipe is wrong; the message says what, where, and what would be right."""


CHOICES = {
    "algorithm": ("grpo", "sft"),
    "policy.precision": ("float32", "bfloat16"),
    "policy.generation.backend": ("vllm", "transformers"),
    "policy.generation.refit_transport": ("broadcast",),
    "loss_fn.reference_policy_kl_type": ("k1", "k2", "k3"),
    "data.overlong_prompts": ("error", "drop"),
    "cluster.executor": ("auto", "slurm", "local"),
}

AT_LEAST = {
    "grpo.num_prompts_per_step": 1,
    "grpo.num_generations_per_prompt": 1,
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
    "policy.generation.refit_cfg.bucket_bytes": 1,
    "checkpointing.save_period": 1,
    "cluster.train.nodes": 1,
    "cluster.generate.nodes": 1,
}


def validate(recipe: Recipe) -> None:
    """What the recipe says against itself. Raises RecipeError with the key and what would be right."""
    config = OmegaConf.structured(recipe)
    for key, choices in CHOICES.items():
        if (value := OmegaConf.select(config, key)) not in choices:
            raise RecipeError(f"{key}: '{value}' is not one of: {', '.join(choices)}")
    for key, least in AT_LEAST.items():
        if (value := OmegaConf.select(config, key)) < least:
            raise RecipeError(f"{key}: {value} is too small; at least {least}")
    _check_batch(recipe)
    _check_world(recipe)
    _check_validation(recipe)
    if generates(recipe):
        _check_sampling(recipe)


def _check_batch(recipe: Recipe) -> None:
    policy = recipe.policy
    if recipe.algorithm == "grpo":
        samples = recipe.grpo.num_prompts_per_step * recipe.grpo.num_generations_per_prompt
        if samples % policy.train_global_batch_size:
            raise RecipeError(
                f"policy.train_global_batch_size: {policy.train_global_batch_size} does not divide the {samples} samples of a"
                f" step (grpo.num_prompts_per_step {recipe.grpo.num_prompts_per_step} x grpo.num_generations_per_prompt"
                f" {recipe.grpo.num_generations_per_prompt}); {samples} makes it one update per step"
            )
        if recipe.grpo.use_leave_one_out_baseline and recipe.grpo.num_generations_per_prompt < 2:
            raise RecipeError(
                "grpo.num_generations_per_prompt: 1 leaves nothing for a leave-one-out baseline; at least 2, or"
                " grpo.use_leave_one_out_baseline=false"
            )
    data_ranks = ranks(recipe.cluster.train) // policy.dtensor_cfg.tensor_parallel_size
    if data_ranks and policy.train_global_batch_size < data_ranks:
        raise RecipeError(
            f"policy.train_global_batch_size: {policy.train_global_batch_size} sequences cannot be shared among {data_ranks}"
            f" data-parallel ranks; at least {data_ranks}"
        )
    for key in ("train_mb_tokens", "logprob_mb_tokens"):
        tokens = getattr(policy.sequence_packing, key)
        if policy.sequence_packing.enabled and tokens < policy.max_total_sequence_length:
            raise RecipeError(
                f"policy.sequence_packing.{key}: {tokens} cannot hold one sequence of policy.max_total_sequence_length"
                f" {policy.max_total_sequence_length}; at least that"
            )


def _check_world(recipe: Recipe) -> None:
    cluster = recipe.cluster
    pairs = [("train", "policy.dtensor_cfg.tensor_parallel_size", recipe.policy.dtensor_cfg.tensor_parallel_size)]
    if generates(recipe):
        vllm = recipe.policy.generation.vllm_cfg
        pairs.append(("generate", "policy.generation.vllm_cfg.tensor_parallel_size", vllm.tensor_parallel_size))
    for realm, key, size in pairs:
        count = ranks(getattr(cluster, realm))
        if count % size:
            raise RecipeError(
                f"{key}: {size} does not divide the {count} ranks of cluster.{realm} (nodes {getattr(cluster, realm).nodes} x"
                f" {ranks_per_node(getattr(cluster, realm))} per node); one of {_divisors(count)} would"
            )
    if not recipe.policy.dtensor_cfg.enabled:
        raise RecipeError("policy.dtensor_cfg.enabled: false leaves no training backend; FSDP2/DTensor is the only one so far")
    if recipe.policy.generation.colocated.enabled:
        raise RecipeError(
            "policy.generation.colocated.enabled: true is not supported yet; train and generate ranks are disjoint"
        )


def _check_validation(recipe: Recipe) -> None:
    section = getattr(recipe, recipe.algorithm)
    wanted = [key for key in ("val_period", "val_at_start", "val_at_end") if getattr(section, key)]
    if wanted and recipe.data.validation is None:
        raise RecipeError(
            f"{recipe.algorithm}.{wanted[0]}: there is nothing to validate on; data.validation must name a data set"
        )


def _check_sampling(recipe: Recipe) -> None:
    generation = recipe.policy.generation
    if generation.backend == "transformers" and generation.vllm_cfg.tensor_parallel_size > 1:
        raise RecipeError(
            "policy.generation.vllm_cfg.tensor_parallel_size: the transformers backend keeps a whole model on each rank;"
            " it must be 1"
        )
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


def _divisors(n: int) -> str:
    return ", ".join(str(k) for k in range(1, n + 1) if n % k == 0)
