"""Recipes in NeMo-RL's shape read as ours: the result of each rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.plan import backend_choice as backend
from launch.plan.estimate import plan
from launch.recipes import nemo_rl, reading
from launch.recipes.nemo_rl import megatron_keys as megatron
from launch.recipes.translation.translator import Translator
from pipeline import config
from pipeline.config import Recipe, config_tree, interpolation, uses_megatron
from tests.problems import named

RECIPES = Path(__file__).parent / "recipes"


def inspect(name: str, *overrides: str) -> config.Loaded:
    return reading.inspect(str(RECIPES / f"{name}.yaml"), overrides)


def with_keys(name: str, *overrides: str) -> tuple[dict[str, Any], nemo_rl.Translation]:
    """Return a recipe whose file has these keys as well, resolved, and its translation."""
    path = RECIPES / f"{name}.yaml"
    tree = config_tree.load_with_parents(path)
    for key, node in config_tree.parse_overrides(overrides):
        tree.set(key, node)
    assert not interpolation.resolve(tree)
    return tree.plain(), nemo_rl.translate(tree.plain(), {}, path)


def read(name: str, *overrides: str) -> Recipe:
    loaded = inspect(name, *overrides)
    assert loaded.problems == []
    return loaded.recipe


def problem(name: str, *overrides: str) -> tuple[str, str]:
    """Return key and code of the one problem of a recipe."""
    (only,) = named(inspect(name, *overrides).problems)
    return only


def test_the_same_keys_mean_the_same() -> None:
    recipe = read("grpo")
    assert (recipe.algorithm, recipe.name, recipe.run_dir) == ("grpo", "grpo", str(Path("runs/grpo").absolute()))
    assert (recipe.grpo.num_prompts_per_step, recipe.grpo.seed, recipe.loss_fn.ratio_clip_max) == (8, 7, 0.28)
    assert (recipe.policy.max_grad_norm, recipe.policy.dtensor_cfg.tensor_parallel_size) == (0.5, 2)
    assert recipe.policy.optimizer.kwargs == {"lr": 1e-6, "weight_decay": 0.1, "betas": [0.9, 0.999], "eps": 1e-8}
    assert recipe.policy.scheduler[-1] == {"milestones": [50]}
    assert recipe.policy.sequence_packing.logprob_mb_tokens == 512 * 4
    assert not uses_megatron(recipe.policy) and not recipe.checkpointing.async_save
    assert recipe.checkpointing.checkpoint_must_save_by == "00:03:45:00"


@pytest.mark.parametrize(("given", "expected"), [((), 262144), (("max_position_embeddings=200000",), 200000)])
def test_yarn_gives_the_context_that_engines_expect(given: tuple[str, ...], expected: int) -> None:
    key = "policy.hf_config_overrides"
    scaling = ("rope_type=yarn", "factor=2.0", "original_max_position_embeddings=131072")
    keys = [*(f"{key}.rope_scaling.{one}" for one in scaling), *(f"{key}.{one}" for one in given)]
    _, translation = with_keys("grpo", *keys)
    assert translation.layer["policy"]["hf_config_overrides"]["max_position_embeddings"] == expected


def test_bounds_without_effect_are_left_out() -> None:
    loss = read("grpo").loss_fn  # a ratio without a type of truncation, which theirs passes over
    assert loss.truncated_importance_sampling_ratio is None
    assert read("grpo_megatron").policy.megatron_cfg.moe_router_bias_update_rate == 0  # of a dense model


def test_keys_without_effect_for_a_constant_rate_and_installed_kernels() -> None:
    megatron = read("grpo_megatron").policy.megatron_cfg
    assert megatron.scheduler.lr_decay_iters is None and megatron.bias_activation_fusion is None


def test_a_decay_cuts_the_warm_up_of_a_constant_rate() -> None:
    """Megatron-Bridge does so, to a sample less than the decay; tests/train/test_schedules.py has the rates."""
    scheduler = "policy.megatron_cfg.scheduler"
    loaded = inspect("grpo_megatron")  # a warm-up of 13, a decay of 10
    assert loaded.recipe.policy.megatron_cfg.scheduler.lr_warmup_iters == 10
    note = f"{scheduler}.lr_warmup_iters=13: 10, since {scheduler}.lr_decay_iters=10 ends the warm-up, as in NeMo-RL"
    assert note in loaded.notes
    for change in ("lr_decay_iters=14", "lr_decay_iters=null"):  # null: the run, 20 steps
        loaded = inspect("grpo_megatron", f"{scheduler}.{change}")
        assert loaded.recipe.policy.megatron_cfg.scheduler.lr_warmup_iters == 13
        assert not [note for note in loaded.notes if "lr_warmup_iters" in note]
    short = read("grpo_megatron", f"{scheduler}.lr_decay_iters=null", "grpo.max_num_steps=7")
    assert short.policy.megatron_cfg.scheduler.lr_warmup_iters == 7
    critic = read("ppo", "ppo.max_num_steps=2").value  # 2 epochs a step: 4 calls of train()
    assert critic.scheduler[0]["kwargs"]["total_iters"] == 4


def test_schedules_of_ppo_advance_with_every_epoch() -> None:
    """Theirs do so, and a decay over the run ends after its steps times its epochs."""
    scheduler = "policy.megatron_cfg.scheduler"
    linear = (f"{scheduler}.lr_decay_style=linear", f"{scheduler}.lr_decay_iters=null", f"{scheduler}.lr_warmup_iters=3")
    recipe = read("ppo", *linear)
    assert (recipe.ppo.ppo_epochs, recipe.ppo.schedule_every_epoch) == (2, True)
    assert recipe.policy.megatron_cfg.scheduler.lr_decay_iters == 20 * 2
    assert not read("ppo", "ppo.ppo_epochs=1").ppo.schedule_every_epoch


def test_a_critics_changing_weight_decay_is_refused() -> None:
    decay = "value.megatron_cfg.scheduler"
    assert problem("ppo", f"{decay}.end_weight_decay=0.2") == (f"{decay}.start_weight_decay", "unsupported")


def test_a_decay_without_an_end_ends_with_the_run() -> None:
    scheduler = "policy.megatron_cfg.scheduler"
    recipe = read("grpo_megatron", f"{scheduler}.lr_decay_style=cosine", f"{scheduler}.lr_decay_iters=null")
    assert recipe.policy.megatron_cfg.scheduler.lr_decay_iters == 20


def test_a_decay_with_epochs_has_no_end() -> None:
    scheduler = "policy.megatron_cfg.scheduler"
    cosine = (f"{scheduler}.lr_decay_style=cosine", f"{scheduler}.lr_decay_iters=null")
    assert problem("grpo_megatron", *cosine, "grpo.max_num_steps=-1") == (f"{scheduler}.lr_decay_iters", "missing-value")
    megatron_cfg = {"optimizer": {}, "scheduler": {"lr_decay_style": "cosine"}}
    given = {"policy": {"model_name": "a/model", "megatron_cfg": megatron_cfg}, "sft": {}}
    translator = Translator(given, {})
    megatron.translate(translator, "sft")  # which has no default of theirs, and 60 of ours
    assert translator.layer["policy"]["megatron_cfg"]["scheduler"]["lr_decay_iters"] == 60


def test_fused_log_probs_are_chunks() -> None:
    loaded = inspect("grpo_megatron", "policy.megatron_cfg.use_fused_linear_logprobs=true")
    assert loaded.recipe.policy.logprob_chunk_size == 256
    assert any("use_fused_linear_logprobs" in note for note in loaded.notes)


def test_disabled_recomputation_is_ignored() -> None:
    modules = ("policy.megatron_cfg.recompute_granularity=selective", "policy.megatron_cfg.recompute_modules=[moe]")
    off, on = (read("grpo_megatron", *modules, *more) for more in ((), ("policy.megatron_cfg.activation_checkpointing=true",)))
    assert (off.policy.megatron_cfg.recompute_granularity, off.policy.megatron_cfg.recompute_modules) == ("full", None)
    assert (on.policy.megatron_cfg.recompute_granularity, on.policy.megatron_cfg.recompute_modules) == ("selective", ["moe"])


def test_keys_that_no_code_of_nemo_rl_reads_are_ignored() -> None:
    """Recipes of agents in NeMo-RL's examples have them."""
    key = "policy.generation.vllm_cfg"
    plain = with_keys("grpo")[1]
    translation = with_keys("grpo", f"{key}.enable_thinking=true", f"{key}.enforce_monotonicity=false")[1]
    assert translation.problems == plain.problems and translation.layer == plain.layer


