"""verl's keys read as ours: the result of each rule, and that of verl's own functions."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from launch import submit
from launch.recipes import reading
from launch.recipes.verl import optimizers, scored_files
from launch.terminal import command_line
from pipeline.algorithms.sections import LossConfig
from pipeline.config import Loaded, Recipe, RecipeError
from pipeline.train.optimizer import LRSchedule
from tests.docs import pages
from tests.problems import named, refused

BASE = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.n=4")
BASE += ("actor_rollout_ref.model.path=Qwen/Qwen3-8B", "actor_rollout_ref.actor.use_dynamic_bsz=True")
BASE += ("trainer.logger=[console]", "data.train_files=/data/gsm8k/train.parquet", "data.val_files=/data/gsm8k/test.parquet")
ACTOR, ROLLOUT, OPTIMIZER = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.actor.optim"
REPLAY = ("model_engine=megatron", f"{ROLLOUT}.enable_rollout_routing_replay=True")
GOLDEN = Path(__file__).parents[1] / "algorithms/golden"
LOSSES = {"compute_policy_loss_vanilla": "vanilla", "compute_policy_loss_gspo": "gspo", "compute_policy_loss_cispo": "cispo"}


@pytest.fixture
def inspect(tmp_path: Path):
    """Return a function that reads a script with these words, and a command line."""

    def read(*words: str, line: tuple[str, ...] = (), module: str = "verl.trainer.main_ppo") -> Loaded:
        base = BASE if module.endswith("ppo") else ()
        text = f"python3 -m {module} {shlex.join([*base, *words])} $@\n"
        (tmp_path / "run.sh").write_text(text)
        return reading.inspect(str(tmp_path / "run.sh"), line)

    return read


@pytest.fixture
def recipe(inspect):
    """Return a function that reads a script without problems."""

    def read(*words: str, **more: Any) -> Recipe:
        loaded = inspect(*words, **more)
        assert loaded.problems == []
        return loaded.recipe

    return read


# ---- losses and advantages: the arguments with which our functions give verl's numbers (tests/algorithms/golden) ------------


def goldens(name: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / f"verl_{name}.json").read_text())["cases"]


@pytest.mark.parametrize(
    "case", [case for case in goldens("policy_loss") if case["function"] in LOSSES and case["batch"] == "one"]
)
def test_a_loss_of_verl_has_the_arguments_that_give_its_numbers(case: dict[str, Any], recipe) -> None:
    words = [f"{ACTOR}.{key}={value}" for key, value in case["theirs"].items()]
    found = recipe(f"{ACTOR}.policy_loss.loss_mode={LOSSES[case['function']]}", *words).loss_fn
    assert found == LossConfig(**case["arguments"])


@pytest.mark.parametrize("case", goldens("advantages"), ids=lambda case: case["formula"])
def test_advantages_of_verl_have_the_arguments_that_give_its_numbers(case: dict[str, Any], recipe) -> None:
    name = {"compute_grpo_outcome_advantage": "grpo", "compute_rloo_outcome_advantage": "rloo"}[case["function"]]
    found = recipe(
        f"algorithm.adv_estimator={name}", *(f"algorithm.{key}={value}" for key, value in case["theirs"].items())
    ).grpo
    assert {key: getattr(found, key) for key in case["arguments"]} == case["arguments"]


def estimates() -> list[dict[str, Any]]:
    return [case for case in goldens("estimates") if "reinforce" in case["function"]]


@pytest.mark.parametrize("case", estimates(), ids=lambda case: case["formula"])
def test_reinforce_plus_plus_has_the_arguments_that_give_verls_numbers(case: dict[str, Any], recipe) -> None:
    name = case["function"].removeprefix("compute_").removesuffix("_outcome_advantage")
    words = [f"algorithm.adv_estimator={name}"]
    if case["arguments"]["use_kl_in_reward"]:
        words += ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.2", "algorithm.kl_penalty=kl"]
    found = recipe(*words)
    assert found.grpo.adv_estimator.name == "reinforce_plus_plus"
    assert found.grpo.adv_estimator.minus_baseline == case["arguments"]["minus_baseline"]
    assert found.loss_fn.reference_policy_kl_penalty == case["arguments"]["reference_policy_kl_penalty"]
    assert not found.loss_fn.use_kl_in_reward or found.loss_fn.reference_policy_kl_type == "k1"


def test_a_critic_has_the_arguments_that_give_verls_numbers(recipe) -> None:
    words = ("algorithm.lam=0.95", "critic.model.path=a/critic", "critic.optim.lr=2e-5", "trainer.critic_warmup=3")
    found = recipe("algorithm.adv_estimator=gae", *words)
    (case,) = [case for case in goldens("estimates") if case["formula"] == "GAE, normalized"]
    expected = {key: value for key, value in case["arguments"].items() if "kl" not in key}
    assert dataclasses.asdict(found.ppo.adv_estimator) == {**expected, "gae_gamma": 1.0}
    assert (found.algorithm, found.value.model_name, found.value.optimizer.kwargs["lr"]) == ("ppo", "a/critic", 2e-5)
    assert (
        found.value_loss_fn.cliprange == goldens("value_loss")[0]["arguments"]["cliprange"] and found.value_loss_fn.scale == 1
    )


@pytest.mark.parametrize(
    ("kind", "ours", "clamps"),
    [("low_var_kl", "k3", (20, 10)), ("k3", "k3", (20, 10)), ("mse", "k2", (None, None)), ("k3+", "k2", (None, None))],
)
def test_kl_in_the_loss(kind: str, ours: str, clamps: tuple[Any, Any], recipe) -> None:
    loss = recipe(f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.01", f"{ACTOR}.kl_loss_type={kind}").loss_fn
    assert (loss.reference_policy_kl_type, loss.reference_policy_kl_gradient) == (ours, "estimate")
    assert (loss.kl_input_clamp_value, loss.kl_output_clamp_value, loss.reference_policy_kl_penalty) == (*clamps, 0.01)
    assert not loss.use_kl_in_reward


def test_importance_weights_and_bypass(recipe) -> None:
    key = "algorithm.rollout_correction"
    loss = recipe(f"{key}.rollout_is=token", f"{key}.rollout_is_threshold=2.5").loss_fn
    assert loss.use_importance_sampling_correction and loss.truncated_importance_sampling_type == "tis"
    assert (loss.truncated_importance_sampling_ratio, loss.truncated_importance_sampling_ratio_min) == (2.5, None)
    assert recipe(f"{key}.bypass_mode=True").loss_fn.use_generation_logprobs


def test_dapo(recipe) -> None:
    words = [
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.max_num_gen_batches=10",
        "data.gen_batch_size=1536",
    ]
    words += ["data.train_batch_size=512", f"{ACTOR}.ppo_mini_batch_size=32", "reward.reward_manager.name=dapo"]
    words += ["+reward.reward_kwargs.overlong_buffer_cfg.enable=True", "+reward.reward_kwargs.overlong_buffer_cfg.len=128"]
    words += ["+reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0", "+reward.reward_kwargs.max_resp_len=512"]
    words += ["data.train_files=/data/dapo-math-17k.parquet", "data.val_files=/data/aime-2024.parquet"]
    found = recipe(*words)
    assert found.grpo.use_dynamic_sampling and found.grpo.dynamic_sampling_max_gen_batches == 10
    assert (found.grpo.batch_multiplier, found.policy.train_global_batch_size) == (3.0, 32 * 4)
    shaping, scaling = found.grpo.reward_shaping, found.grpo.reward_scaling
    assert (shaping.overlong_buffer_length, shaping.max_response_length, shaping.overlong_buffer_penalty) == (128, 512, 1.0)
    assert (scaling.enabled, scaling.target_min, scaling.target_max) == (True, -1.0, 1.0)  # math_dapo's wrong answers have -1
    assert found.env["dapo_math"].kwargs == {"math_verify_impl": "dapo_math_verify"}


# ---- schedules ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "rate"),
    [  # verl/utils/torch_functional.py: the factor of the rate at a step of 20
        (("lr_warmup_steps=4",), lambda step: min(1.0, step / 4)),
        (("lr_warmup_steps_ratio=0.2",), lambda step: min(1.0, step / 4)),
        (
            ("lr_scheduler_type=cosine", "lr_warmup_steps=4", "min_lr_ratio=0.1"),
            lambda step: step / 4 if step < 4 else 0.45 * float(torch.cos(torch.tensor(torch.pi * (step - 4) / 16))) + 0.55,
        ),
        (("lr_scheduler_type=cosine",), lambda step: 0.5 * float(torch.cos(torch.tensor(torch.pi * step / 20))) + 0.5),
    ],
)
def test_the_rates_of_a_run(words: tuple[str, ...], rate: Any, recipe) -> None:
    policy = recipe("trainer.total_training_steps=20", *(f"{OPTIMIZER}.{word}" for word in words)).policy
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], **policy.optimizer.kwargs)
    schedule = LRSchedule(optimizer, policy.scheduler)
    for step in range(20):
        assert schedule.lr / 1e-6 == pytest.approx(rate(step), abs=1e-6), step
        optimizer.step()
        schedule.step()


def test_a_share_of_a_run_of_unknown_length_is_a_problem(inspect) -> None:
    problems = inspect(f"{OPTIMIZER}.lr_warmup_steps_ratio=0.1").problems
    assert named(problems) == {(f"{OPTIMIZER}.lr_warmup_steps_ratio", "missing-value")}
    assert "trainer.total_training_steps=STEPS" in problems[0].message
    assert optimizers.schedule(0, 0.0, None) is None


# ---- data --------------------------------------------------------------------------------------------------------------------


def parquet(path: Path, *sources: str) -> Path:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"data_source": source, "prompt": [{"role": "user", "content": "1+1"}]} for source in sources]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([row | {"reward_model": {"ground_truth": "2"}} for row in rows]), path
    )
    return path


def test_files_have_the_environment_of_their_data_source(recipe, inspect, tmp_path: Path) -> None:
    one = parquet(tmp_path / "a/train.parquet", *["openai/gsm8k"] * 50)
    other = parquet(tmp_path / "b/train.parquet", *["DigitalLearningGmbH/MATH-lighteval"] * 30)
    files = (
        f"data.train_files=['{one}','{other}']",
        f"data.val_files={one}",
        "data.train_batch_size=16",
        f"{ACTOR}.ppo_mini_batch_size=16",
    )
    found = recipe(*files, f"{OPTIMIZER}.lr_warmup_steps_ratio=0.1")
    assert {name: (each.env_name, each.data_path) for name, each in found.data.datasets.items()} == {
        "a": ("gsm8k", str(one)),
        "b": ("math", str(other)),
    }
    assert (
        found.data.train is None and found.data.validation and found.data.validation.output_key == "reward_model.ground_truth"
    )
    assert found.policy.scheduler[0]["kwargs"]["total_iters"] == 80 // 16 * 30 // 10  # by the rows of the files
    mixed = parquet(tmp_path / "c/train.parquet", "openai/gsm8k", "codecontests")
    problems = inspect(f"data.train_files={mixed}", f"data.val_files={one}").problems
    assert named(problems) == {("data.train_files", "missing-value")} and "codecontests" in problems[0].message
    given = recipe(f"data.train_files={mixed}", f"data.val_files={one}", line=("env.reward.kind=math",))
    assert given.env["reward"].kind == "math" and scored_files.data_sources(tmp_path / "no.parquet") is None


def test_a_score_of_the_user(recipe, tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 0.0\n"
    )
    found = recipe(f"reward.custom_reward_function.path={tmp_path}/my_reward.py")
    assert found.env["reward"].kind == "my_reward.compute_score" and str(tmp_path) in found.module_folders
    assert found.data.train is not None and found.data.train.env_name == "reward"


# ---- engines, SFT, distillation ----------------------------------------------------------------------------------------------


def test_megatron(recipe) -> None:
    key = f"{ACTOR}.megatron"
    words = ["model_engine=megatron", f"{key}.tensor_model_parallel_size=2", f"{key}.expert_model_parallel_size=4"]
    words += [
        f"+{key}.override_transformer_config.recompute_granularity=full",
        f"{OPTIMIZER}.clip_grad=0.5",
        "trainer.nnodes=2",
    ]
    words += [f"+{key}.override_transformer_config.recompute_num_layers=1", f"{OPTIMIZER}.lr_decay_style=cosine"]
    found = recipe(*words, "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B", "trainer.total_training_steps=100")
    megatron = found.policy.megatron_cfg
    assert megatron.enabled and megatron.sequence_parallel and megatron.activation_checkpointing
    assert megatron.optimizer is not None and megatron.scheduler is not None
    assert (megatron.optimizer.clip_grad, megatron.scheduler.lr_decay_iters, megatron.recompute_num_layers) == (0.5, 100, 1)
    assert not megatron.freeze_moe_router and found.cluster.train.nodes == 2


def test_fsdp(recipe) -> None:
    words = [
        f"{ACTOR}.fsdp_config.fsdp_size=4",
        f"{ACTOR}.ulysses_sequence_parallel_size=2",
        f"{ACTOR}.ppo_max_token_len_per_gpu=8000",
    ]
    words += ["actor_rollout_ref.model.lora_rank=32", "actor_rollout_ref.model.lora_alpha=64"]
    words += ["actor_rollout_ref.model.target_modules=[q_proj,v_proj]"]
    policy = recipe(*words).policy
    assert (policy.dtensor_cfg.data_parallel_replicate_size, policy.dtensor_cfg.context_parallel_size) == (2, 2)
    assert policy.sequence_packing.train_mb_tokens == 16000
    lora = policy.dtensor_cfg.lora_cfg
    assert (lora.enabled, lora.dim, lora.alpha, lora.target_modules) == (True, 32, 64, ["q_proj", "v_proj"])


def test_sft(recipe) -> None:
    words = [
        "data.train_files=/data/sft.parquet",
        "data.train_batch_size=64",
        "optim.lr=1e-5",
        "optim.lr_scheduler_type=cosine",
    ]
    words += ["model.path=Qwen/Qwen3-8B", "trainer.total_training_steps=50", "data.max_length=2048", "trainer.logger=console"]
    found = recipe(*words, module="verl.trainer.sft_trainer")
    assert (found.algorithm, found.policy.train_global_batch_size, found.sft.max_num_steps, found.sft.seed) == (
        "sft",
        64,
        50,
        1,
    )
    assert found.data.train is not None and (found.data.train.messages_key, found.data.train.tools_key) == ("messages", "tools")
    assert found.policy.scheduler == {
        "name": "torch.optim.lr_scheduler.CosineAnnealingLR",
        "kwargs": {"T_max": 50, "eta_min": 0.0},
    }


def test_distillation(recipe) -> None:
    key = "distillation"
    words = [f"{key}.enabled=True", f"{key}.distillation_loss.loss_mode=forward_kl_topk", f"{key}.distillation_loss.topk=64"]
    words += [
        f"{key}.distillation_loss.use_task_rewards=False",
        f"{key}.teacher_models.teacher_model.model_path=Qwen/Qwen3-32B",
    ]
    found = recipe(*words)
    assert (found.algorithm, found.distillation.topk_logits_k, found.loss_fn.kl_type) == ("distillation", 64, "forward")
    assert found.teacher.model_name == "Qwen/Qwen3-32B"
    gradient = [f"{key}.distillation_loss.loss_mode=k1", f"{key}.distillation_loss.use_policy_gradient=True"]
    found = recipe(*words, *gradient)
    assert (found.algorithm, found.grpo.adv_estimator.name) == ("grpo", "opd")
    assert found.on_policy_distillation.teachers["gsm8k"].model_name == "Qwen/Qwen3-32B"


# ---- files and the command line ----------------------------------------------------------------------------------------------


def test_yaml_files(tmp_path: Path) -> None:
    """A user's file over verl's own, and over another file of the user."""
    (tmp_path / "base.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\n"
        "data: {train_batch_size: 64, train_files: /gsm8k/a.parquet, val_files: /gsm8k/b.parquet}\n"
        "actor_rollout_ref:\n  rollout: {name: vllm, n: 2}\n  actor: {use_dynamic_bsz: true, ppo_mini_batch_size: 16}\n"
    )
    (tmp_path / "own.yaml").write_text(
        "hydra: {searchpath: ['file://x']}\ndefaults:\n  - base\n  - _self_\nalgorithm: {adv_estimator: grpo}\n"
        "actor_rollout_ref: {model: {path: Qwen/Qwen3-8B}, actor: {kl_loss_coef: '${.entropy_coeff}', entropy_coeff: 0.01}}\n"
        "trainer: {logger: [console]}\n"
    )
    (tmp_path / "megatron.yaml").write_text("defaults: [ppo_trainer, {override model_engine: megatron}, _self_]\n")
    words = [f"{ROLLOUT}.name=vllm", f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.megatron.tensor_model_parallel_size=2"]
    megatron = reading.inspect(str(tmp_path / "megatron.yaml"), words).recipe.policy.megatron_cfg
    assert megatron.enabled and megatron.tensor_model_parallel_size == 2
    loaded = reading.inspect(str(tmp_path / "own.yaml"), ["++data.train_batch_size=32", "cluster.train.partition=gpus"])
    assert loaded.problems == [] and loaded.recipe.grpo.num_prompts_per_step == 32
    assert loaded.recipe.policy.train_global_batch_size == 32 and loaded.recipe.cluster.train.partition == "gpus"
    assert loaded.origins["grpo.num_generations_per_prompt"].endswith("base.yaml:4 (actor_rollout_ref.rollout.n)")
    assert loaded.origins["loss_fn.ratio_clip_c"].startswith("verl's default")


def test_overrides_of_the_command_line(recipe, inspect, tmp_path: Path) -> None:
    line = (f"{ACTOR}.clip_ratio_high=0.28", "+trainer.total_training_steps=7", f"~{ACTOR}.entropy_coeff", "grpo.seed=3")
    found = recipe(f"{ACTOR}.entropy_coeff=0.1", line=line)
    assert (found.loss_fn.ratio_clip_max, found.grpo.max_num_steps, found.grpo.seed) == (0.28, 7, 3)
    with refused(("--bf16", "bad-format")):
        inspect(line=("--bf16",))
    request = command_line.parse(submit.SubmitRequest, [f"recipe={tmp_path}/run.sh", "plan=true", "+a.b=1", "~c.d"])
    assert request.plan and request.overrides == ["+a.b=1", "~c.d"]


def test_an_unknown_key_has_a_near_name(inspect) -> None:
    (problem,) = inspect(f"{ACTOR}.ppo_mini_batchsize=32").problems
    assert (problem.key, problem.code) == (f"{ACTOR}.ppo_mini_batchsize", "unknown-key")
    assert f"did you mean '{ACTOR}.ppo_mini_batch_size'" in problem.message and "run.sh:1" in problem.origin


def test_a_value_of_another_type_is_one_problem(inspect) -> None:
    words = ("data.train_batch_size=many", f"{ACTOR}.optim.betas={{a: 1}}", f"{ROLLOUT}.top_p=[1]")
    problems = inspect(*words).problems
    assert named(problems) == {(word.partition("=")[0], "wrong-type") for word in words} and len(problems) == 3
    assert all("run.sh:1" in problem.origin for problem in problems)


def test_validation_after_each_epoch_needs_the_files(recipe, inspect, tmp_path: Path) -> None:
    file = parquet(tmp_path / "a/train.parquet", *["x"] * 64)
    words = ["model.path=a/model", "data.train_batch_size=16", "trainer.test_freq=after_each_epoch", "trainer.logger=console"]
    found = recipe(*words, f"data.train_files={file}", f"data.val_files={file}", module="verl.trainer.sft_trainer")
    assert (found.sft.val_period, found.sft.val_at_end) == (4, True)
    problems = inspect(*words, "data.train_files=/no.parquet", module="verl.trainer.sft_trainer").problems
    assert named(problems) == {("trainer.test_freq", "missing-value")}


def test_variables_of_a_script(tmp_path: Path) -> None:
    words = shlex.join(BASE)
    text = f"N=$(nproc)\nLR=${{LR:-1e-6}}\npython3 -m verl.trainer.main_ppo {words}"
    text += f" {OPTIMIZER}.lr=$LR trainer.n_gpus_per_node=$N\n"
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(RecipeError) as error:
        reading.inspect(str(tmp_path / "run.sh"), ["LR=3e-6"])
    assert "run.sh:1: trainer.n_gpus_per_node" in str(error.value) and "Try N=VALUE" in str(error.value)
    found = reading.inspect(str(tmp_path / "run.sh"), ["LR=3e-6", "N=4"]).recipe
    assert (found.policy.optimizer.kwargs["lr"], found.cluster.train.gpus_per_node) == (3e-6, 4)


def test_the_example_of_the_page(tmp_path: Path) -> None:
    (text,) = [block.body for block in pages.blocks(pages.ROOT / "recipes/FOREIGN.md") if block.path == "run.sh"]
    (tmp_path / "run.sh").write_text(text)
    loaded = reading.inspect(str(tmp_path / "run.sh"), ["trainer.logger=console"])
    recipe = loaded.recipe
    assert loaded.problems == [] and (recipe.policy.train_global_batch_size, recipe.grpo.max_num_epochs) == (1280, 15)


def test_commands_that_start_a_trainer(tmp_path: Path) -> None:
    """A DAPO recipe in a Ray job, a configuration by name, torchrun's ranks, and a merge of checkpoints afterwards."""
    script, words = tmp_path / "run.sh", shlex.join(BASE)
    script.write_text(f"ray job submit --no-wait -- python3 -m recipe.dapo.main_dapo --config-name dapo {words}\n")
    (tmp_path / "dapo.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer: {total_epochs: 3}\n")
    text = "python3 -m verl.model_merger merge --backend fsdp\npython3 -m verl.trainer.main_eval data.path=x\n"
    script.write_text(script.read_text() + text)
    assert reading.inspect(str(script)).recipe.grpo.max_num_epochs == 3
    sft = "data.train_files=/sft.parquet model.path=a/model"
    script.write_text(f"torchrun --nnodes 2 --nproc_per_node=$N -m verl.trainer.sft_trainer {sft}\n")
    cluster = reading.inspect(str(script), ["N=4"]).recipe.cluster
    assert (cluster.train.nodes, cluster.train.gpus_per_node) == (2, 4)
    with refused(("trainer.n_gpus_per_node", "missing-value")):
        reading.inspect(str(script))


