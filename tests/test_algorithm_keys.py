"""Contradictory keys of the algorithms: each is named, with what would be right; what only looks alike is let through."""

import pytest
from omegaconf import OmegaConf

from pipeline import config
from pipeline.config import RecipeError

IS = "loss_fn.use_importance_sampling_correction=true"
TRUNCATED = "loss_fn.truncated_importance_sampling"
LORA = "policy.dtensor_cfg.lora_cfg"
DYNAMIC = "use_dynamic_sampling=true"
RPP = "grpo.adv_estimator.name=reinforce_plus_plus"
SEQUENCES = ["loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false"]
CISPO = "loss_fn.use_cispo=true"


# A small recipe of one update a step, 8 prompts of 4 answers.
SAMPLES = {"num_prompts_per_step": 8, "num_generations_per_prompt": 4}
BASE = {
    "name": "small",
    "run_dir": "runs/small",
    "policy": {"model_name": "x", "train_global_batch_size": 32},
    "teacher": {"model_name": "t"},
    "data": {"train": {"env_name": "e"}},
    "env": {"e": {"kind": "math"}},
    "grpo": SAMPLES,
    "ppo": SAMPLES,
    "distillation": SAMPLES,
}


def complete(algorithm: str, overrides: list[str]) -> config.Recipe:
    given = OmegaConf.from_dotlist([f"algorithm={algorithm}", *overrides])
    return config.complete(OmegaConf.to_container(OmegaConf.merge(BASE, given)))


def both(suffix: str, override: str, *parts: str) -> list[tuple[str, list[str], list[str]]]:
    """The same of grpo and ppo."""
    return [(name, [f"{name}.{o}" for o in override.split()], [f"{name}.{suffix}", *parts]) for name in ("grpo", "ppo")]