def test_eight_bits() -> None:
    key = "policy.generation.vllm_cfg"
    layer = f"{key}.quantization_ignored_layer_kws=[lm_head]"
    assert "precision" not in with_keys("grpo", layer)[1].layer["policy"]["generation"]["vllm_cfg"]
    for count, problems in ((0, set()), (2, {(f"{key}.num_last_layers_in_bf16", "unsupported")})):
        translation = with_keys("grpo", f"{key}.precision=fp8", f"{key}.num_last_layers_in_bf16={count}")[1]
        assert named(translation.problems) == problems


def test_a_critics_section_in_torchs_words() -> None:
    value = read("ppo").value
    assert value.optimizer.name == "torch.optim.AdamW"
    assert value.optimizer.kwargs == {"lr": 1e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}  # the schedule's
    assert value.max_grad_norm is None  # clip_grad 0
    assert any(
        note.startswith("value.megatron_cfg: the critic has the parallel sizes of the policy") for note in inspect("ppo").notes
    )
    assert problem("ppo", "value.train_global_batch_size=16") == ("value.train_global_batch_size", "unsupported")


@pytest.mark.parametrize(
    "key",
    [
        "megatron_cfg.fp8_cfg.enabled",
        "megatron_cfg.optimizer.optimizer_cpu_offload",
        "dtensor_cfg.lora_cfg.enabled",
    ],
)
def test_a_critic_may_have_a_policys_keys(key: str) -> None:
    megatron = key.startswith("megatron")
    backend = (f"value.megatron_cfg.enabled={megatron}", f"value.dtensor_cfg.enabled={not megatron}")
    problems = with_keys("ppo", f"value.{key}=true", *backend)[1].problems
    assert named(problems) == {(f"value.{key}", "unsupported")}


