"""`policy.megatron_cfg`: unsupported values are refused by name, and layouts must divide. NeMo-RL's section: tests/nemo_rl."""

from dataclasses import fields

import pytest
import yaml

from pipeline import config
from pipeline.config import MegatronConfig, MegatronOptimizerConfig, PolicyConfig, fixed_keys, megatron_checks, reference
from tests.problems import refused

MINIMAL = "algorithm: grpo\npolicy: {model_name: x}\nenv: {e: {kind: math}}\ndata: {train: {env_name: e}}\n"
KEY = "policy.megatron_cfg"


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "a.yaml"

    def from_text(*overrides, text=MINIMAL):
        path.write_text(text)
        return config.load(str(path), list(overrides))

    return from_text


def on(*overrides, ranks=8) -> list[str]:
    return [f"{KEY}.enabled=true", f"cluster.train.ranks_per_node={ranks}", *overrides]


# ---- keys -----------------------------------------------------------------------------------------------------------------


def test_no_default_is_refused(load):
    recipe = load(f"{KEY}.enabled=true", f"{KEY}.optimizer={{}}", f"{KEY}.scheduler={{}}")
    assert recipe.policy.megatron_cfg.optimizer.lr == 5e-6
    assert load(f"{KEY}.enabled=true").policy.megatron_cfg.optimizer is None


def test_float16_is_refused(load):
    with refused(("policy.precision", "unsupported")) as error:
        load(f"{KEY}.enabled=true", "policy.precision=float16")
    assert "Try policy.dtensor_cfg.enabled=true" in str(error.value)
    assert load("policy.dtensor_cfg.enabled=true", "policy.precision=float16").policy.precision == "float16"


OTHER_VALUES = {
    bool: lambda value: not value,
    int: lambda value: value + 1,
    float: lambda value: value + 0.5,
    str: lambda _: "odd",
    list: lambda _: ["moe"],
    dict: lambda _: {"A": "1"},
    type(None): lambda _: 2,
}


@pytest.mark.parametrize("key", [key for key in fixed_keys.FIXED if not key.endswith(fixed_keys.HIGHER)])
def test_a_fixed_key_may_only_have_its_value(load, key):
    value, reason = fixed_keys.FIXED[key]
    section = [f"{KEY}.optimizer={{}}", f"{KEY}.scheduler={{}}"]

    def given(value):
        return [*section, f"{key}={yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}"]

    other = given(OTHER_VALUES[type(value)](value))
    with refused((key, "unsupported")) as error:
        load(*on(*other))
    assert str(error.value).endswith(reason)
    assert load(*on(*given(value))) == load(*on(*given(None))) == load(*on(*section))
    if key.startswith(f"{KEY}.") and key != fixed_keys.ASYNC_SAVE:
        text = MINIMAL.replace("{model_name: x}", f"{{model_name: x, megatron_cfg: {{enabled: false, {nested(key, 'odd')}}}}}")
        assert load(text=text).policy.megatron_cfg.enabled is False  # nothing reads it
    with pytest.raises(config.RecipeError, match=r"is fixed here to .* because "):
        reference.explained(key)


def nested(key: str, value: str) -> str:
    """Return a key below `policy.megatron_cfg` and its value in YAML's flow style."""
    outer, dot, inner = key.removeprefix(f"{KEY}.").partition(".")
    return f"{outer}: {{{inner}: {value}}}" if dot else f"{outer}: {value}"


def test_a_run_of_an_older_version_goes_on_with_what_it_saved(load, tmp_path):
    recipe, path = load("grpo.normalize_rewards=false"), tmp_path / "recipe.yaml"
    config.write(recipe, path)
    saved = yaml.safe_load(path.read_text())
    saved["grpo"]["normalize_rewards"] = True
    saved["grpo"] |= {"stop_higher_is_better": False, "val_start_at": 4}
    saved["grpo"]["adv_estimator"] |= {"normalize_rewards": False, "use_leave_one_out_baseline": True}
    saved["policy"]["megatron_cfg"] |= {"checkpoint": {"async_save": True}, "env_vars": {"A": "1"}}
    saved["cluster"]["train"] |= {"container_env": ["A"], "container_writable": True}
    saved["value"] |= {"random_init": False, "freeze_parameters": []}
    path.write_text(yaml.safe_dump(saved))
    recipe.cluster.train.env_vars = recipe.cluster.reward.env_vars = {"A": "1"}
    assert config.read(path) == recipe
    stop = {"stop_at_validation_metric": "val/length", "stop_at_validation_threshold": 9.0, "stop_higher_is_better": False}
    path.write_text(yaml.safe_dump(saved | {"grpo": saved["grpo"] | stop}))
    with pytest.raises(config.RecipeError, match=r"grpo\.stop_higher_is_better: got false; expected true"):
        config.read(path)
    saved["value"]["random_init"] = True  # other weights than this version would make
    path.write_text(yaml.safe_dump(saved))
    with refused(("value.random_init", "unsupported")):
        config.read(path)


