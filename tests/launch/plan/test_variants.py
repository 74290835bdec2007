"""The same GPUs in other modes and with other divisions, against plans of recipes with those keys."""

import functools
import itertools

import pytest

from launch.plan import backend_choice, variants
from launch.plan.estimate import plan
from pipeline import config
from tests.launch.plan.plans import planned, table
from tests.launch.plan.test_calibration import run

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


def test_the_recipe_s_own_mode_is_compared_at_its_best_division():
    """Check it so that `choice` and `split` advise the same."""
    nodes = ("cluster.train.nodes=1", "cluster.generate.nodes=5")
    rows = variants.compare(planned("llama8b_grpo", *nodes))
    assert [mode.name for mode in rows] == ["async", "async", "sync", "colocated"] and not rows[0].changes
    best = variants.choose(rows)
    assert best is rows[1] and best.cost < rows[0].cost
    split = planned("llama8b_grpo", *nodes).split
    assert best.changes == split.changes
    assert "fewer GPU-hours than the recipe as it is" in told("llama8b_grpo", *nodes)


@pytest.mark.full
def test_a_division_that_fits_is_named_where_the_recipe_s_own_does_not():
    shared = ("cluster.share_nodes=true", "cluster.train.gpus_per_node=2", "cluster.generate.gpus_per_node=6")
    shared += ("cluster.train.gpu_memory_gb=78", "cluster.generate.gpu_memory_gb=78")
    rows = variants.compare(planned("llama8b_grpo", *ONE_NODE, *shared))
    assert rows[0].name == rows[1].name == "async" and rows[0].why_not and not rows[1].why_not
    assert "a step, and fits" in told("llama8b_grpo", *ONE_NODE, *shared)


@pytest.mark.full
def test_a_better_division_is_taken():
    found = compared("qwen3_30ba3b_gspo")
    nodes = {
        name: (mode.plan.recipe.cluster.train.nodes, mode.plan.recipe.cluster.generate.nodes) for name, mode in found.items()
    }
    assert nodes["sync"] == (4, 2) and nodes["async"] == (2, 4) and nodes["colocated"] == (6, 6)
    assert found["async"].plan.refit != found["sync"].plan.refit


def test_a_layout_that_does_not_divide_all_nodes_takes_fewer():
    """Check that two of three nodes are used: a model is sharded over 16 ranks."""
    layout = {"enabled": True, "tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 2, "sequence_parallel": True}
    keys = [f"policy.megatron_cfg.{key}={str(value).lower()}" for key, value in layout.items()]
    found = compared("llama8b_grpo", *keys, "policy.dtensor_cfg.enabled=false", "cluster.train.nodes=2")
    assert found["async"].plan.gpus == 24 and found["colocated"].plan.gpus == 16
    assert found["colocated"].plan.recipe.cluster.train.nodes == found["colocated"].plan.recipe.cluster.generate.nodes == 2


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


# ---- divisions ----------------------------------------------------------------------------------------------------------

TWELVE = ("cluster.train.nodes=10", "cluster.generate.nodes=2", "policy.train_global_batch_size=2048")


def choose(*overrides: str, run_dir: str = "runs/none"):
    return backend_choice.choose(config.load("llama8b_grpo", [f"run_dir={run_dir}", *overrides]))


def test_every_valid_division_is_compared():
    recipe, _ = choose("cluster.train.nodes=3", "cluster.generate.nodes=5", "policy.generation.vllm_cfg.tensor_parallel_size=8")
    nodes = [tuple(changes.values()) for changes in variants.divisions(recipe)]
    assert nodes == [(1, 7), (2, 6), (4, 4), (5, 3), (6, 2), (7, 1)]


def test_the_best_division_is_printed_with_its_speedup():
    found = planned("llama8b_grpo", *TWELVE)
    better = found.split
    train, generate = better.changes.values()
    assert train + generate == 12 and generate > 2
    again = planned("llama8b_grpo", *TWELVE, *str(better).split())
    assert again.split is None
    assert better.seconds == pytest.approx(again.step, rel=0.01)  # but for the refit, which is taken to be as long
    assert better.gain == pytest.approx(1 - better.seconds / found.step) and better.gain > 0.03
    text = table(found)
    assert f"{better} would take" in text and f"{better.gain:.0%} less, by these estimates only" in text


def test_a_measured_run_overrides_predicted_times(tmp_path):
    """If training takes a hundred times the predicted time, it gets more nodes."""
    slow = {"rollout": 30.0, "train": 3000.0}
    folder = run(tmp_path / "run", *TWELVE, name="llama8b_grpo", clocks=slow)
    even = ("cluster.train.nodes=6", "cluster.generate.nodes=6", TWELVE[-1])
    found = plan(*choose(*even, run_dir=str(tmp_path / "other")), before=folder)
    assert found.split.changes["cluster.train.nodes"] == 11 and "as measured in" in table(found)


def test_gpus_of_shared_nodes():
    shared = ("cluster.share_nodes=true", "cluster.train.gpus_per_node=2", "cluster.generate.gpus_per_node=6")
    recipe, choice = choose(*shared, "policy.generation.vllm_cfg.tensor_parallel_size=2")
    found = plan(recipe, choice)
    assert str(found.split) == "cluster.train.gpus_per_node=4 cluster.generate.gpus_per_node=4"
    assert not variants.movable(choose(*shared, "cluster.train.ranks_per_node=1")[0])


def test_nodes_are_movable_only_with_several_and_equal_gpus():
    assert not variants.movable(choose()[0])  # one node each
    assert not variants.movable(choose(*TWELVE, "cluster.generate.gpu=h200")[0])
    assert not variants.movable(config.load("llama8b_sft", ["cluster.train.nodes=4"]))
    assert variants.movable(choose(*TWELVE)[0])


def test_many_nodes_are_divided_in_steps():
    assert [*variants.halves(4)] == [(1, 3), (2, 2), (3, 1)]
    assert len([*variants.halves(variants.MOST)]) == variants.MOST - 1
    for total in (variants.MOST + 1, 258, 4096):
        found = [*variants.halves(total)]
        assert len(found) <= 2 * variants.MOST and all(sum(sizes) == total for sizes in found)
        trains = [train for train, _ in found]
        gaps = [after - before for before, after in itertools.pairwise(trains)]
        assert min(gaps) > 0 and max(gaps) <= total / variants.MOST * 2
