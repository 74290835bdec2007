"""Contradictory keys of the algorithms are refused by key and code; similar valid ones are accepted."""

import pytest
from omegaconf import OmegaConf

from pipeline import config
from pipeline.algorithms import ALGORITHMS, ahead, read_by
from pipeline.algorithms.grpo import GRPO
from pipeline.algorithms.rewarded import RewardedAlgorithm
from tests.problems import refused

IS = "loss_fn.use_importance_sampling_correction=true"
TRUNCATED = "loss_fn.truncated_importance_sampling"
LORA = "policy.dtensor_cfg.lora_cfg"
DYNAMIC = "use_dynamic_sampling=true"
RPP = "grpo.adv_estimator.name=reinforce_plus_plus"
SEQUENCES = "loss_fn.sequence_level_importance_ratios=true loss_fn.token_level_loss=false"
CISPO = "loss_fn.use_cispo=true"
SAPO = "loss_fn.use_sapo=true loss_fn.token_level_loss=false"
ALONE = "num_generations_per_prompt=1 policy.train_global_batch_size=8"
KL_IN_REWARD = "loss_fn.use_kl_in_reward=true loss_fn.reference_policy_kl_penalty=0.1"
ON_POLICY = "loss_fn.force_on_policy_ratio=true"
ENGINES = "loss_fn.use_generation_logprobs=true"
JUDGE = "env.e.kind=reward_model env.e.model_name=r"
LOSS_FN = " ".join(name for name, kind in ALGORITHMS.items() if issubclass(kind, RewardedAlgorithm))


# A small recipe: one update a step, 8 prompts with 4 answers each.
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