def test_the_teacher_is_cut_as_the_policy_is() -> None:
    loaded = inspect("distillation")
    assert loaded.recipe.teacher.model_name == "Qwen/Qwen2.5-7B"
    assert (
        "teacher.dtensor_cfg: the teacher has the parallel sizes of the policy; in NeMo-RL:"
        " tensor_parallel_size=4, context_parallel_size=2" in (loaded.notes)
    )


def test_the_teacher_has_the_policy_s_temperature() -> None:
    key = "teacher.generation.temperature"
    assert problem("distillation", "policy.generation.temperature=0.7") == (key, "contradiction")
    both = ("policy.generation.temperature=0.7", "teacher.generation.temperature=0.7")
    assert read("distillation", *both).policy.generation.temperature == 0.7


def test_verifiers() -> None:
    _, translation = with_keys("grpo", "env.math.verifier_type=model")
    assert named(translation.problems) == {("env.math.verifier_type", "unsupported")}
    _, translation = with_keys("grpo", "env.math.verifier_type=english_multichoice")
    assert translation.problems == []
    assert translation.layer["env"]["math"] == {"kind": "multiple_choice", "kwargs": {"verifier_type": "english_multichoice"}}
    assert any(
        note.startswith("env.math.verifier_type: the last of several letters in an answer") for note in translation.changed
    )


def test_the_sliding_puzzle_brings_its_boards() -> None:
    game = "env.sliding_puzzle_game={cfg: {game_config: {size: 5, shuffle_moves: 10}, max_moves: 30}}"
    _, translation = with_keys("grpo", game)
    assert translation.problems == []
    assert any("appends its bare text to the model's answer" in note for note in translation.changed)
    assert translation.layer["env"] == {"sliding_puzzle_game": {"kind": "sliding_puzzle", "kwargs": {"max_moves": 30}}}
    train, validation = (translation.layer["data"][split] for split in ("train", "validation"))
    assert (train["dataset_name"], train["env_name"]) == ("sliding_puzzle", "sliding_puzzle_game")
    assert train["kwargs"]["game_config"] == validation["kwargs"]["game_config"] == {"size": 5, "shuffle_moves": 10}
    assert (train["split"], validation["split"]) == ("train", "validation")
    assert Path(train["prompt_file"]).read_text().count("{}") == 1
    assert "unused" not in read("grpo").env


