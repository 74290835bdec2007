"""Other divisions of the same nodes between training and generation."""

import itertools

import pytest

from launch.plan import backend_choice, split
from launch.plan.estimate import plan
from pipeline import config
from tests.launch.plan.plans import planned, table
from tests.launch.plan.test_calibration import run

TWELVE = ("cluster.train.nodes=10", "cluster.generate.nodes=2", "policy.train_global_batch_size=2048")


def choose(*overrides: str, run_dir: str = "runs/none"):
    return backend_choice.choose(config.load("llama8b_grpo", [f"run_dir={run_dir}", *overrides]))


def test_every_valid_division_is_compared():
    recipe, _ = choose("cluster.train.nodes=3", "cluster.generate.nodes=5", "policy.generation.vllm_cfg.tensor_parallel_size=8")
    nodes = [(other.cluster.train.nodes, other.cluster.generate.nodes) for other in split.others(recipe)]
    assert nodes == [(1, 7), (2, 6), (4, 4), (5, 3), (6, 2), (7, 1)]
    wide, _ = choose("cluster.train.nodes=4", "cluster.generate.nodes=4", "policy.generation.vllm_cfg.tensor_parallel_size=16")
    assert [other.cluster.generate.nodes for other in split.others(wide)] == [6, 2]


def test_the_best_division_is_printed_with_its_speedup():
    found = planned("llama8b_grpo", *TWELVE)
    better = found.split
    assert better.train + better.generate == 12 and better.generate > 2
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
    assert found.split.train == 11 and "as measured in" in table(found)


def test_gpus_of_shared_nodes():
    shared = ("cluster.share_nodes=true", "cluster.train.gpus_per_node=2", "cluster.generate.gpus_per_node=6")
    recipe, choice = choose(*shared, "policy.generation.vllm_cfg.tensor_parallel_size=2")
    gpus = [(other.cluster.train.gpus_per_node, other.cluster.generate.gpus_per_node) for other in split.others(recipe)]
    assert gpus == [(4, 4), (6, 2)]
    found = plan(recipe, choice)
    assert found.split.train == 4 and str(found.split) == "cluster.train.gpus_per_node=4 cluster.generate.gpus_per_node=4"
    assert not split.movable(choose(*shared, "cluster.train.ranks_per_node=1")[0])


def test_nodes_are_movable_only_with_several_and_equal_gpus():
    assert not split.movable(choose()[0])  # one node each
    assert not split.movable(choose(*TWELVE, "cluster.generate.gpu=h200")[0])
    assert not split.movable(config.load("llama8b_sft", ["cluster.train.nodes=4"]))
    assert split.movable(choose(*TWELVE)[0])


def test_many_nodes_are_divided_in_steps():
    assert [*split.halves(4)] == [(1, 3), (2, 2), (3, 1)]
    assert len([*split.halves(split.MOST)]) == split.MOST - 1
    for total in (split.MOST + 1, 258, 4096):
        found = [*split.halves(total)]
        assert len(found) <= 2 * split.MOST and all(sum(sizes) == total for sizes in found)
        trains = [train for train, _ in found]
        gaps = [after - before for before, after in itertools.pairwise(trains)]
        assert min(gaps) > 0 and max(gaps) <= total / split.MOST * 2
