"""Fields of TRL become our keys with our meaning, a note, or a problem that names what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.recipes import reading
from launch.recipes.foreign import ForeignSource
from launch.recipes.trl import reading_trl
from pipeline.config.config_tree import ConfigMapping
from pipeline.config.loading import Layers
from tests.problems import refused

GRPO = "trl grpo --model_name_or_path m --dataset_name d --max_steps 12 --reward_funcs accuracy_reward"
RLOO, SFT, DPO, KTO, REWARD = (
    f"trl {name} --model_name_or_path m --dataset_name d --max_steps 12" for name in ("rloo", "sft", "dpo", "kto", "reward")
)
BALANCE = "policy.moe_aux_loss_coeff"
SCORED = "--reward_funcs accuracy_reward"


def layers(folder: Path, command: str, *arguments: str, name: str = "run.sh") -> Layers:
    path = folder / name
    path.write_text(command)
    return reading_trl.read(ForeignSource(path, arguments))


def value(found: Layers, key: str) -> Any:
    node = found.trees[0].find(key)
    return node.plain() if isinstance(node, ConfigMapping) else node and node.value


TRANSLATED = [
    (KTO, "algorithm", "kto"),
    (KTO, "kto.reference_policy_kl_penalty", 0.1),
    (KTO, "data.shuffle", False),
    (f"{KTO} --loss_type apo_zero_unpaired", "kto.preference_loss", "apo_zero_unpaired"),
    (f"{KTO} --desirable_weight 1.3", "kto.desirable_weight", 1.3),
    (GRPO, "loss_fn.token_level_loss", True),
    (f"{GRPO} --loss_type grpo", "loss_fn.token_level_loss", False),
    (f"{GRPO} --loss_type cispo --epsilon_high 5", "loss_fn.ratio_clip_max", 4),
    (f"{GRPO} --loss_type cispo --epsilon_high 5", "loss_fn.ratio_clip_min", 1.0),
    (f"{GRPO} --top_entropy_quantile 0.2", "loss_fn.top_entropy_quantile", 0.2),
    (f"{GRPO} --delta 4", "loss_fn.ratio_clip_c", 4),
    (f"{GRPO} --importance_sampling_level sequence --loss_type grpo", "loss_fn.sequence_level_importance_ratios", True),
    (f"{GRPO} --scale_rewards none", "grpo.normalize_rewards", False),
    (f"{GRPO} --multi_objective_aggregation normalize_then_sum", "grpo.adv_estimator.name", "gdpo"),
    (f"{GRPO} --beta 0.04", "loss_fn.reference_policy_kl_gradient", "kl"),
    (f"{GRPO} --beta 0.04 --use_bias_correction_kl false", "loss_fn.reference_policy_kl_gradient", "estimate"),
    (f"{GRPO} --beta 0.04 --steps_per_generation 4", "loss_fn.use_on_policy_kl_approximation", True),
    # 8 x 2 processes an update, 4 updates a step: 64 completions
    (f"{GRPO} --steps_per_generation 4 --num_processes 2", "grpo.num_prompts_per_step", 8),
    (f"{GRPO} --steps_per_generation 4 --num_processes 2", "grpo.max_num_steps", 3),
    (f"{GRPO} --steps_per_generation 4 --num_processes 2", "policy.scheduler.kwargs.total_iters", 3),
    # a generation batch of 8 in an update of 32: a step is an update
    (f"{GRPO} --gradient_accumulation_steps 4 --steps_per_generation 1", "grpo.num_prompts_per_step", 4),
    (f"{GRPO} --use_vllm", "loss_fn.sequence_level_importance_weights", True),
    (f"{GRPO} --use_vllm", "loss_fn.truncated_importance_sampling_type", "icepop"),
    (f"{GRPO} --use_vllm --vllm_importance_sampling_mode token_truncate", "loss_fn.truncated_importance_sampling_type", "tis"),
    (f"{GRPO} --use_vllm --no_vllm_importance_sampling_correction", "loss_fn.use_importance_sampling_correction", None),
    (GRPO, "loss_fn.use_importance_sampling_correction", None),  # transformers samples in TRL
    (f"{GRPO} --use_vllm --vllm_mode server", "policy.generation.colocated.enabled", False),
    (f"{GRPO} --top_k 0", "policy.generation.top_k", None),
    (f"{GRPO} --vllm_max_model_length 2048 --max_completion_length 1024", "data.max_input_seq_length", 1024),
    (
        f"{GRPO} my.module.reward --reward_weights 1 0.5",
        "env.reward.rewards",
        [{"fn": "math", "weight": 1.0}, {"fn": "my.module.reward", "weight": 0.5}],
    ),
    (f"{GRPO} get_soft_overlong_punishment --reward_weights 1 2", "grpo.reward_shaping.overlong_buffer_penalty", 2.0),
    (f"{GRPO} get_soft_overlong_punishment", "env.reward.kind", "math"),
    (f"{RLOO} {SCORED}", "loss_fn.reference_policy_kl_type", "k1"),
    (f"{RLOO} {SCORED} --reward_clip_range -1 1", "grpo.reward_scaling.target_min", -1),
    (f"{RLOO} --reward_model_name_or_path r", "env.reward.model_name", "r"),
    (f"{DPO} --loss_type ipo", "dpo.preference_loss", "ipo"),
    (f"{DPO} --loss_type sigmoid sft --loss_weights 0.8 0.2", "dpo.sft_loss_weight", 0.2),
    (f"{DPO} --loss_type sigmoid_norm", "dpo.preference_average_log_probs", True),
    (REWARD, "algorithm", "rm"),
    (f"{SFT} --packing --per_device_train_batch_size 2", "policy.sequence_packing.train_mb_tokens", 2048),
    (f"{SFT} --dataset_text_field body", "data.train.text_key", "body"),
    (f"{SFT} --use_peft --lora_target_modules all-linear", "policy.dtensor_cfg.lora_cfg.match_all_linear", True),
    (
        f"{SFT} --use_peft --lora_target_modules q_proj, v_proj",
        "policy.dtensor_cfg.lora_cfg.target_modules",
        ["q_proj", "v_proj"],
    ),
    (f"{SFT} --fp16", "policy.precision", "float16"),
    (f"{SFT} --bf16 false", "policy.precision", "float32"),
    (f"{SFT} --bf16 false --dtype bfloat16", "policy.precision", "bfloat16"),
    (f"{SFT} --no_gradient_checkpointing", "policy.dtensor_cfg.activation_checkpointing", False),
    (f"{SFT} --optim adamw_8bit", "policy.optimizer.name", "torch.optim.AdamW"),
    (f"{SFT} --save_strategy no", "checkpointing.enabled", False),
    (f"{SFT} --eval_strategy steps --eval_steps 0.5", "sft.val_period", 6),
    (f"{SFT} --report_to wandb --run_name r", "logger.wandb.name", "r"),
    # x 8 experts of a token / 48 layers, x 2 / 32; the model's coefficient, unless the command has one
    (SFT.replace(" m ", " Qwen/Qwen3-30B-A3B "), BALANCE, 0.000166667),
    (f"{DPO.replace(' m ', ' mistralai/Mixtral-8x7B-v0.1 ')} --router_aux_loss_coef 0.01", BALANCE, 0.000625),
    (f"{SFT.replace(' m ', ' Qwen/Qwen3-30B-A3B ')} --router_aux_loss_coef 0", BALANCE, None),
    (f"{SFT.replace(' m ', ' Qwen/Qwen3-30B-A3B ')} --use_peft", BALANCE, None),
    (SFT.replace(" m ", " Qwen/Qwen3-8B "), BALANCE, None),
    (REWARD.replace(" m ", " Qwen/Qwen3-30B-A3B "), BALANCE, None),
]


@pytest.mark.parametrize(("command", "key", "expected"), TRANSLATED, ids=[f"{c[4:]} {k}" for c, k, _ in TRANSLATED])
def test_a_field_becomes_our_key(tmp_path: Path, command: str, key: str, expected: object) -> None:
    found = layers(tmp_path, command)
    assert not found.problems and value(found, key) == expected


REFUSED = [
    (f"{GRPO} --per_device_train_batch_size many", "per_device_train_batch_size", "expected a whole number"),
    (f"{GRPO} --use_vllm perhaps", "use_vllm", "expected true or false"),
    (f"{GRPO} --epsilon_high high", "epsilon_high", "expected a number"),
    (f"{GRPO} --loss_type vespo", "loss_type", "VESPO's weights"),
    (f"{GRPO} --loss_type cispo", "epsilon", "expected at least 1"),
    (f"{GRPO} --scale_rewards batch", "scale_rewards", "deviation of the whole batch"),
    (f"{GRPO} --num_iterations 2", "num_iterations", "several passes"),
    (f"{GRPO} --num_generations 7", "num_generations", "expected a multiple"),
    (f"{GRPO} --max_tool_calling_iterations 3", "max_tool_calling_iterations", "tools of TRL"),
    (f"{GRPO} --sync_ref_model", "sync_ref_model", "a reference policy that changes"),
    (f"{GRPO} --reward_weights 1 2", "reward_weights", "one for each"),
    (f"{GRPO} tag_count", "reward_funcs", "a dotted path"),
    (f"{RLOO} {SCORED} --normalize_advantages", "normalize_advantages", "deviation of the whole batch"),
    (f"{RLOO}", "reward_funcs", "Try --reward_funcs"),
    (f"{SFT} --load_in_4bit", "load_in_4bit", "QLoRA"),
    (f"{SFT} --loss_type dft", "loss_type", "DFT"),
    (f"{SFT} --optim adafactor", "optim", "this optimizer"),
    (f"{SFT} --lr_scheduler_type inverse_sqrt", "lr_scheduler_type", "this schedule"),
    (f"{SFT} --lerning_rate 1", "lerning_rate", "did you mean 'learning_rate'"),
    (f"{DPO} --loss_type hinge", "loss_type", "the loss hinge"),
    (f"{DPO} --f_divergence_type js_divergence", "f_divergence_type", "other divergences"),
    (f"{KTO} --sync_ref_model", "sync_ref_model", "a reference policy that changes"),
    (f"{REWARD} --center_rewards_coefficient 0.01", "center_rewards_coefficient", "centers rewards"),
]


@pytest.mark.parametrize(("command", "key", "text"), REFUSED, ids=[f"{c[4:]}" for c, _, _ in REFUSED])
def test_what_is_missing_is_named(tmp_path: Path, command: str, key: str, text: str) -> None:
    found = layers(tmp_path, command)
    assert [problem.key for problem in found.problems] == [key]
    assert text in found.problems[0].message
    assert found.problems[0].origin.endswith("run.sh:1") == (f"--{key} " in f"{command} ")  # defaults have no line


@pytest.mark.parametrize("trainer", ["bco", "orpo", "online_dpo"])
def test_another_trainer_is_refused_by_name(tmp_path: Path, trainer: str) -> None:
    with refused(("algorithm", "unsupported")) as error:
        layers(tmp_path, f"accelerate launch examples/scripts/{trainer}.py --model_name_or_path m")
    assert trainer in str(error.value)


RECIPE = """
model_name_or_path: m
dataset_name: d
learning_rate: 1e-6
max_steps: 10
"""


def test_the_trainer_of_a_file(tmp_path: Path) -> None:
    """It is that of our key, of fields that one trainer has, or of the file's name; else a problem asks for it."""
    with refused(("algorithm", "missing-value")):
        layers(tmp_path, RECIPE, name="config.yaml")
    assert value(layers(tmp_path, RECIPE, "algorithm=sft", name="config.yaml"), "algorithm") == "sft"
    assert value(layers(tmp_path, RECIPE + "center_rewards_coefficient: null\n", name="config.yaml"), "algorithm") == "rm"
    assert value(layers(tmp_path, RECIPE, name="my_dpo.yaml"), "algorithm") == "dpo"
    (tmp_path / "sft").mkdir()
    assert value(layers(tmp_path / "sft", RECIPE, name="config.yaml"), "algorithm") == "sft"


