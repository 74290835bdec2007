"""Recomputation and microbatches that submission chooses."""

import functools
import itertools
import json
from pathlib import Path

import pytest

from launch import submit
from launch.plan import backend_choice, lengths, memory, recomputation, train_time
from launch.runs import run_setup
from pipeline import config
from pipeline.config import hardware
from tests.launch.plan.plans import planned, table

FSDP, MEGATRON, TOKENS = "policy.dtensor_cfg", "policy.megatron_cfg", recomputation.TOKENS
OF_FSDP = [
    (f"{FSDP}.activation_checkpointing={on}", f"{FSDP}.recompute_granularity={what}")
    for on, what in (("false", "full"), ("true", "full"))
]
ALL_OR_NONE = [
    (f"{MEGATRON}.activation_checkpointing=false", f"{MEGATRON}.recompute_granularity=full"),
    (f"{MEGATRON}.activation_checkpointing=true", f"{MEGATRON}.recompute_granularity=full"),
]
BLOCK = (*ALL_OR_NONE[1], f"{MEGATRON}.recompute_method=block")


def blocks(layers: int) -> list[tuple[str, ...]]:
    return [*ALL_OR_NONE, *((*BLOCK, f"{MEGATRON}.recompute_num_layers={count}") for count in range(1, layers))]


@functools.cache
def chosen(name: str, *overrides: str):
    return backend_choice.choose(config.load(name, ["run_dir=runs/none", *overrides]))


def estimated(name: str, *overrides: str) -> tuple[float, float]:
    """Return (seconds, bytes) of the train ranks. The overrides leave nothing to choose."""
    recipe, choice = chosen(name, *overrides)
    assert choice.recomputation == ""
    shapes = backend_choice._known_shapes(recipe, [])
    phases = train_time.phases(recipe, shapes, lengths.assume(recipe), hardware.gpu(recipe.cluster.train.gpu))
    return sum(phase.seconds for phase in phases), memory.train(recipe, shapes).total


@pytest.mark.parametrize(
    ("name", "ways", "tokens"),
    [
        ("llama8b_grpo", OF_FSDP, (4096, 8192, 16384)),
        ("llama8b_rm", OF_FSDP, (16384,)),
        pytest.param("qwen3_30ba3b_grpo", blocks(48), (4096, 8192, 16384), marks=pytest.mark.full),
        ("qwen3_235b_grpo", blocks(12), (8192, 16384, 32768)),  # two context-parallel ranks
    ],
)
def test_no_setting_that_fits_is_faster(name, ways, tokens):
    recipe, _ = chosen(name)
    room = hardware.memory_gb(recipe.cluster.train) * 1e9
    room *= 0.8 if name.startswith("qwen3") else 0.92
    every = {(way, count): estimated(name, *way, f"{TOKENS}={count}") for way, count in itertools.product(ways, tokens)}
    best = min(seconds for seconds, held in every.values() if held <= room)
    section = FSDP if recipe.policy.dtensor_cfg.enabled else MEGATRON
    settings, count = getattr(recipe.policy, section.partition(".")[2]), recipe.policy.sequence_packing.train_mb_tokens
    names = recomputation.NAMES if section == MEGATRON and settings.recompute_method else recomputation.NAMES[:2]
    way = tuple(f"{section}.{name}={str(getattr(settings, name)).lower()}" for name in names)
    seconds, held = every[way, count]
    assert held <= room
    assert best <= seconds <= 1.01 * best


@pytest.mark.parametrize("name", ["llama8b_grpo", "llama8b_ppo", "llama70b_grpo"])
def test_a_chosen_setting_is_printed_and_no_other_proposed(name):
    printed = table(planned(name))
    assert "recomputation policy." in printed and "of a GPU's memory free: " in printed
    assert " would fit and take " not in printed


def test_less_memory_means_more_recomputation():
    """A plan with other GPUs or in another mode chooses anew, as its submission would."""
    mine, key = planned("llama8b_grpo"), "cluster.train.gpu_memory_gb"
    assert not mine.recipe.policy.dtensor_cfg.activation_checkpointing
    for room, fits in ((45, True), (32, True), (20, False)):
        other = mine.elsewhere(config.changed(mine.recipe, {key: room}))
        dtensor = other.recipe.policy.dtensor_cfg
        assert (dtensor.activation_checkpointing, dtensor.recompute_granularity, other.fits) == (True, "full", fits)
        assert other.recipe == chosen("llama8b_grpo", f"{key}={room}")[0]