@pytest.mark.parametrize(
    ("words", "key", "feature"),
    [
        (("algorithm.adv_estimator=remax",), "algorithm.adv_estimator", "ReMax"),
        ((f"{ACTOR}.policy_loss.loss_mode=gpg",), f"{ACTOR}.policy_loss.loss_mode", "GPG"),
        ((f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=abs"), f"{ACTOR}.kl_loss_type", "this estimator"),
        (("algorithm.use_kl_in_reward=True",), "algorithm.use_kl_in_reward", "a KL penalty in the reward"),
        ((f"{ROLLOUT}.multi_turn.enable=True",), f"{ROLLOUT}.multi_turn.enable", "agents with tools"),
        ((f"{ACTOR}.ppo_epochs=2",), f"{ACTOR}.ppo_epochs", "several passes"),
        (("trainer.v1.trainer_mode=separate_async",), "trainer.v1.trainer_mode", "asynchronous"),
        ((f"{ACTOR}.router_replay.mode=R3",), f"{ACTOR}.router_replay.mode", "replay of routing by this key"),
        (
            (*REPLAY, f"{ACTOR}.megatron.router_replay.mode=R2"),
            f"{ACTOR}.megatron.router_replay.mode",
            "replay of the routing of",
        ),
        (("actor_rollout_ref.model.mtp.enable=True",), "actor_rollout_ref.model.mtp.enable", "multi-token"),
    ],
)
def test_a_feature_that_we_lack_is_named(words: tuple[str, ...], key: str, feature: str, inspect) -> None:
    (problem,) = inspect(*words).problems
    assert (problem.key, problem.code) == (key, "unsupported") and f"Hetstep does not support {feature}" in problem.message


def test_routing_of_the_sampler_is_replayed(recipe) -> None:
    assert recipe(*REPLAY, f"{ACTOR}.megatron.router_replay.mode=R3").policy.router_replay.enabled
    assert not recipe(*REPLAY).policy.router_replay.enabled


@pytest.mark.parametrize(
    ("words", "coefficient"),
    [
        (("moe_aux_loss_coeff=0.01",), 0.0),  # verl's moe_router_load_balancing_type is none
        (("moe_router_load_balancing_type=seq_aux_loss", "moe_aux_loss_coeff=0.01"), 0.01),
        (("moe_router_load_balancing_type=aux_loss",), 0.001),  # of the model
    ],
)
def test_the_load_of_experts_is_balanced(words: tuple[str, ...], coefficient: float, recipe) -> None:
    overrides = (f"+{ACTOR}.megatron.override_transformer_config.{word}" for word in words)
    found = recipe("model_engine=megatron", "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B", *overrides)
    assert found.policy.moe_aux_loss_coeff == coefficient


def test_notes_say_what_differs(inspect) -> None:
    words = (f"{ACTOR}.ppo_mini_batch_size=64", f"{ACTOR}.clip_ratio=0.3", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm")
    notes = "\n".join(inspect(*words, f"{ROLLOUT}.name=sglang").notes)
    for text in (
        "64 prompts x 4 answers",
        "clip_ratio=0.3: has no effect",
        "another size",
        "in place of SGLang",
        "strict, reads only",
    ):
        assert text in notes


# ---- generative reward models -----------------------------------------------------------------------------------------------

JUDGE = "reward.reward_model"


def test_a_generative_reward_model_is_the_judge(recipe, inspect, tmp_path: Path) -> None:
    words = "data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer"
    (tmp_path / "my_score.py").write_text(f"async def compute_score({words}):\n    return 1.0\n")
    scored = f"reward.custom_reward_function.path={tmp_path}/my_score.py"
    pool = (f"{JUDGE}.enable=True", f"{JUDGE}.model_path=a/judge", f"{JUDGE}.rollout.name=sglang", scored)
    apart = (f"{JUDGE}.enable_resource_pool=True", f"{JUDGE}.nnodes=2", f"{JUDGE}.n_gpus_per_node=4")
    more = (f"{JUDGE}.rollout.tensor_model_parallel_size=4", f"{JUDGE}.rollout.response_length=4096")
    found = recipe(*pool, *apart, *more)
    assert (found.judge.model_name, found.judge.vllm_cfg.tensor_parallel_size) == ("a/judge", 4)
    assert found.judge.vllm_cfg.max_model_len == 2048 + 4096
    assert (found.cluster.judge.nodes, found.cluster.judge.gpus_per_node) == (2, 4)
    assert (found.env["reward"].kind, found.env["reward"].timeout_s) == ("my_score.compute_score", 600.0)
    loaded = inspect(*pool)
    assert (loaded.recipe.cluster.judge.gpus_per_node, loaded.recipe.judge.vllm_cfg.tensor_parallel_size) == (2, 2)
    for text in (
        "has 2 GPUs of its own; in verl those of the policy",
        "vLLM samples in place of SGLang",
        "gets a greedy reply",
    ):
        assert any(JUDGE in note and text in note for note in loaded.notes), text
    engine = (f"{JUDGE}.rollout.data_parallel_size=2", f"+{JUDGE}.rollout.engine_kwargs.vllm.swap_space=3")
    loaded = inspect(*pool, *engine)
    assert loaded.recipe.judge.vllm_kwargs["swap_space"] == 3
    assert any("data_parallel_size=2: engines have no data-parallel ranks" in note for note in loaded.notes)
    staged = recipe(*pool, *(f"{JUDGE}.rollout.{name}_parallel_size=2" for name in ("pipeline_model", "expert")))
    assert (staged.cluster.judge.gpus_per_node, staged.judge.vllm_cfg.expert_parallel_size) == (4, 2)
    older = ("reward_model.enable=True", "reward_model.model.path=an/older", "reward_model.rollout.max_model_len=9000", scored)
    assert (recipe(*older).judge.model_name, recipe(*older).judge.vllm_cfg.max_model_len) == ("an/older", 9000)
    with refused((f"{JUDGE}.enable", "unsupported")):  # which classifies
        loaded = inspect(f"{JUDGE}.enable=True", f"{JUDGE}.model_path=a/judge")
        raise RecipeError(*loaded.problems)
