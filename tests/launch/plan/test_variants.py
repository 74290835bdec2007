"""The same GPUs in other modes, against plans of recipes with those keys."""

import functools

import pytest

from launch.plan import variants
from pipeline import config
from tests.launch.plan.plans import planned, table

COLOCATED = "policy.generation.colocated.enabled=true"


@functools.cache
def compared(name: str, *overrides: str) -> dict[str, variants.Mode]:
    return {mode.name: mode for mode in variants.compare(planned(name, *overrides))}


def told(name: str, *overrides: str) -> str:
    return table(planned(name, *overrides), compared=True)


@pytest.mark.parametrize("name", ["llama8b_grpo", "llama8b_grpo_sync"])
def test_each_mode_is_the_plan_of_a_recipe_with_its_keys(name):
    """Check it from whichever mode the comparison starts."""
    found = compared(name)
    expected = {
        "async": planned("llama8b_grpo"),
        "sync": planned("llama8b_grpo_sync"),
        "colocated": planned("llama8b_grpo_sync", COLOCATED, "cluster.train.nodes=2", "cluster.generate.nodes=2"),
    }
    for mode, single in expected.items():
        assert found[mode].plan.step_time == single.step_time and found[mode].plan.gpu_hours == pytest.approx(
            single.gpu_hours
        ), mode
        assert found[mode].plan.gpus == 16 and found[mode].why_not == ""
    own = variants.mode_name(planned(name).recipe)
    assert [mode for mode in found if not found[mode].changes] == [own]


JUDGE = "env.preference.model_name=Skywork/Skywork-Reward-V2-Qwen3-0.6B"


ONE_NODE = ("cluster.train.nodes=1", "cluster.generate.nodes=1")
HALVES = (*ONE_NODE, "cluster.share_nodes=true", "cluster.train.gpus_per_node=4", "cluster.generate.gpus_per_node=4")
IN_TURN = (*ONE_NODE, COLOCATED)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        pytest.param("qwen3_30ba3b_gspo", (), marks=pytest.mark.full),
        ("llama8b_grpo_rm", ("needs=[]", JUDGE)),
        ("llama8b_grpo", HALVES),
        ("llama8b_grpo_sync", IN_TURN),
    ],
)
def test_the_printed_keys_select_the_mode(name, overrides):
    recipe, found = planned(name, *overrides).recipe, compared(name, *overrides)
    assert len(found) > 1
    for mode in found.values():
        again = config.changed(recipe, mode.changes)
        assert variants.mode_name(again) == mode.name
        assert again.cluster == mode.plan.recipe.cluster


def test_the_fewest_gpu_hours_are_chosen():
    found = compared("llama8b_grpo")
    best = variants.choose(list(found.values()))
    assert best.name == "async" and best.cost < found["colocated"].cost < found["sync"].cost
    assert found["sync"].plan.step_time.train > 0 < found["sync"].plan.step_time.generate
    text = told("llama8b_grpo")
    assert "async, as it is 1 + 1 16" in text and "choice async: " in text and "fewer GPU-hours than sync" in text
    assert "grpo.async_grpo.enabled=true" not in text  # it has this mode already
    other = told("llama8b_grpo_sync")
    keys = "grpo.async_grpo.enabled=true loss_fn.use_importance_sampling_correction=true"  # what else it takes is there
    assert "sync, as it is" in other and keys in other


def test_an_on_policy_mode_is_chosen_where_little_is_gained():
    """Rollouts of a few tokens take no time, so that there is nothing to overlap."""
    short = ("plan.answer_tokens=4", "policy.generation.max_new_tokens=8")
    found = compared("llama8b_grpo", *short)
    assert found["async"].cost < found["sync"].cost < 1.03 * found["async"].cost
    two = [found["async"], found["sync"]]
    assert variants.choose(two).name == "sync"
    assert "fewer GPU-hours, but trains on older rollouts" in variants.choice(two)


@pytest.mark.parametrize("overrides", [HALVES, IN_TURN])
def test_the_gpus_of_one_node_are_divided_or_shared(overrides):
    found = compared("llama8b_grpo_sync", *overrides)
    assert [mode.plan.gpus for mode in found.values()] == [8, 8, 8]
    shared = {name: mode.plan.recipe.cluster for name, mode in found.items()}
    assert [shared[name].share_nodes for name in variants.NAMES] == [True, True, False]
    assert shared["colocated"].train.gpus_per_node == shared["colocated"].generate.gpus_per_node == 8


@pytest.mark.full
def test_dynamic_sampling_samples_as_much_in_each_mode():
    batches = ("grpo.async_grpo.enabled=false", "grpo.batch_multiplier=3")
    found = compared("dapo_qwen2p5_32b", *batches)
    assert found["async"].changes["grpo.batch_multiplier"] == 1.0
    assert found["async"].plan.seconds["rollout"] == found["sync"].plan.seconds["rollout"]


@pytest.mark.parametrize(
    ("name", "overrides", "mode", "why"),
    [
        ("qwen3_4b_distill", (), "async", "algorithm: got distillation; expected grpo or ppo"),
        ("qwen3_1p7b_grpo_single_gpu", (), "sync", "cluster.train.gpus_per_node: cannot divide one train node"),
        ("llama8b_grpo", ("cluster.generate.gpu=h200",), "colocated", "cluster.generate: got nodes of another kind"),
        ("llama8b_grpo", ("policy.generation.vllm_cfg.gpu_memory_utilization=0.94",), "colocated", "a GPU may need"),
    ],
)
def test_an_unavailable_mode_has_a_reason(name, overrides, mode, why):
    found = compared(name, *overrides)
    assert why in found[mode].why_not
    assert variants.choose(list(found.values())).name != mode
    assert f"not possible: {found[mode].why_not}" in told(name, *overrides)


def test_without_times_no_modes_are_compared():
    assert compared("tiny_grpo", "policy.model_name=recipes/tiny") == compared("llama8b_sft") == {}