@pytest.mark.parametrize(
    ("given", "key", "code"),
    [
        ("policy.megatron_cfg.enabled=true", "policy.megatron_cfg.enabled", "contradiction"),
        ("policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled", "contradiction"),
        ("policy.model_name=Follow the guide", "policy.model_name", "missing-value"),
        ("sft={seed: 1}", "sft", "contradiction"),
        ("loss_fn.no_such_key=1", "loss_fn.no_such_key", "unknown-key"),
        ("policy.generation.vllm_cfg.precision=float16", "policy.generation.vllm_cfg.precision", "contradiction"),
    ],
)
def test_problems(given: str, key: str, code: str) -> None:
    assert named(with_keys("grpo", given)[1].problems) == {(key, code)}


@pytest.mark.parametrize(
    ("name", "key", "code"),
    [
        ("grpo", "policy.generation.vllm_cfg.env_vars.VLLM_LOGGING_LEVEL", "wrong-type"),
        ("dpo", "dpo.val_batches", "wrong-type"),
        ("dpo", "dpo.val_global_batch_size", "wrong-type"),
        ("ppo", "ppo.ppo_epochs", None),  # ours has the key, and its schema refuses null
        ("ppo", "value.megatron_cfg.optimizer.lr", "missing-value"),
    ],
)
def test_keys_that_must_not_be_null_are_refused(name: str, key: str, code: str | None) -> None:
    before, found = (named(with_keys(name, *given)[1].problems) for given in ((), (f"{key}=null",)))
    assert found - before == ({(key, code)} if code else set())


def test_a_recipe_of_theirs_plans() -> None:
    recipe, choice = backend.choose(read("grpo"))
    planned = plan(recipe, choice)
    assert choice.backend == "dtensor" and planned.gpus == 16


ASYNC = (
    "grpo.async_grpo.enabled=true",
    "loss_fn.use_importance_sampling_correction=true",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources={num_nodes: 1, gpus_per_node: 8}",
)


@pytest.mark.parametrize(
    "off", [("grpo.async_grpo=null",), ("grpo.async_grpo.enabled=false", "grpo.async_grpo.max_trajectory_age_steps=4")]
)
def test_disabled_asynchronous_rollouts_are_ignored(off: tuple[str, ...]) -> None:
    loaded = inspect("grpo", *off)
    ours = loaded.recipe.grpo.async_grpo
    assert not ours.enabled and (ours.max_trajectory_age_steps, ours.max_generation_failures) == (1, 10)
    assert not any("async_grpo" in note for note in loaded.notes)


def test_asynchronous_rollouts_are_a_recipe_that_can_run() -> None:
    assert read("grpo", *ASYNC).grpo.async_grpo.stragglers == "wait"
    assert problem("grpo", *ASYNC, "grpo.async_grpo.colour=red") == ("grpo.async_grpo.colour", "unknown-key")


@pytest.mark.parametrize(
    ("backend", "given", "key", "code"),
    [
        ("sglang", "sglang_cfg.no_such_key=1", "sglang_cfg.no_such_key", "unknown-key"),
        ("sglang", "sglang_cfg.kv_cache_dtype=fp8_e5m2", "sglang_cfg.kv_cache_dtype", "unsupported"),
        ("sglang", "sglang_cfg.dtype=float32", "sglang_cfg.dtype", "unsupported"),  # the policy has bfloat16
        ("trtllm", "trtllm_kwargs.kv_cache_config={dtype: fp8}", "trtllm_kwargs.kv_cache_config.dtype", "unsupported"),
        ("trtllm", "trtllm_kwargs.sampler_type=1", "trtllm_kwargs.sampler_type", "unknown-key"),
        ("megatron", "mcore_generation_config={colour: red}", "mcore_generation_config.colour", "unknown-key"),
        ("dynamo", "dynamo_cfg={worker_args: {extra_cli_args: [--x]}}", "dynamo_cfg.worker_args.extra_cli_args", "unsupported"),
    ],
)
def test_an_engines_key_that_may_change_samples_is_refused(backend: str, given: str, key: str, code: str) -> None:
    translation = with_keys("grpo", f"policy.generation.backend={backend}", f"policy.generation.{given}")[1]
    assert named(translation.problems) == {(f"policy.generation.{key}", code)}


def test_an_engines_tuning_is_listed() -> None:
    given = ("policy.generation.backend=sglang", "policy.generation.sglang_cfg={schedule_policy: lpm, cuda_graph_max_bs: 8}")
    (note,) = (note for note in with_keys("grpo", *given)[1].ignored if "sglang_cfg" in note)
    names = "policy.generation.sglang_cfg.schedule_policy, policy.generation.sglang_cfg.cuda_graph_max_bs"
    assert note == f"{names}: tunes SGLang, which does not sample here"