def test_a_text_that_is_a_number_and_flags_of_the_command_line(tmp_path: Path) -> None:
    found = layers(
        tmp_path, RECIPE, "algorithm=sft", "--max_steps", "20", "--bf16", "cluster.train.gpus_per_node=4", name="c.yaml"
    )
    assert value(found, "policy.optimizer.kwargs.lr") == 1e-6 and value(found, "sft.max_num_steps") == 20
    assert value(found, "policy.train_global_batch_size") == 8 * 4  # our key's processes
    assert any("8 x 1 x 4 processes = 32" in note for note in found.notes)


@pytest.mark.parametrize("adapters", ["", " --use_peft"])
def test_a_dense_model_has_no_load_to_balance(tmp_path: Path, adapters: str) -> None:
    command = SFT.replace(" m ", " Qwen/Qwen3-8B ") + adapters
    (note,) = [note for note in layers(tmp_path, f"{command} --router_aux_loss_coef 0.01").notes if "router_aux" in note]
    assert "has no effect, since the model has no experts" in note
    assert not any("router_aux" in note for note in layers(tmp_path, command).notes)


@pytest.mark.parametrize(
    ("launcher", "gpus"),
    [
        ("accelerate launch --num_processes 4", 4),
        ("accelerate launch --config_file configs/zero3.yaml", 8),
        ("accelerate launch --config_file mine.yaml", 3),
        ("torchrun --nproc_per_node=2", 2),
        ("python", 1),
    ],
)
def test_processes(tmp_path: Path, launcher: str, gpus: int) -> None:
    (tmp_path / "mine.yaml").write_text("num_processes: 3\n")
    found = layers(tmp_path, f"{launcher} train_sft.py --model_name_or_path m --dataset_name d --max_steps 5")
    assert value(found, "cluster.train.gpus_per_node") == gpus
    assert any("1 process is assumed" in note for note in found.notes) == (launcher == "python")