@pytest.mark.parametrize("key", fixed_keys.IGNORED)
def test_a_key_without_effect_is_noted(tmp_path, key):
    (tmp_path / "a.yaml").write_text(MINIMAL)
    loaded = config.inspect(str(tmp_path / "a.yaml"), on(f"{key}=1", f"{KEY}.optimizer.lr=1e-6"))
    assert loaded.problems == [] and [note for note in loaded.notes if fixed_keys.IGNORED[key] in note] == loaded.notes != []


OPTIMIZER = f"{KEY}.optimizer"
SCHEDULER = f"{KEY}.scheduler"
PEFT = f"{KEY}.peft"
EXCLUDED, TARGETS = f"{PEFT}.exclude_modules", f"{PEFT}.target_modules"
LORA_REFIT = "policy.generation.lora_refit"
SERVED = (f"{PEFT}.enabled=true", f"{LORA_REFIT}=adapter")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ([f"{KEY}.enabled=false", "policy.dtensor_cfg.enabled=false"], (f"{KEY}.enabled", "contradiction")),
        ([f"{KEY}.moe_router_dtype=bf16"], (f"{KEY}.moe_router_dtype", "not-a-choice")),
        ([f"{KEY}.attention_backend=sdpa"], (f"{KEY}.attention_backend", "not-a-choice")),
        ([f"{KEY}.empty_unused_memory_level=3"], (f"{KEY}.empty_unused_memory_level", "too-large")),
        ([f"{KEY}.tensor_model_parallel_size=0"], (f"{KEY}.tensor_model_parallel_size", "too-small")),
        ([f"{KEY}.recompute_granularity=selective"], (f"{KEY}.recompute_granularity", "has-no-effect")),
        ([f"{KEY}.recompute_num_layers=2"], (f"{KEY}.recompute_num_layers", "has-no-effect")),
        (
            [f"{KEY}.activation_checkpointing=true", f"{KEY}.recompute_modules=[moe]"],
            (f"{KEY}.recompute_modules", "contradiction"),
        ),
        (
            [f"{KEY}.activation_checkpointing=true", f"{KEY}.recompute_granularity=selective", f"{KEY}.recompute_num_layers=1"],
            (f"{KEY}.recompute_num_layers", "contradiction"),
        ),
        (
            [f"{KEY}.activation_checkpointing=true", f"{KEY}.recompute_granularity=selective", f"{KEY}.recompute_modules=[x]"],
            (f"{KEY}.recompute_modules", "not-a-choice"),
        ),
        ([f"{PEFT}.enabled=true", f"{PEFT}.exclude_modules=[x]", f"{PEFT}.target_modules=[y]"], (EXCLUDED, "contradiction")),
        ([f"{PEFT}.enabled=true", f"{PEFT}.target_modules=[linear_q,linear_qkv]"], (TARGETS, "contradiction")),
        ([f"{PEFT}.enabled=true", f"{PEFT}.use_dora=true", f"{PEFT}.dropout=0.5"], (f"{PEFT}.use_dora", "contradiction")),
        ([*SERVED, f"{PEFT}.use_dora=true"], (LORA_REFIT, "contradiction")),
        ([*SERVED, f"{PEFT}.dim=513"], (LORA_REFIT, "contradiction")),
        ([*SERVED, f"{PEFT}.enabled=false"], (LORA_REFIT, "contradiction")),
        ([*SERVED, "policy.generation.refit_transport=delta"], (LORA_REFIT, "contradiction")),
        ([f"{PEFT}.lora_A_init_method=normal"], (f"{PEFT}.lora_A_init_method", "not-a-choice")),
        ([f"{KEY}.model_overrides.sequence_parallel=true"], (f"{KEY}.model_overrides.sequence_parallel", "contradiction")),
        ([f"{KEY}.model_overrides.mtp_num_layers=1"], (f"{KEY}.model_overrides.mtp_num_layers", "unsupported")),
        ([f"{OPTIMIZER}.min_lr=1"], (f"{OPTIMIZER}.min_lr", "too-large")),
        ([f"{SCHEDULER}.lr_warmup_iters=2"], (SCHEDULER, "contradiction")),
        ([f"{SCHEDULER}.start_weight_decay=0.01"], (SCHEDULER, "contradiction")),
        ([f"{KEY}.mtp_num_layers=false"], (f"{KEY}.mtp_num_layers", "unsupported")),
        ([f"{KEY}.moe_enable_deepep=0"], (f"{KEY}.moe_enable_deepep", "unsupported")),
        ([f"{OPTIMIZER}={{}}", f"{SCHEDULER}.lr_decay_style=WSD"], (f"{SCHEDULER}.lr_decay_style", "not-a-choice")),
        ([f"{OPTIMIZER}={{}}", f"{SCHEDULER}.lr_decay_style=cosine"], (f"{SCHEDULER}.lr_decay_iters", "missing-value")),
        (
            [f"{OPTIMIZER}={{}}", f"{SCHEDULER}.lr_decay_iters=5", f"{SCHEDULER}.lr_warmup_iters=5"],
            (f"{SCHEDULER}.lr_warmup_iters", "too-large"),
        ),
        ([f"{OPTIMIZER}={{}}", f"{SCHEDULER}.lr_warmup_init=1"], (f"{SCHEDULER}.lr_warmup_init", "too-large")),
    ],
)
def test_contradictory_values_are_refused(load, overrides, problem):
    with refused(problem):
        load(*on(*overrides))