@pytest.mark.parametrize(
    ("keys", "granularity"),
    [
        ((), "full"),  # on GPUs null compiles
        ((f"{FSDP}.compile=false",), "selective"),
        ((f"{FSDP}.use_liger_kernel=true",), "selective"),
        ((f"{FSDP}.tensor_parallel_size=2",), "selective"),
        ((f"{FSDP}.recompute_granularity=selective",), "selective"),
    ],
)
def test_only_eager_layers_recompute_selectively(keys, granularity):
    """Selective recomputation would make compiled layers eager, which the plan does not price."""
    room = 38 if f"{FSDP}.tensor_parallel_size=2" in keys else 45
    dtensor = chosen("llama8b_grpo", f"cluster.train.gpu_memory_gb={room}", *keys)[0].policy.dtensor_cfg
    assert (dtensor.activation_checkpointing, dtensor.recompute_granularity) == (True, granularity)


def test_the_choice_is_of_the_gpu_that_plan_hardware_measured(tmp_path):
    record = json.loads(Path(__file__).with_name("artificial_gpu_check.json").read_text())
    record["machine"]["memory_gb"] = [40.0, 40.0]
    (path := tmp_path / "measured.json").write_text(json.dumps(record))
    keys = (f"{FSDP}.compile=false", f"plan.hardware={path}")
    recipe, choice = chosen("llama8b_grpo", *keys)
    assert recipe.policy.dtensor_cfg.activation_checkpointing and " of 40 GB" in choice.recomputation
    assert recipe.cluster.train.gpu_memory_gb is None  # which the recipe does not say
    shapes = backend_choice._known_shapes(recipe, [])
    measured, assumed = (
        recomputation.try_all(each, [{}], shapes, lengths.assume(each))[0].seconds
        for each in (recipe, config.changed(recipe, {"plan.hardware": None}))
    )
    assert measured > 1.5 * assumed  # matrix products reach 25 % of the peak


def test_a_gpu_that_an_engine_shares_has_less_room():
    shared, alone = (
        chosen("qwen3_1p7b_grpo_single_gpu"),
        chosen("qwen3_1p7b_grpo_single_gpu", "policy.generation.colocated.enabled=false", "cluster.generate.gpus_per_node=1"),
    )
    assert all(held.partition(": ")[2] for _, choice in (shared, alone) for held in [choice.recomputation])
    held = [float(choice.recomputation.rpartition(": ")[2].split()[0]) for _, choice in (shared, alone)]
    tokens = [recipe.policy.sequence_packing.train_mb_tokens for recipe, _ in (shared, alone)]
    assert tokens[0] == tokens[1] and held[0] > held[1]


def test_an_engine_that_fills_its_turn_leaves_the_choice_to_training():
    full, roomy = (
        chosen("qwen3_1p7b_grpo_single_gpu", f"policy.generation.vllm_cfg.gpu_memory_utilization={share}")
        for share in (0.95, 0.5)
    )
    assert full[1].recomputation == roomy[1].recomputation and ", the fastest of " in full[1].recomputation


@pytest.mark.parametrize(
    "given",
    [
        (f"{FSDP}.activation_checkpointing=true",),
        (f"{FSDP}.activation_checkpointing=true", f"{FSDP}.recompute_granularity=full", f"{TOKENS}=5000"),
        (f"{FSDP}.recompute_granularity=selective",),
        (f"{TOKENS}=9000",),
        (f"{FSDP}.compile=true", "cluster.train.gpu_memory_gb=45"),
        (f"{FSDP}.enabled=false", f"{MEGATRON}.enabled=true", *BLOCK, f"{MEGATRON}.recompute_num_layers=5"),
        (
            *(f"{FSDP}.enabled=false", f"{MEGATRON}.enabled=true", f"{MEGATRON}.activation_checkpointing=null"),
            *(f"{MEGATRON}.recompute_granularity=null", f"{MEGATRON}.recompute_modules=[moe_act]"),
        ),
    ],
)
def test_given_values_stay(given):
    recipe, _ = chosen("llama8b_grpo", *given)
    assert not recomputation.open_keys(recipe)
    config.validate(recipe)
    as_given = config.load("llama8b_grpo", ["run_dir=runs/none", *given])
    for override in given:
        key, _, value = override.partition("=")
        if value != "null":
            assert recomputation._value(recipe, key) == recomputation._value(as_given, key)