REFUSED = [
    # ---- the policy's loss
    (
        "grpo",
        ["loss_fn.sequence_level_importance_ratios=true"],
        ["loss_fn.sequence_level_importance_ratios", "token_level_loss=false"],
    ),
    (
        "ppo",
        ["loss_fn.sequence_level_importance_ratios=true"],
        ["loss_fn.sequence_level_importance_ratios", "token_level_loss=false"],
    ),
    ("grpo", ["loss_fn.ratio_clip_c=1.0"], ["loss_fn.ratio_clip_c", "1.0", "above 1"]),
    ("grpo", ["loss_fn.ratio_clip_max=-0.1"], ["loss_fn.ratio_clip_max", "at least 0"]),
    ("grpo", ["loss_fn.entropy_coeff=-1"], ["loss_fn.entropy_coeff", "at least 0"]),
    ("grpo", ["loss_fn.reference_policy_kl_type=k4"], ["loss_fn.reference_policy_kl_type", "k1, k2, k3"]),
    ("grpo", ["loss_fn.reference_policy_kl_penalty=-1"], ["loss_fn.reference_policy_kl_penalty", "at least 0"]),
    ("grpo", [CISPO, "loss_fn.disable_ppo_ratio=true"], ["loss_fn.disable_ppo_ratio", "use_cispo"]),
    ("grpo", [CISPO, "loss_fn.force_on_policy_ratio=true"], ["loss_fn.force_on_policy_ratio", "use_cispo"]),
    ("grpo", [CISPO, *SEQUENCES], ["loss_fn.sequence_level_importance_ratios", "use_cispo"]),
    ("grpo", [CISPO, "loss_fn.ratio_clip_c=3"], ["loss_fn.ratio_clip_c", "null"]),
    ("ppo", [CISPO, "loss_fn.token_level_loss=false"], ["loss_fn.token_level_loss", "mean over tokens"]),
    # ---- importance sampling
    ("grpo", [f"{TRUNCATED}_type=clip"], [f"{TRUNCATED}_type", "'clip'", "tis, icepop, seq-mask-tis"]),
    ("grpo", [f"{TRUNCATED}_type=tis", f"{TRUNCATED}_ratio=2"], [f"{TRUNCATED}_type", "use_importance_sampling_correction"]),
    ("grpo", [IS, f"{TRUNCATED}_type=tis"], [f"{TRUNCATED}_ratio", "null", "above 0"]),
    ("grpo", [IS, f"{TRUNCATED}_ratio=2"], [f"{TRUNCATED}_ratio", "without", "_type"]),
    ("grpo", [IS, f"{TRUNCATED}_ratio_min=0.5"], [f"{TRUNCATED}_ratio_min", "without", "_type"]),
    *[
        ("ppo", [IS, f"{TRUNCATED}_type={kind}", f"{TRUNCATED}_ratio=2"], [f"{TRUNCATED}_ratio_min", "lower bound"])
        for kind in ("icepop", "seq-mask-tis")
    ],
    (
        "grpo",
        [IS, f"{TRUNCATED}_type=tis", f"{TRUNCATED}_ratio=2", f"{TRUNCATED}_ratio_min=3"],
        [f"{TRUNCATED}_ratio_min", "above"],
    ),
    (
        "grpo",
        [IS, *SEQUENCES, f"{TRUNCATED}_type=seq-mask-tis", f"{TRUNCATED}_ratio=1.1", f"{TRUNCATED}_ratio_min=0.9"],
        [f"{TRUNCATED}_type", "sequence_level_importance_ratios", "tis or icepop"],
    ),
    *both("seq_logprob_error_threshold", "seq_logprob_error_threshold=0.5", "at least 1"),
    # ---- more than one update
    (
        "grpo",
        ["loss_fn.force_on_policy_ratio=true", "policy.train_global_batch_size=16"],
        ["loss_fn.force_on_policy_ratio", "2 updates", "policy.train_global_batch_size=32"],
    ),
    ("ppo", ["loss_fn.force_on_policy_ratio=true", "ppo.ppo_epochs=2"], ["loss_fn.force_on_policy_ratio", "ppo.ppo_epochs 2"]),
    *[
        (
            name,
            ["policy.train_global_batch_size=12"],
            ["policy.train_global_batch_size", "12 does not divide", f"{name}.num_prompts"],
        )
        for name in ("grpo", "ppo", "distillation")
    ],
    # ---- KL in the reward
    (
        "grpo",
        ["loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_penalty=0.1"],
        ["use_kl_in_reward", "reinforce_plus_plus"],
    ),
    ("grpo", ["loss_fn.use_kl_in_reward=true", RPP], ["loss_fn.use_kl_in_reward", "reference_policy_kl_penalty is 0"]),
    ("ppo", ["loss_fn.use_kl_in_reward=true"], ["loss_fn.use_kl_in_reward", "reference_policy_kl_penalty is 0"]),
    # ---- groups
    (
        "grpo",
        ["grpo.num_generations_per_prompt=1", "policy.train_global_batch_size=8"],
        ["num_generations_per_prompt", "leave-one-out"],
    ),
    (
        "grpo",
        ["grpo.num_generations_per_prompt=1", "policy.train_global_batch_size=8", RPP],
        ["grpo.num_generations_per_prompt", "minus_baseline=false"],
    ),
    *[
        (
            name,
            [f"{name}.{DYNAMIC}", f"{name}.num_generations_per_prompt=1", "policy.train_global_batch_size=8"],
            [f"{name}.use_dynamic_sampling", f"{name}.num_generations_per_prompt is 1"],
        )
        for name in ("grpo", "ppo")
    ],
    *both("batch_multiplier", "batch_multiplier=2", "use_dynamic_sampling=true"),
    *both("batch_multiplier", f"batch_multiplier=0.5 {DYNAMIC}", "at least 1"),
    *both("dynamic_sampling_max_gen_batches", f"dynamic_sampling_max_gen_batches=0 {DYNAMIC}", "at least 1"),
    # ---- rewards and advantages
    *both("reward_scaling.source_min", "reward_scaling.enabled=true reward_scaling.source_min=1", "source_max 1.0"),
    *both(
        "reward_shaping.stop_properly_penalty_coef",
        "reward_shaping.enabled=true reward_shaping.stop_properly_penalty_coef=1.5",
        "in [0, 1]",
    ),
    *both(
        "reward_shaping.stop_properly_penalty_coef",
        "reward_shaping.enabled=true reward_shaping.stop_properly_penalty_coef=0"
        " reward_scaling.enabled=true reward_scaling.target_min=-1",
        "reward of a cut wrong answer larger",
    ),
    *both(
        "reward_shaping.overlong_buffer_length",
        "reward_shaping.enabled=true reward_shaping.overlong_buffer_length=64 reward_shaping.max_response_length=64",
        "max_response_length 64",
    ),
    (
        "grpo",
        ["grpo.advantage_clip_low=1", "grpo.advantage_clip_high=-1"],
        ["grpo.advantage_clip_low", "grpo.advantage_clip_high"],
    ),
    ("grpo", ["grpo.adv_estimator.name=gae"], ["grpo.adv_estimator.name", "grpo, reinforce_plus_plus"]),
    # ---- ppo
    *[
        ("ppo", [f"ppo.adv_estimator.{key}={value}"], [f"ppo.adv_estimator.{key}", "in [0, 1]"])
        for key in ("gae_gamma", "gae_lambda", "gae_lambda_value", "gae_lambda_policy")
        for value in (-0.1, 1.1)
    ],
    (
        "ppo",
        ["ppo.adv_estimator.length_adaptive_alpha=0.05", "ppo.adv_estimator.gae_lambda_policy=0.9"],
        ["ppo.adv_estimator.gae_lambda_policy", "length_adaptive_alpha"],
    ),
    ("ppo", ["ppo.adv_estimator.name=raw_reward"], ["ppo.adv_estimator.name", "gae"]),
    (
        "ppo",
        ["ppo.policy_training_start_step=10", "ppo.max_num_steps=10"],
        ["ppo.policy_training_start_step", "max_num_steps 10"],
    ),
    ("ppo", ["value.model_name=''"], ["value.model_name", "critic"]),
    ("ppo", ["value_loss_fn.cliprange=0"], ["value_loss_fn.cliprange", "null"]),
    ("ppo", ["ppo.ppo_epochs=0"], ["ppo.ppo_epochs", "at least 1"]),
    # ---- distillation
    ("distillation", ["teacher.model_name=null"], ["teacher.model_name"]),
    ("distillation", ["distillation.topk_logits_k=0"], ["distillation.topk_logits_k", "at least 1"]),
    ("distillation", ["loss_fn.kl_type=jensen"], ["loss_fn.kl_type", "forward, reverse, mixed"]),
    ("distillation", ["loss_fn.mixed_kl_weight=1.5"], ["loss_fn.mixed_kl_weight", "in [0, 1]"]),
    # ---- preferences
    ("dpo", ["dpo.preference_loss=hinge"], ["dpo.preference_loss", "sigmoid, ipo"]),
    ("dpo", ["dpo.reference_policy_kl_penalty=0"], ["dpo.reference_policy_kl_penalty", "above 0"]),
    ("dpo", ["dpo.label_smoothing=0.5"], ["dpo.label_smoothing", "[0, 0.5)"]),
    ("dpo", ["dpo.label_smoothing=0.1", "dpo.preference_loss=ipo"], ["dpo.label_smoothing", "sigmoid"]),
    ("dpo", ["dpo.preference_loss_weight=0"], ["dpo.preference_loss_weight", "sft_loss_weight"]),
    ("dpo", ["dpo.sft_loss_weight=-1"], ["dpo.sft_loss_weight", "at least 0"]),
    *[
        (name, ["policy.sequence_packing.train_mb_tokens=1000"], ["policy.sequence_packing.train_mb_tokens", "pair", "1024"])
        for name in ("dpo", "rm")
    ],
    ("dpo", ["policy.sequence_packing.logprob_mb_tokens=1000"], ["policy.sequence_packing.logprob_mb_tokens", "pair", "1024"]),
    ("rm", ["data.train.chosen_key=answer", "data.train.rejected_key=answer"], ["data.train.rejected_key", "'answer'"]),
    ("dpo", ["data.train.dataset_name=scratchpad_addition"], ["data.train.dataset_name", "scratchpad_preferences"]),
    # ---- adapters
    ("sft", [f"{LORA}.enabled=true", "policy.megatron_cfg.enabled=true"], [f"{LORA}.enabled", "FSDP2"]),
    ("sft", [f"{LORA}.enabled=true", f"{LORA}.target_modules=[q_proj]"], [f"{LORA}.target_modules", "match_all_linear"]),
    ("sft", [f"{LORA}.enabled=true", f"{LORA}.match_all_linear=false"], [f"{LORA}.target_modules", "match_all_linear"]),
    (
        "sft",
        [f"{LORA}.enabled=true", "policy.dtensor_cfg.tensor_parallel_size=2", "cluster.train.ranks_per_node=2"],
        [f"{LORA}.enabled", "policy.dtensor_cfg.tensor_parallel_size=2 must be 1"],
    ),
    ("sft", [f"{LORA}.dim=0"], [f"{LORA}.dim", "at least 1"]),
    ("sft", [f"{LORA}.lora_A_init=zeros"], [f"{LORA}.lora_A_init", "xavier, gaussian, kaiming"]),
    # ---- reward models
    ("grpo", ["env.e.kind=reward_model"], ["env.e.model_name"]),
    ("grpo", ["env.e.kind=reward_model", "env.e.model_name=r", "env.e.served_by=nobody"], ["env.e.served_by", "train, reward"]),
    (
        "grpo",
        ["env.e.kind=reward_model", "env.e.model_name=r", "env.f.kind=reward_model", "env.f.model_name=r"],
        ["env", "e and f", "one"],
    ),
    ("poetry", [], ["algorithm", "grpo, ppo, distillation, sft, dpo, rm"]),
]


