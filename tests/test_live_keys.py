"""Keys that may change while a run goes on: which there are, and that a change is checked as a recipe is."""

import dataclasses

import pytest

from pipeline.config import Recipe, config_tree, live_keys, load, schema_validation
from pipeline.config.live_keys import Change
from pipeline.recipe.problems import RecipeError

FSDP = ("policy.dtensor_cfg.enabled=true", "policy.megatron_cfg.enabled=false")
MEGATRON = ("policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true")
LR = "policy.optimizer.kwargs.lr"


@pytest.fixture(scope="module")
def started() -> Recipe:
    return load("tiny_grpo", FSDP)


def asked(recipe: Recipe, *overrides: str, now: Recipe | None = None) -> list[Change]:
    return live_keys.steered(recipe, now or recipe, list(config_tree.parse_overrides(overrides)))


def refusals(recipe: Recipe, *overrides: str, now: Recipe | None = None) -> list[tuple[str, str]]:
    with pytest.raises(RecipeError) as error:
        asked(recipe, *overrides, now=now)
    return [(problem.key, problem.code) for problem in error.value.problems]


def test_every_live_key_is_in_the_schema_and_readable(started):
    keys = schema_validation.keys(Recipe)
    for pattern in live_keys.patterns():
        assert pattern in keys or ".optimizer.kwargs." in pattern, pattern
        assert live_keys.live_key(pattern.replace("*", "some_name")) == pattern.replace("*", "some_name")
    assert len(live_keys.patterns()) == len(set(live_keys.patterns())) > 60
    for key in live_keys.live_keys(started):
        live_keys.put(copy := load("tiny_grpo", FSDP), {key: "marker"})
        assert live_keys.value_at(copy, key) == "marker"
    assert not any(key.startswith(("sft.", "value", "policy.megatron")) for key in live_keys.live_keys(started))


def test_a_change_has_typed_values_and_leaves_the_recipe_as_it_is(started):
    before = dataclasses.asdict(started)
    assert asked(started, f"{LR}=1e-5", 'grpo.max_num_steps="7"') == [
        Change(LR, 0.0001, 1e-5),
        Change("grpo.max_num_steps", started.grpo.max_num_steps, 7),
    ]
    assert asked(started, "policy.optimizer.kwargs={lr: 1e-5}", "loss_fn={ratio_clip_c: 3}") == [
        Change(LR, 0.0001, 1e-5),
        Change("loss_fn.ratio_clip_c", None, 3.0),
    ]
    linear = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"total_iters": 5}}
    live_keys.put(now := load("tiny_grpo", FSDP), {"policy.scheduler": linear})
    (inside,) = asked(started, "policy.scheduler.kwargs.total_iters=9", now=now)
    assert (inside.key, inside.old, inside.new["kwargs"]) == ("policy.scheduler", linear, {"total_iters": 9})
    assert dataclasses.asdict(started) == before


@pytest.mark.parametrize(
    ("override", "key", "code"),
    [
        ("grpo.seed=3", "grpo.seed", "not-live"),
        ("policy.generation.temperature=0.5", "policy.generation.temperature", "not-live"),
        ("policy.optimizer.kwargs.weight_decay=0", "policy.optimizer.kwargs.weight_decay", "not-live"),
        ("data.train.weight=2", "data.train.weight", "not-live"),
        ("loss_fn={}", "loss_fn", "not-live"),
        ("grpo.max_num_stepz=3", "grpo.max_num_stepz", "unknown-key"),
        ("grpo.max_num_steps=many", "grpo.max_num_steps", "wrong-type"),
        ("grpo.max_num_steps=0", "grpo.max_num_steps", "too-small"),
        ("checkpointing.save_period=0", "checkpointing.save_period", "too-small"),
        ("sft.max_num_steps=9", "sft.max_num_steps", "has-no-effect"),
        ("policy.megatron_cfg.optimizer.lr=1", "policy.megatron_cfg.optimizer.lr", "has-no-effect"),
        ("grpo.stop_patience=3", "grpo.stop_patience", "has-no-effect"),  # without a metric
        ("loss_fn.reference_policy_kl_penalty=0.1", "loss_fn.reference_policy_kl_penalty", "not-live"),  # no reference
        ("loss_fn.entropy_coeff=0.1", "loss_fn.entropy_coeff", "not-live"),
    ],
)
def test_what_is_refused(started, override, key, code):
    assert refusals(started, override) == [(key, code)]


def test_a_refusal_lists_the_keys_that_may_change_once_and_suggests_the_nearest(started):
    with pytest.raises(RecipeError) as error:
        asked(started, "policy.optimizer.kwargs.lrr=1", "checkpointing.async_save=true")
    first, second = error.value.problems
    assert f"did you mean {LR}?" in first.message and "checkpointing.save_period" in first.message
    assert second.message == "is read only when a run starts"


def test_a_section_that_is_null_does_not_appear_with_its_other_keys():
    assert refusals(load("tiny_grpo", MEGATRON), "policy.megatron_cfg.optimizer.lr=1") == [
        ("policy.megatron_cfg.optimizer.weight_decay", "not-live")
    ]


def test_models_that_the_run_has_may_be_weighed_and_weighed_again():
    """A penalty that was above 0 at the start may become 0, and rise again."""
    started = load("tiny_grpo", (*FSDP, "loss_fn.reference_policy_kl_penalty=0.1"))
    key = "loss_fn.reference_policy_kl_penalty"
    assert asked(started, f"{key}=0") == [Change(key, 0.1, 0.0)]
    live_keys.put(now := load("tiny_grpo", (*FSDP, f"{key}=0.1")), {key: 0.0})
    assert asked(started, f"{key}=0.2", now=now) == [Change(key, 0.0, 0.2)]


def test_weights_of_data_sets_change_together():
    sets = ["data.train=null", "data.datasets.a={dataset_name: scratchpad_addition, output_key: answer, env_name: addition}"]
    sets += ["data.datasets.b=${data.datasets.a}"]
    started = load("tiny_grpo", (*FSDP, *sets))
    names = [f"data.datasets.{name}.weight" for name in "ab"]
    assert {*names} <= {*live_keys.live_keys(started)}
    assert refusals(started, f"{names[0]}=2") == [(names[1], "missing-value")]
    assert asked(started, f"{names[0]}=2", f"{names[1]}=1") == [Change(names[0], None, 2.0), Change(names[1], None, 1.0)]


def test_plain_values_are_taken_as_they_are():
    """A text is no reference, and a mapping replaces the one before."""
    started = load("tiny_grpo", FSDP)
    given = {"policy.scheduler": {"name": "a.b", "kwargs": {"text": "${x}"}}}
    live_keys.put(now := load("tiny_grpo", FSDP), {"policy.scheduler": {"name": "a.b", "kwargs": {"old": 1}}})
    (change,) = live_keys.steered(started, now, live_keys.parsed(given))
    assert change.new == given["policy.scheduler"]