def test_no_age_is_the_synchronous_algorithm() -> None:
    given = ("grpo.async_grpo=null", "async_rl={sampler: {name: in_order, max_lookahead_versions: 0}}")
    assert with_keys("grpo", *given)[1].layer["grpo"]["async_grpo"] == {"enabled": False}
    both = with_keys("grpo", "async_rl={sampler: {name: windowed}}")[1]
    assert named(both.problems) == {("grpo.async_grpo", "contradiction")}
    no_age = (*ASYNC[1:2], "grpo.async_grpo=null", "async_rl={sampler: {name: in_order, max_lookahead_versions: null}}")
    assert with_keys("grpo", *no_age)[1].layer["grpo"]["async_grpo"]["max_trajectory_age_steps"] is None  # refused later
    custom = ("grpo.async_grpo=null", "async_rl={sampler: {name: custom, target: a:B}}")
    assert named(with_keys("grpo", *custom)[1].problems) == {("async_rl.sampler.name", "unsupported")}


@pytest.mark.parametrize(
    ("given", "note"),
    [
        (ASYNC[:2], "take turns on their GPUs"),
        (("grpo.async_grpo=null", "async_rl={sampler: {name: in_order}}"), "does not correct for older weights"),
    ],
)
def test_an_age_that_cannot_be_used_is_none(given: tuple[str, ...], note: str) -> None:
    """An age is a limit, so 0 is within it."""
    translation = with_keys("grpo", *given)[1]
    assert translation.problems == [] and translation.layer["grpo"]["async_grpo"] == {"enabled": False}
    assert any(note in text for text in translation.changed)


def test_switches_of_nemo_gym_are_not_environments(tmp_path: Path) -> None:
    for on, problems in (("false", set()), ("true", {("env.should_use_nemo_gym", "unsupported")})):
        (tmp_path / "gym.yaml").write_text(
            f"defaults: {RECIPES / 'grpo.yaml'}\nenv: {{should_use_nemo_gym: {on}}}\ndata: {{default: {{prompt_file: null}}}}\n"
        )
        assert named(reading.inspect(str(tmp_path / "gym.yaml"), []).problems) == problems


def test_excluded_layers_alone_leave_all_others() -> None:
    lora = "policy.dtensor_cfg.lora_cfg"
    given = (f"{lora}.enabled=true", f"{lora}.match_all_linear=false", f"{lora}.exclude_modules=['*o_proj*']")
    ours = with_keys("grpo", *given)[1].layer["policy"]["dtensor_cfg"]["lora_cfg"]
    assert ours["match_all_linear"] and ours["exclude_modules"] == ["*o_proj*"]


def test_fused_adam_has_its_own_default_of_weight_decay() -> None:
    tree = with_keys("grpo", "policy.optimizer.name=transformer_engine.pytorch.optimizers.FusedAdam")[0]
    tree["policy"]["optimizer"]["kwargs"] = {"lr": 0.1}
    translation = nemo_rl.translate(tree, {}, RECIPES / "grpo.yaml")
    assert translation.layer["policy"]["optimizer"]["kwargs"] == {"weight_decay": 0.0, "lr": 0.1}


def test_muon_is_refused_with_the_keys_of_fsdp2() -> None:
    """Both subtract lr f sqrt(max(out, in)) NS(momentum) with f=0.5, and lr weight_decay of the weights."""
    optimizer = "policy.megatron_cfg.optimizer"
    changes = {"optimizer": "dist_muon", "lr": 1e-3, "weight_decay": 0.1, "muon_extra_scale_factor": 0.5, "muon_momentum": 0.9}
    (found,) = with_keys("grpo_megatron", *(f"{optimizer}.{name}={value}" for name, value in changes.items()))[1].problems
    assert (found.key, found.code) == (f"{optimizer}.optimizer", "unsupported")
    ours = yaml.safe_load(found.message.partition("policy.optimizer.kwargs=")[2])
    assert ours["lr"] * 0.2 == pytest.approx(1e-3 * 0.5) and ours["lr"] * ours["weight_decay"] == pytest.approx(1e-3 * 0.1)
    assert (ours["momentum"], ours["adamw"]["lr"], ours["adjust_lr_fn"]) == (0.9, 1e-3, "match_rms_adamw")