@pytest.mark.parametrize(
    ("algorithm", "overrides", "says"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else value
)
def test_contradictions_are_named(algorithm, overrides, says):
    with pytest.raises(RecipeError) as error:
        complete(algorithm, overrides)
    message = str(error.value)
    assert says[0] in message.partition(": ")[0], message
    assert [part for part in says if part not in message] == [], message


@pytest.mark.parametrize(
    ("algorithm", "overrides"),
    [
        *[(name, []) for name in ("grpo", "ppo", "distillation", "sft", "dpo", "rm")],
        ("grpo", SEQUENCES),
        ("grpo", [CISPO, "loss_fn.ratio_clip_min=1", "loss_fn.ratio_clip_max=5"]),
        ("grpo", ["loss_fn.ratio_clip_c=3"]),
        ("sft", ["loss_fn.ratio_clip_c=0.5"]),  # never read
        ("grpo", ["loss_fn.force_on_policy_ratio=true"]),
        ("grpo", [RPP, "loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_penalty=0.1"]),
        ("ppo", ["loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_penalty=0.1"]),
        ("grpo", [f"grpo.{DYNAMIC}", "grpo.batch_multiplier=1.5"]),
        ("ppo", ["ppo.num_generations_per_prompt=1", "policy.train_global_batch_size=4", "ppo.ppo_epochs=4"]),
        ("grpo", [IS, f"{TRUNCATED}_type=tis", f"{TRUNCATED}_ratio=2"]),
        ("grpo", [IS, *SEQUENCES, f"{TRUNCATED}_type=icepop", f"{TRUNCATED}_ratio=2", f"{TRUNCATED}_ratio_min=0.5"]),
        ("dpo", ["dpo.preference_loss=ipo", "dpo.reference_free=true", "dpo.label_smoothing=0"]),
        ("dpo", ["policy.sequence_packing.train_mb_tokens=1024"]),
        ("sft", [f"{LORA}.enabled=true", f"{LORA}.match_all_linear=false", f"{LORA}.target_modules=[q_proj]"]),
        ("grpo", ["env.e.kind=reward_model", "env.e.model_name=r"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_what_is_fine_is_let_through(algorithm, overrides):
    assert complete(algorithm, overrides).algorithm == algorithm
