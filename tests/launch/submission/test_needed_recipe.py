"""Keys that a recipe passes to the recipes that it needs."""

import pytest
import yaml

from launch.submission import prepare
from pipeline import config
from pipeline.config import loading
from tests.launch.model import write_recipe
from tests.problems import named


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "RECIPES", tmp_path)
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path, "base")
    return tmp_path


def needed(*overrides: str) -> config.Loaded:
    base, second = prepare.run_order("second", list(overrides))
    assert (base.recipe.name, second.recipe.name) == ("base", "second")
    return base


def test_all_cluster_keys_of_the_command_line_are_passed_on(here):
    write_recipe(here, "second", needs=["base"], run_dir="runs/second")
    given = {
        "cluster.executor": "slurm",
        "cluster.time_min": "7",
        "cluster.train.partition": "gpu",
        "cluster.train.account": "team",
        "cluster.train.container_image": "/images/train.sqsh",
        "cluster.train.container_mounts": "[/a:/b]",
        "cluster.train.python": "/opt/python",
        "cluster.generate.partition": "other",
        "cluster.train.nodes": "2",
    }
    cluster = needed(*[f"{key}={value}" for key, value in given.items()], "grpo.max_num_steps=1").recipe.cluster
    assert (cluster.executor, cluster.time_min, cluster.generate.partition) == ("slurm", 7, "other")
    train = cluster.train
    assert (train.partition, train.account, train.container_image) == ("gpu", "team", "/images/train.sqsh")
    assert (train.container_mounts, train.python, train.nodes) == (["/a:/b"], "/opt/python", 2)
    assert needed("grpo.max_num_steps=1").recipe.grpo.max_num_steps == 3


def test_sizes_are_passed_on_only_if_they_fit(here):
    two_nodes = write_recipe(here, "base", cluster={"train": {"nodes": 2}})
    recipe = yaml.safe_load(two_nodes.read_text())
    recipe["policy"]["dtensor_cfg"] = {"tensor_parallel_size": 2}
    two_nodes.write_text(yaml.safe_dump(recipe))
    write_recipe(here, "second", needs=["base"], run_dir="runs/second")
    base = needed("cluster.train.nodes=3", "cluster.train.partition=gpu", "cluster.train.cpus_per_task=2")
    assert base.problems == [] and base.recipe.cluster.train.partition == "gpu"
    assert (base.recipe.cluster.train.nodes, base.recipe.cluster.train.cpus_per_task) == (2, 2)
    site = ("cluster.executor=local", "cluster.train.partition=gpu", "cluster.train.cpus_per_task=2")
    assert base.inherited == site
    (note,) = base.notes
    assert note.startswith("cluster.train.nodes=3: not inherited by base, because of this problem: policy.dtensor_cfg.tensor")


def test_shared_nodes_are_passed_on_only_if_they_fit(here):
    in_turn = write_recipe(here, "base")
    recipe = yaml.safe_load(in_turn.read_text())
    recipe["policy"]["generation"] = {"colocated": {"enabled": True}}
    in_turn.write_text(yaml.safe_dump(recipe))
    write_recipe(here, "second", needs=["base"], run_dir="runs/second")
    base = needed("cluster.share_nodes=true", "cluster.train.partition=gpu")
    assert base.problems == [] and not base.recipe.cluster.share_nodes and base.recipe.cluster.train.partition == "gpu"


def test_the_recipes_file_keys_have_lower_precedence_than_the_needed_ones(here):
    site = {"partition": "gpu", "account": "team", "env_vars": {"NCCL_DEBUG": "INFO", "A": "${not a key}"}, "nodes": 2}
    site["env_vars"]["A"] = "two words"
    options = {"sbatch_options": {"reservation": "weekly"}}
    write_recipe(here, "second", needs=["base"], run_dir="runs/second", cluster={"executor": "slurm", "train": site, **options})
    write_recipe(here, "base", cluster={"train": {"account": "mine"}})
    cluster = needed().recipe.cluster
    assert (cluster.executor, cluster.train.partition, cluster.train.account) == ("slurm", "gpu", "mine")
    assert cluster.train.env_vars == {"NCCL_DEBUG": "INFO", "A": "two words"}
    assert cluster.train.nodes == 1 and cluster.sbatch_options == {"reservation": "weekly"}
    assert needed("cluster.train.account=theirs").recipe.cluster.train.account == "theirs"


def test_sbatch_options_are_not_passed_on_to_ranks_without_nodes(here):
    options = {"executor": "slurm", "generate": {"sbatch_options": {"nodelist": "n1"}, "python": "/opt/python"}}
    write_recipe(here, "second", needs=["base"], run_dir="runs/second", cluster=options)
    in_turn = write_recipe(here, "base")
    recipe = yaml.safe_load(in_turn.read_text())
    recipe["policy"]["generation"] = {"colocated": {"enabled": True}}
    in_turn.write_text(yaml.safe_dump(recipe))
    base = needed()
    assert base.problems == [] and base.recipe.cluster.generate.sbatch_options == {}
    assert base.recipe.cluster.generate.python == "/opt/python"


@pytest.mark.parametrize("cluster", [None, 3])
def test_a_cluster_that_is_not_a_mapping_is_refused(here, cluster):
    """It is null where all keys below `cluster:` are commented out."""
    write_recipe(here, "second", needs=["base"], run_dir="runs/second", cluster=cluster)
    _, second = prepare.run_order("second", [])
    assert named(second.problems) == {("cluster", "wrong-type")}


def test_a_wrong_key_that_is_passed_on_is_one_problem(here):
    write_recipe(here, "second", needs=["base"], run_dir="runs/second")
    problems = prepare.examine("second", ["cluster.executor=sluurm"], dry=True).all_problems
    assert [problem.origin for problem in problems if problem.key == "cluster.executor"] == ["the command line"]
