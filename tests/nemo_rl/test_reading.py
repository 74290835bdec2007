"""Their chain of defaults, their `${...}`, and overrides from the command line."""

from __future__ import annotations

from tests.nemo_rl.test_translation import inspect, read


def test_the_chain_of_defaults() -> None:
    recipe = read("ppo")  # over grpo_megatron over grpo
    assert recipe.algorithm == "ppo" and recipe.policy.megatron_cfg.enabled
    assert recipe.policy.train_global_batch_size == 32 and recipe.cluster.train.nodes == 2


def test_override_replaces() -> None:
    loss = read("distillation").loss_fn  # `_override_`: nothing of grpo.yaml's
    assert loss.kl_type == "reverse" and loss.ratio_clip_max == 0.2


def test_the_command_line_is_applied_before_references_resolve() -> None:
    loaded = inspect("grpo", "policy.max_total_sequence_length=2048")
    policy = loaded.recipe.policy
    assert policy.generation.max_new_tokens == policy.generation.vllm_cfg.max_model_len == 2048
    assert policy.sequence_packing.train_mb_tokens == 2 * 2048
    assert loaded.origins["policy.max_total_sequence_length"] == "the command line"


def test_the_command_line_may_have_our_keys() -> None:
    recipe = read("grpo", "cluster.train.partition=gpus", "run_dir=elsewhere", "plan.prompt_tokens=100")
    assert recipe.cluster.train.partition == recipe.cluster.generate.partition == "gpus" and recipe.run_dir.endswith(
        "/elsewhere"
    )


def test_origins_name_their_line_and_key() -> None:
    origins = inspect("grpo").origins
    assert origins["cluster.train.nodes"].endswith("(cluster.num_nodes)")
    assert origins["policy.model_name"].rpartition(":")[0].endswith("grpo.yaml")
    assert origins["data.train.prompt_file"].endswith("(data.default.prompt_file)")