def test_keys_that_megatron_core_also_has_keep_their_names():
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    ours_alone = {
        *("enabled", "activation_checkpointing", "empty_unused_memory_level", "model_overrides"),
        *("freeze_moe_router", "optimizer", "scheduler", "distributed_data_parallel_config", "peft"),
    }

    def names(cls):
        return {field.name for field in fields(cls)}

    assert names(MegatronConfig) - names(TransformerConfig) == ours_alone
    assert names(MegatronOptimizerConfig) <= names(OptimizerConfig)
    assert names(config.MegatronDDPConfig) <= names(DistributedDataParallelConfig)
    recompute = set(megatron_checks.RECOMPUTE_MODULES)
    for module in (*recompute, "odd"):
        options = {"recompute_granularity": "selective", "recompute_modules": [module], "moe_grouped_gemm": True}
        options |= {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "multi_latent_attention": True}
        if module in recompute:
            TransformerConfig(**options)
        else:
            with pytest.raises(AssertionError, match="Invalid choices for recompute_modules"):
                TransformerConfig(**options)


# ---- layouts --------------------------------------------------------------------------------------------------------------


def sizes(**given: int) -> list[str]:
    names = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "ep": "expert_model", "etp": "expert_tensor"}
    return [f"{KEY}.{names[name]}_parallel_size={size}" for name, size in given.items()]


@pytest.mark.parametrize(
    ("overrides", "ranks", "problem"),
    [
        (sizes(tp=2, pp=2, cp=2), 4, (f"{KEY}.tensor_model_parallel_size", "not-divisible")),
        (sizes(tp=3), 8, (f"{KEY}.tensor_model_parallel_size", "not-divisible")),
        (sizes(ep=4, etp=2, pp=2), 8, (f"{KEY}.expert_model_parallel_size", "not-divisible")),
        (sizes(ep=3), 8, (f"{KEY}.expert_model_parallel_size", "not-divisible")),
        ([f"{KEY}.sequence_parallel=true"], 8, (f"{KEY}.sequence_parallel", "contradiction")),
        ([f"{KEY}.num_layers_in_first_pipeline_stage=2"], 8, (f"{KEY}.num_layers_in_first_pipeline_stage", "has-no-effect")),
        ([f"{KEY}.num_layers_in_last_pipeline_stage=2"], 8, (f"{KEY}.num_layers_in_last_pipeline_stage", "has-no-effect")),
        ([*sizes(tp=2), "policy.train_global_batch_size=2"], 8, ("policy.train_global_batch_size", "too-small")),
    ],
)
def test_rank_counts_that_do_not_divide_are_refused(load, overrides, ranks, problem):
    with refused(problem):
        load(*on(*overrides, ranks=ranks))