def test_without_known_memory_whole_layers_are_recomputed():
    for given, why in (
        (["cluster.train.gpus_per_node=0", "cluster.generate.gpus_per_node=0"], "cluster.train has no GPUs"),
        (["policy.model_name=runs/none/hf"], "the plan does not know the model"),
    ):
        recipe, choice = chosen("llama8b_grpo", *given)
        dtensor = recipe.policy.dtensor_cfg
        assert (dtensor.activation_checkpointing, dtensor.recompute_granularity) == (True, "full")
        assert recipe.policy.sequence_packing.train_mb_tokens == 4096 and why in choice.recomputation


def test_a_continued_run_keeps_what_was_chosen(tmp_path):
    first, _ = chosen("llama8b_grpo", f"run_dir={tmp_path}")
    run_setup.prepare(first, tmp_path, "")
    for more in (
        (),
        ("cluster.train.gpu_memory_gb=60",),
        ("cluster.train.gpus_per_node=0", "cluster.generate.gpus_per_node=0"),
    ):
        again = config.load("llama8b_grpo", [f"run_dir={tmp_path}", *more])
        before = run_setup.earlier(again)
        assert before is not None and before.policy == first.policy
        again, choice = backend_choice.choose(again, before=before)
        assert again.policy.dtensor_cfg == first.policy.dtensor_cfg
        assert again.policy.sequence_packing == first.policy.sequence_packing
        assert choice.recomputation.endswith(", as the run began") and choice.open_keys == ()
        assert not run_setup.differences(before, again)
    given = config.load("llama8b_grpo", [f"run_dir={tmp_path}", f"{FSDP}.activation_checkpointing=true"])
    changed, _ = backend_choice.choose(given, before=run_setup.earlier(given))
    assert changed.policy.dtensor_cfg.activation_checkpointing  # a value that the user now gives
    assert not run_setup.differences(first, changed)  # microbatches stay, which a continued run must not change


def test_a_run_continued_on_smaller_gpus_recomputes_more(tmp_path):
    """Recomputation computes the same bits. Other microbatches would not, and neither would layers that are compiled now."""
    small = ("cluster.train.gpu_memory_gb=44", f"run_dir={tmp_path}")
    as_before = config.load("llama8b_grpo", list(small))
    for given, full in (((), True), (OF_FSDP[0], False)):
        before, _ = chosen("llama8b_grpo", f"run_dir={tmp_path}", f"{TOKENS}=5000", *given)
        assert not before.policy.dtensor_cfg.activation_checkpointing
        continued, choice = backend_choice.choose(config.load("llama8b_grpo", [*small, *given]), before=before)
        dtensor = continued.policy.dtensor_cfg
        assert (dtensor.activation_checkpointing, dtensor.recompute_granularity) == (full, "full")
        assert continued.policy.sequence_packing.train_mb_tokens == 5000 and not run_setup.differences(before, continued)
        assert choice.recomputation.endswith(", as the run began") is not full
    eager = {f"{FSDP}.activation_checkpointing": True, f"{FSDP}.recompute_granularity": "selective"}
    continued, _ = backend_choice.choose(as_before, before=config.changed(before, eager))
    assert continued.policy.dtensor_cfg.recompute_granularity == "selective"


def test_the_submission_stores_the_choice(capsys, tmp_path):
    with pytest.raises(config.RecipeError):  # there is no Slurm and no model here
        submit.execute(submit.SubmitRequest("llama8b_grpo", [f"run_dir={tmp_path}", "cluster.executor=slurm"], dry_run=True))
    printed = capsys.readouterr().out
    assert "# recomputation: policy.dtensor_cfg.activation_checkpointing=false" in printed
    assert "    train_mb_tokens: 4096\n" in printed and "train_mb_tokens: null" not in printed


def test_a_choice_that_selects_no_key_is_not_told():
    """Without recomputation, its granularity has no effect."""
    recipe, choice = chosen("llama70b_grpo", *ALL_OR_NONE[0][:1], f"{TOKENS}=4096")
    assert choice.recomputation == "" and not recipe.policy.megatron_cfg.activation_checkpointing