# (algorithms, overrides, key, code); * stands for the algorithm
REFUSED = [
    # ---- the policy's loss
    ("grpo ppo", "loss_fn.use_dppo=true loss_fn.ratio_clip_c=3", "loss_fn.ratio_clip_c", "contradiction"),
    (
        "grpo ppo",
        "loss_fn.sequence_level_importance_weights=true",
        "loss_fn.sequence_level_importance_weights",
        "has-no-effect",
    ),
    ("grpo ppo", "loss_fn.sequence_level_importance_ratios=true", "loss_fn.sequence_level_importance_ratios", "contradiction"),
    (
        "grpo ppo",
        "loss_fn.reference_policy_kl_gradient=estimate loss_fn.reference_policy_kl_type=k1",
        "loss_fn.reference_policy_kl_gradient",
        "contradiction",
    ),
    (
        "grpo ppo",
        "loss_fn.reference_policy_kl_gradient=estimate loss_fn.use_on_policy_kl_approximation=true",
        "loss_fn.reference_policy_kl_gradient",
        "contradiction",
    ),
    (
        "ppo",
        "loss_fn.reference_policy_kl_gradient=estimate loss_fn.use_kl_in_reward=true loss_fn.reference_policy_kl_penalty=0.1",
        "loss_fn.reference_policy_kl_gradient",
        "contradiction",
    ),
    ("grpo", f"{CISPO} loss_fn.disable_ppo_ratio=true", "loss_fn.disable_ppo_ratio", "contradiction"),
    ("grpo", f"{CISPO} {ON_POLICY}", "loss_fn.force_on_policy_ratio", "contradiction"),
    ("grpo", f"{CISPO} loss_fn.ratio_clip_c=3", "loss_fn.ratio_clip_c", "contradiction"),
    ("ppo", f"{CISPO} loss_fn.token_level_loss=false", "loss_fn.token_level_loss", "contradiction"),
    ("grpo", "loss_fn.use_sapo=true", "loss_fn.token_level_loss", "contradiction"),
    ("grpo", f"{SAPO} {CISPO} loss_fn.ratio_clip_c=null", "loss_fn.use_cispo", "contradiction"),
    ("grpo", f"{SAPO} loss_fn.disable_ppo_ratio=true", "loss_fn.disable_ppo_ratio", "contradiction"),
    ("ppo", "loss_fn.sapo_temperature_negative=2", "loss_fn.sapo_temperature_negative", "has-no-effect"),
    ("grpo", "loss_fn.drift_penalty=0.1", "loss_fn.drift_penalty", "has-no-effect"),
    ("grpo", "loss_fn.custom=my.loss grpo.advantage_clip_high=1", "grpo.advantage_clip_high", "has-no-effect"),
    ("dpo", "dpo.preference_loss=orpo", "dpo.sft_loss_weight", "contradiction"),
    # ---- importance sampling
    ("grpo", f"{TRUNCATED}_type=tis {TRUNCATED}_ratio=2", f"{TRUNCATED}_type", "has-no-effect"),
    ("grpo", f"{IS} {TRUNCATED}_type=tis", f"{TRUNCATED}_ratio", "missing-value"),
    ("grpo", f"{IS} {TRUNCATED}_ratio=2", f"{TRUNCATED}_ratio", "has-no-effect"),
    ("grpo", f"{IS} {TRUNCATED}_ratio_min=0.5", f"{TRUNCATED}_ratio_min", "has-no-effect"),
    ("ppo", f"{IS} {TRUNCATED}_type=icepop {TRUNCATED}_ratio=2", f"{TRUNCATED}_ratio_min", "missing-value"),
    ("ppo", f"{IS} {TRUNCATED}_type=seq-mask-tis {TRUNCATED}_ratio=2", f"{TRUNCATED}_ratio_min", "missing-value"),
    (
        "grpo",
        f"{IS} {TRUNCATED}_type=tis {TRUNCATED}_ratio=2 {TRUNCATED}_ratio_min=3",
        f"{TRUNCATED}_ratio_min",
        "too-large",
    ),
    (
        "grpo",
        f"{IS} {SEQUENCES} {TRUNCATED}_type=seq-mask-tis {TRUNCATED}_ratio=1.1 {TRUNCATED}_ratio_min=0.9",
        f"{TRUNCATED}_type",
        "contradiction",
    ),
    # ---- more than one update
    ("grpo", f"{ON_POLICY} policy.train_global_batch_size=16", "loss_fn.force_on_policy_ratio", "contradiction"),
    ("ppo", f"{ON_POLICY} ppo.ppo_epochs=2", "loss_fn.force_on_policy_ratio", "contradiction"),
    ("grpo ppo distillation", "policy.train_global_batch_size=12", "policy.train_global_batch_size", "not-divisible"),
    # ---- log-probs of the engines in place of those of pi_old
    ("grpo ppo", f"{ENGINES} {IS}", "loss_fn.use_importance_sampling_correction", "contradiction"),
    ("grpo", f"{ENGINES} {ON_POLICY}", "loss_fn.force_on_policy_ratio", "contradiction"),
    ("grpo ppo", f"{ENGINES} loss_fn.disable_ppo_ratio=true", "loss_fn.disable_ppo_ratio", "contradiction"),
    ("grpo ppo", f"{ENGINES} *.seq_logprob_error_threshold=2", "*.seq_logprob_error_threshold", "contradiction"),
    ("ppo", f"{ENGINES} {KL_IN_REWARD}", "loss_fn.use_kl_in_reward", "contradiction"),
    # ---- KL in the reward
    ("grpo", KL_IN_REWARD, "loss_fn.use_kl_in_reward", "contradiction"),
    ("grpo", f"loss_fn.use_kl_in_reward=true {RPP}", "loss_fn.use_kl_in_reward", "has-no-effect"),
    ("ppo", "loss_fn.use_kl_in_reward=true", "loss_fn.use_kl_in_reward", "has-no-effect"),
    # ---- groups
    ("grpo", f"grpo.{ALONE}", "grpo.num_generations_per_prompt", "too-small"),
    ("grpo", f"grpo.{ALONE} {RPP}", "grpo.num_generations_per_prompt", "too-small"),
    ("ppo", f"ppo.{DYNAMIC} ppo.{ALONE}", "ppo.use_dynamic_sampling", "contradiction"),
    (
        "grpo",
        f"grpo.{DYNAMIC} grpo.{ALONE} {RPP} grpo.adv_estimator.minus_baseline=false",
        "grpo.use_dynamic_sampling",
        "contradiction",
    ),
    ("grpo ppo", "*.batch_multiplier=2", "*.batch_multiplier", "has-no-effect"),
    # ---- rewards and advantages
    (
        "grpo ppo",
        "*.reward_scaling.enabled=true *.reward_scaling.source_min=1",
        "*.reward_scaling.source_min",
        "too-large",
    ),
    (
        "grpo ppo",
        "*.reward_shaping.enabled=true *.reward_shaping.stop_properly_penalty_coef=0"
        " *.reward_scaling.enabled=true *.reward_scaling.target_min=-1",
        "*.reward_shaping.stop_properly_penalty_coef",
        "contradiction",
    ),
    (
        "grpo ppo",
        "*.reward_shaping.enabled=true *.reward_shaping.overlong_buffer_length=64 *.reward_shaping.max_response_length=64",
        "*.reward_shaping.overlong_buffer_length",
        "too-large",
    ),
    ("grpo", "grpo.advantage_clip_low=1 grpo.advantage_clip_high=-1", "grpo.advantage_clip_low", "too-large"),
    # ---- ppo
    (
        "ppo",
        "ppo.adv_estimator.length_adaptive_alpha=0.05 ppo.adv_estimator.gae_lambda_policy=0.9",
        "ppo.adv_estimator.gae_lambda_policy",
        "contradiction",
    ),
    ("ppo", "ppo.adv_estimator.name=raw_reward", "ppo.adv_estimator.name", "unsupported"),
    ("ppo", "ppo.policy_training_start_step=10 ppo.max_num_steps=10", "ppo.policy_training_start_step", "too-large"),
    ("ppo", "value.model_name=''", "value.model_name", "missing-value"),
    # ---- distillation
    ("distillation", "teacher.model_name=null", "teacher.model_name", "missing-value"),
    # ---- preferences
    ("dpo", "dpo.label_smoothing=0.1 dpo.preference_loss=ipo", "dpo.label_smoothing", "has-no-effect"),
    ("dpo", "dpo.target_margin=0.5 dpo.preference_loss=orpo dpo.sft_loss_weight=1", "dpo.target_margin", "has-no-effect"),
    ("dpo", "dpo.preference_loss_weight=0", "dpo.preference_loss_weight", "contradiction"),
    ("dpo rm", "policy.sequence_packing.train_mb_tokens=1000", "policy.sequence_packing.train_mb_tokens", "too-small"),
    ("dpo", "policy.sequence_packing.logprob_mb_tokens=1000", "policy.sequence_packing.logprob_mb_tokens", "too-small"),
    ("rm", "data.train.chosen_key=answer data.train.rejected_key=answer", "data.train.rejected_key", "contradiction"),
    ("dpo", "data.train.dataset_name=scratchpad_addition", "data.train.dataset_name", "unsupported"),
    ("grpo", "loss_fn.top_entropy_quantile=0.2 grpo.advantage_clip_low=0.1", "loss_fn.top_entropy_quantile", "contradiction"),
    ("kto", "policy.train_global_batch_size=1", "policy.train_global_batch_size", "too-small"),
    ("kto", "kto.desirable_weight=0 kto.undesirable_weight=0", "kto.desirable_weight", "contradiction"),
    ("kto", "data.train.dataset_name=gsm8k", "data.train.dataset_name", "unsupported"),
    ("sft", "data.train.label_key=good", "data.train.label_key", "unsupported"),
    ("grpo kto rm", "data.train.text_key=text", "data.train.text_key", "unsupported"),
    # ---- adapters
    ("sft", f"{LORA}.enabled=true policy.megatron_cfg.enabled=true", f"{LORA}.enabled", "unsupported"),
    ("sft", f"{LORA}.enabled=true {LORA}.target_modules=[q_proj]", f"{LORA}.target_modules", "contradiction"),
    ("sft", f"{LORA}.enabled=true {LORA}.match_all_linear=false", f"{LORA}.target_modules", "missing-value"),
    # ---- reward models
    ("grpo", "env.e.kind=reward_model", "env.e.model_name", "missing-value"),
    ("grpo", f"{JUDGE} env.f.kind=reward_model env.f.model_name=r", "env", "contradiction"),
    ("poetry", "", "algorithm", "not-a-choice"),
]