@pytest.mark.parametrize(
    ("overrides", "ranks", "message"),
    [
        (sizes(pp=3), 8, "pipeline_model_parallel_size: got 3, which does not divide the 8 ranks of cluster.train (nodes 1 x 8"
         " per node); expected a divisor of 8. Try 2 or 4, or cluster.train.nodes=3"),
        (sizes(tp=4, pp=3), 8, "pipeline_model_parallel_size: got 3; the product tensor_model_parallel_size 4 x"
         " pipeline_model_parallel_size 3 is 12, which does not divide the 8 ranks of cluster.train (nodes 1 x 8 per node);"
         " expected a divisor of 2. Try 2, or cluster.train.nodes=3"),
        (sizes(tp=8, pp=2), 8, "tensor_model_parallel_size 8 x pipeline_model_parallel_size 2 is 16, which does not divide the"
         " 8 ranks of cluster.train (nodes 1 x 8 per node); expected a divisor of 4. Try 4, or cluster.train.nodes=2"),
        (sizes(pp=16), 24, "expected a divisor of 24. Try 8, or cluster.train.nodes=2"),  # no 12, which may divide no model
        (sizes(tp=3, pp=5), 8, "expected a smaller product. Try cluster.train.nodes=15"),
    ],
)  # fmt: skip
def test_a_layout_that_does_not_divide_names_its_key_and_what_fits(load, overrides, ranks, message):
    for section, names in ((KEY, str), ("policy.dtensor_cfg", in_dtensor)):
        chosen = [f"{section}.enabled=true", f"cluster.train.ranks_per_node={ranks}"]
        with pytest.raises(config.RecipeError) as error:
            load(*chosen, *map(names, overrides))
        assert names(message) in str(error.value)


def in_dtensor(text: str) -> str:
    """Return a text about Megatron-Core's sizes with the keys of FSDP2, whose second size is the context's."""
    text = text.replace(KEY, "policy.dtensor_cfg").replace("tensor_model_", "tensor_")
    return text.replace("pipeline_model_", "context_")


@pytest.mark.parametrize("given", [{"tp": 2, "pp": 2}, {"tp": 2, "ep": 4, "etp": 2}, {"pp": 2, "ep": 4}, {"cp": 4, "tp": 2}])
def test_layouts_that_megatron_core_can_form(load, given):
    load(f"{KEY}.enabled=true", "cluster.train.ranks_per_node=8", *sizes(**given))


def test_sizes_of_the_unused_backend_are_not_checked(load):
    load(f"{KEY}.enabled=true", "policy.dtensor_cfg.tensor_parallel_size=3")
    load(f"{KEY}.enabled=false", *sizes(tp=3))
    load("policy.dtensor_cfg.tensor_parallel_size=3")  # nor is any before one is chosen


@pytest.mark.parametrize(
    ("tp", "ep", "etp", "size"), [(1, 1, None, 1), (4, 1, None, 4), (4, 2, None, 1), (4, 2, 2, 2), (2, 1, 1, 1)]
)
def test_null_expert_tensor_parallel_size_has_a_default(tp, ep, etp, size):
    section = MegatronConfig(tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    assert config.expert_tensor_parallel_size(section) == size


def test_megatron_is_not_used_unless_requested():
    policy = PolicyConfig(model_name="x")
    assert not config.uses_megatron(policy)
    policy.megatron_cfg.enabled = True
    assert config.uses_megatron(policy)


@pytest.mark.parametrize(("metric", "applies"), [("val/loss", False), ("val/accuracy", True), (None, None)])
def test_a_direction_of_early_stop_may_be_the_one_that_applies(tmp_path, metric, applies):
    (tmp_path / "a.yaml").write_text(MINIMAL)
    of = [f"grpo.stop_at_validation_metric={metric}"] if metric else []
    for higher in (True, False):
        problems = config.inspect(str(tmp_path / "a.yaml"), [*of, f"grpo.stop_higher_is_better={higher}"]).problems
        keys = [problem.key for problem in problems if problem.key.endswith("higher_is_better")]
        assert keys == ([] if applies in (None, higher) else ["grpo.stop_higher_is_better"])


def test_asynchronous_saving_of_megatrons_section_is_refused_with_fsdp2_too(tmp_path):
    section = "  dtensor_cfg: {enabled: true}\n  megatron_cfg: {checkpoint: {async_save: true}}\n"
    (tmp_path / "a.yaml").write_text(MINIMAL.replace("policy: {model_name: x}\n", f"policy:\n  model_name: x\n{section}"))
    (problem,) = config.inspect(str(tmp_path / "a.yaml"), []).problems
    assert (problem.key, problem.code) == ("policy.megatron_cfg.checkpoint.async_save", "unsupported")
