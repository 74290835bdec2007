"""verl's own composition of its configurations, and its published scripts: the values that we read, and what we say of them.

golden/verl.yaml has what Hydra composes and what bash passes; `golden_verl.py` writes it from a clone.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from launch.plan import backend_choice
from launch.plan.estimate import plan
from launch.recipes import foreign, reading
from launch.recipes.foreign import ForeignSource
from launch.recipes.verl import reading_verl, verl_defaults
from pipeline.config import Loaded, yaml_text
from pipeline.config.config_tree import ConfigValue
from pipeline.config.interpolation import resolve
from tests.foreign.__main__ import reason
from tests.foreign.golden_verl import GOLDEN, KINDS

FACTS = yaml_text.parse_value(GOLDEN.read_text())
SCRIPTS: Mapping[str, Mapping[str, Any]] = FACTS["scripts"]

REFUSED = {  # script -> what it asks for that we do not have
    "dppo_trainer/run_qwen3_30b_a3b_megatron.sh": {"DPPO's trust region"},
    "gdpo_trainer/run_qwen3_8b_fsdp.sh": {
        "GDPO of the keys of one function's result; grpo.adv_estimator.name=gdpo takes several env.NAME.rewards"
    },
    "gmpo_trainer/run_qwen3_8b_fsdp.sh": {"GMPO's geometric mean of ratios"},
    "gpg_trainer/run_qwen3_8b_fsdp.sh": {"GPG's advantages", "GPG's loss"},
    "mtp_trainer/run_mimo_7b_mtp_megatron.sh": {"multi-token prediction"},
    "on_policy_distillation_trainer/run_qwen3_5_4b_fsdp.sh": {"images, sound or video"},
    "otb_trainer/run_qwen3_8b_fsdp.sh": {"a baseline for each token"},
    "remax_trainer/run_qwen2.5_math_7b_sync_fsdp.sh": {
        "ReMax, whose baseline is the reward of a greedy answer",
        "a KL penalty in the reward with adv_estimator=remax",
    },
    "rloo_trainer/run_qwen3_8b_fsdp.sh": {"a KL penalty in the reward with adv_estimator=rloo"},
}
READ = [name for name in SCRIPTS if name not in REFUSED]
ACTOR, ROLLOUT = verl_defaults.ACTOR, verl_defaults.ROLLOUT

EQUAL: dict[str, Callable[[Mapping[str, Any]], Any]] = {  # our key -> its value by verl's configuration
    "{}.num_prompts_per_step": lambda c: c["data.train_batch_size"],
    "{}.num_generations_per_prompt": lambda c: c[f"{ROLLOUT}.n"],
    "{}.max_num_epochs": lambda c: c["trainer.total_epochs"],
    "{}.max_num_steps": lambda c: c["trainer.total_training_steps"] or 1_000_000,
    "{}.val_period": lambda c: max(0, c["trainer.test_freq"]),
    "{}.val_at_start": lambda c: c["trainer.val_before_train"],
    "{}.val_num_generations_per_prompt": lambda c: c[f"{ROLLOUT}.val_kwargs.n"],
    "policy.train_global_batch_size": lambda c: c[f"{ACTOR}.ppo_mini_batch_size"] * c[f"{ROLLOUT}.n"],
    "policy.model_name": lambda c: c["actor_rollout_ref.model.path"],
    "policy.max_total_sequence_length": lambda c: c["data.max_prompt_length"] + c["data.max_response_length"],
    "policy.generation.max_new_tokens": lambda c: c["data.max_response_length"],
    "policy.generation.temperature": lambda c: c[f"{ROLLOUT}.temperature"],
    "policy.generation.val_temperature": lambda c: c[f"{ROLLOUT}.val_kwargs.temperature"],
    "policy.generation.top_p": lambda c: c[f"{ROLLOUT}.top_p"],
    "policy.generation.vllm_cfg.tensor_parallel_size": lambda c: c[f"{ROLLOUT}.tensor_model_parallel_size"],
    "data.max_input_seq_length": lambda c: c["data.max_prompt_length"],
    "loss_fn.ratio_clip_min": lambda c: c[f"{ACTOR}.clip_ratio_low"],
    "loss_fn.ratio_clip_max": lambda c: c[f"{ACTOR}.clip_ratio_high"],
    "loss_fn.ratio_clip_c": lambda c: c[f"{ACTOR}.clip_ratio_c"] if c[f"{ACTOR}.policy_loss.loss_mode"] == "vanilla" else None,
    "loss_fn.entropy_coeff": lambda c: c[f"{ACTOR}.entropy_coeff"],
    "loss_fn.reference_policy_kl_penalty": lambda c: (
        c[f"{ACTOR}.kl_loss_coef"]
        if c[f"{ACTOR}.use_kl_loss"]
        else c["algorithm.kl_ctrl.kl_coef"]
        if c["algorithm.use_kl_in_reward"]
        else 0
    ),
    "loss_fn.token_level_loss": lambda c: (
        c[f"{ACTOR}.loss_agg_mode"] == "token-mean" and c[f"{ACTOR}.policy_loss.loss_mode"] not in ("gspo", "sapo")
    ),
    "cluster.train.nodes": lambda c: c["trainer.nnodes"],
    "cluster.train.gpus_per_node": lambda c: c["trainer.n_gpus_per_node"],
}
OPTIMIZER = {  # verl's key -> ours with FSDP, and with Megatron-Core
    "lr": ("policy.optimizer.kwargs.lr", "policy.megatron_cfg.optimizer.lr"),
    "weight_decay": ("policy.optimizer.kwargs.weight_decay", "policy.megatron_cfg.optimizer.weight_decay"),
}


def script(name: str, folder: Path) -> Path:
    """Write a script that passes the words of a published one, and return its path."""
    path = folder / "run.sh"
    path.write_text("python3 -m verl.trainer.main_ppo \\\n" + " \\\n".join(map(shlex.quote, SCRIPTS[name]["words"])) + "\n")
    return path


def kind_of(name: str) -> tuple[str, str]:
    return "ppo", "megatron" if "model_engine=megatron" in SCRIPTS[name]["words"] else "dp"


def composed(name: str) -> dict[str, Any]:
    return FACTS["defaults"][" ".join(kind_of(name))] | SCRIPTS[name]["config"]


def at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[part] if isinstance(tree, dict) else getattr(tree, part)
    return tree


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_our_defaults_are_those_that_hydra_composes(kind: tuple[str, str]) -> None:
    expected = FACTS["defaults"][" ".join(kind)]
    ours = dict(verl_defaults.of(*kind))
    assert len(ours) > 40 and ours == {key: expected.get(key) for key in ours}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_scripts_words_compose_to_hydras_values(name: str, tmp_path: Path) -> None:
    kind = kind_of(name)
    config = reading_verl.of_script(ForeignSource(script(name, tmp_path), ()), {})
    assert (config.kind, config.engine) == kind
    tree = reading_verl.over_defaults(config)
    assert not resolve(tree)
    expected = composed(name)
    nodes = {key: node for key in expected if (node := tree.find(key)) is not None}
    found = {key: node.value if isinstance(node, ConfigValue) else node.plain() for key, node in nodes.items()}
    assert len(found) > 80 and found == {key: expected[key] for key in found}
    assert not [key for key in expected if key not in found and expected[key] is not None]


def inspect(name: str, folder: Path) -> Loaded:
    return reading.inspect(str(script(name, folder)))


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_script_asks_for_and_we_lack_is_named_once(name: str, tmp_path: Path) -> None:
    problems = inspect(name, tmp_path).problems
    named = [reason(problem).partition(":")[0] for problem in problems]
    assert sorted(named) == sorted(REFUSED[name]) and all(problem.code != "unknown-key" for problem in problems)


@pytest.mark.parametrize("name", READ)
def test_a_script_has_the_values_of_verl(name: str, tmp_path: Path) -> None:
    loaded, config = inspect(name, tmp_path), composed(name)
    assert loaded.problems == []
    recipe = loaded.recipe
    expected = {key.format(recipe.algorithm): value(config) for key, value in EQUAL.items()}
    for theirs, ours in OPTIMIZER.items():
        expected[ours[kind_of(name)[1] == "megatron"]] = config[f"{ACTOR}.optim.{theirs}"]
    assert {key: at(recipe, key) for key in expected} == expected
    assert recipe.policy.generation.colocated.enabled


@pytest.mark.full
@pytest.mark.parametrize("name", READ)
def test_a_script_plans(name: str, tmp_path: Path) -> None:
    chosen, choice = backend_choice.choose(inspect(name, tmp_path).recipe)
    assert choice is not None
    planned = plan(chosen, choice)
    assert planned.phases and planned.generate is not None


def test_the_scripts_are_of_every_kind() -> None:
    assert len(SCRIPTS) >= 10 and len(READ) >= 4 and {kind_of(name)[1] for name in READ} == {"dp", "megatron"}
    assert foreign.FORMATS[0].extra == "verl"