def complete(algorithm: str, overrides: str) -> config.Recipe:
    given = OmegaConf.from_dotlist([f"algorithm={algorithm}", *overrides.replace("*", algorithm).split()])
    return config.complete(OmegaConf.to_container(OmegaConf.merge(BASE, given)))


@pytest.mark.parametrize(
    ("algorithm", "overrides", "key", "code"),
    [(name, overrides, key, code) for names, overrides, key, code in REFUSED for name in names.split()],
)
def test_contradictions_are_named(algorithm, overrides, key, code):
    with refused((key.replace("*", algorithm), code)):
        complete(algorithm, overrides)


def test_cispo_has_no_sequence_level_ratio():
    with refused(("loss_fn.sequence_level_importance_ratios", "contradiction"), ("loss_fn.token_level_loss", "contradiction")):
        complete("grpo", f"{CISPO} {SEQUENCES}")


def test_a_message_suggests_what_to_try():
    with refused(("loss_fn.force_on_policy_ratio", "contradiction")) as error:
        complete("grpo", f"{ON_POLICY} policy.train_global_batch_size=16")
    assert "Try policy.train_global_batch_size=32" in str(error.value)


@pytest.mark.parametrize(
    ("algorithm", "overrides"),
    [
        *[(name, "") for name in ALGORITHMS if name != "evaluate"],
        ("evaluate", "evaluate.tasks.text.kind=perplexity evaluate.tasks.text.format=wikitext"),
        ("grpo", SEQUENCES),
        ("grpo", f"{CISPO} loss_fn.ratio_clip_min=1 loss_fn.ratio_clip_max=5"),
        ("grpo", f"{SAPO} loss_fn.sapo_temperature_negative=2"),
        ("grpo", "loss_fn.ratio_clip_c=3"),
        ("sft", f"{CISPO} loss_fn.ratio_clip_c=3"),  # never read
        ("grpo", ON_POLICY),
        ("grpo", f"{ENGINES} policy.train_global_batch_size=16 {CISPO} grpo.async_grpo.enabled=true"),
        ("ppo", f"{ENGINES} {SEQUENCES} ppo.ppo_epochs=2 ppo.async_ppo.enabled=true"),
        ("grpo", f"{RPP} {KL_IN_REWARD}"),
        ("ppo", KL_IN_REWARD),
        ("grpo", f"grpo.{DYNAMIC} grpo.batch_multiplier=1.5"),
        ("ppo", "ppo.num_generations_per_prompt=1 policy.train_global_batch_size=4 ppo.ppo_epochs=4"),
        ("grpo", f"{IS} {TRUNCATED}_type=tis {TRUNCATED}_ratio=2"),
        ("grpo", f"{IS} {SEQUENCES} {TRUNCATED}_type=icepop {TRUNCATED}_ratio=2 {TRUNCATED}_ratio_min=0.5"),
        ("dpo", "dpo.preference_loss=ipo dpo.reference_free=true dpo.label_smoothing=0"),
        ("dpo", "policy.sequence_packing.train_mb_tokens=1024"),
        ("sft", f"{LORA}.enabled=true {LORA}.match_all_linear=false {LORA}.target_modules=[q_proj]"),
        ("sft", "data.train.text_key=text"),
        ("grpo", JUDGE),
    ],
)
def test_valid_keys_are_accepted(algorithm, overrides):
    assert complete(algorithm, overrides).algorithm == algorithm


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("grpo.seed", "grpo"),
        ("loss_fn", LOSS_FN),
        ("loss_fn.ratio_clip_min", LOSS_FN),
        ("loss_fn.kl_type", "distillation"),
        ("value_loss_fn.scale", "ppo"),
        ("data.learn_prefilled", "sft dpo kto rm"),
        ("plan.longest_tokens", "sft dpo rm"),
        ("value.optimizer.kwargs.lr", "ppo"),
        ("teacher.model_name", "distillation"),
        ("policy.model_name", " ".join(ALGORITHMS)),
    ],
)
def test_readers_of_a_key_are_named(key, names):
    assert read_by(key) == tuple(names.split())


def test_a_derived_algorithm_reads_and_names_the_keys_of_its_own_section():
    """As a subclass that adds a file and a registry line does: the section has another name, and the inherited keys."""
    recipe = complete("grpo", "grpo.normalize_rewards=false grpo.async_grpo.enabled=true loss_fn.use_generation_logprobs=true")
    recipe.grpo.num_generations_per_prompt = 1
    recipe.algorithm, recipe.derived = "derived", recipe.grpo
    assert not recipe.derived.normalize_rewards
    assert ahead.settings(recipe) is recipe.grpo.async_grpo and ahead.key_in(recipe.derived, "derived") == "derived.async_grpo"
    keys = [problem.key for problem in GRPO(recipe).problems()]
    assert "derived.num_generations_per_prompt" in keys and not [key for key in keys if key.startswith("grpo.")]