def test_a_script_with_a_configuration_and_variables(tmp_path: Path) -> None:
    """The script's flags come after its file's, those of the command line last."""
    (tmp_path / "base.yaml").write_text(RECIPE + "seed: 1\nwarmup_steps: 2\n")
    script = 'STEPS=${STEPS:-30}\ntrl sft --config base.yaml --max_steps $STEPS --output_dir "out-$(date)"\n'
    found = layers(tmp_path, script, "STEPS=40", "--seed", "7")
    assert value(found, "sft.max_num_steps") == 40 and value(found, "sft.seed") == 7
    assert value(found, "policy.scheduler")[-1] == {"milestones": [2]}


def test_passes_over_data_of_this_machine_are_steps(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "a"}\n' * 100)
    found = layers(tmp_path, f"trl sft --model_name_or_path m --dataset_name {data} --num_train_epochs 1.5")
    assert value(found, "sft.max_num_steps") == 20  # 13 updates of 8 in an epoch
    absent = layers(tmp_path, "trl sft --model_name_or_path m --dataset_name absent/data")
    assert not absent.problems and any("data that are not on this machine" in note for note in absent.notes)


def test_a_mixture(tmp_path: Path) -> None:
    entries = "datasets:\n  - {path: a/one, split: train, fraction: 0.25}\n  - {path: b/one, name: sub, fraction: 0.75}\n"
    found = layers(tmp_path, "model_name_or_path: m\nmax_steps: 3\n" + entries, "algorithm=sft", name="c.yaml")
    assert value(found, "data.datasets") == {
        "one": {"dataset_name": "a/one", "split": "train", "weight": 0.25},
        "one_1": {"dataset_name": "b/one", "subset": "sub", "split": "train", "weight": 0.75},
    }


def test_our_commands_read_it(tmp_path: Path) -> None:
    """A whole reading, whose keys our schema and checks accept."""
    path = tmp_path / "run.sh"
    path.write_text(f"{GRPO} --use_vllm --beta 0.01 --use_peft\n")
    recipe = reading.load(str(path), ["cluster.train.gpus_per_node=2"])
    assert recipe.algorithm == "grpo" and recipe.policy.train_global_batch_size == 16
