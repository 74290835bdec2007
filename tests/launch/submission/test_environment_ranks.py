"""A recipe whose environments have nodes of their own: errors before submission, its component and its plan."""

import re

import pytest

from launch.executors.components import components
from launch.executors.slurm import batch_script
from launch.plan import backend_choice, estimate, placement, plan_table
from launch.preflight import container_images, installed
from pipeline import config
from pipeline.job.world import WorkerGroups
from tests.launch.model import write_recipe
from tests.problems import refused

APART = "cluster.environment.nodes=2"
GPUS = ("cluster.train.gpus_per_node=1", "cluster.generate.gpus_per_node=1")


@pytest.fixture
def load(tmp_path):
    path = write_recipe(tmp_path)
    return lambda *overrides: config.load(str(path), list(overrides))


def test_its_ranks_are_the_last(load):
    recipe = load(APART, "cluster.environment.ranks_per_node=2", "cluster.share_nodes=true")
    workers = WorkerGroups.of(recipe)
    assert workers.environment == (2, 3, 4, 5) and workers.name(5) == "environment" and workers.engines == ((1,),)
    assert WorkerGroups.of(load()).environment == ()


def test_slurm_gives_it_whole_nodes_without_gpus(load, tmp_path):
    recipe = load(APART, *GPUS, "cluster.generate.container_image=a.sqsh", "cluster.environment.partition=cpu")
    script = batch_script(tmp_path, "a", recipe.cluster, components(recipe))
    options = script.split("#SBATCH hetjob")[2]
    assert "--nodes=2" in options and "--partition=cpu" in options and "--exclusive" in options
    step = re.search(r"srun .*--het-group=2 .*", script)[0]
    assert "--cpu-bind=none" in step and "gpus" not in step and re.search(r"--container-image=\S*a.sqsh", step)
    variables = components(load(APART, "cluster.generate.env_vars={A: 1, B: 1}", "cluster.environment.env_vars.B=2"))
    assert variables["environment"].env_vars == {"A": "1", "B": "2"}
    assert "cpu-bind" not in batch_script(tmp_path, "a", recipe.cluster, components(load(APART))).split("--het-group=1")[0]


def test_the_component_that_judges_holds_what_environments_need(load, tmp_path):
    (tmp_path / "mine.py").write_text("def right(prompt, answer, expected):\n    return 1.0\n")
    mine = f"env.math={{_override_: true, kind: '{tmp_path}/mine.py:right'}}"

    def modules(recipe: config.Recipe, name: str) -> list[str]:
        return [need.purpose for need in container_images._needs(recipe, name, []) if "module" in need.purpose]

    assert len(modules(load(APART, mine), "environment")) == 1 and modules(load(APART, mine), "generate") == []
    assert len(modules(load(mine), "generate")) == 1


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ([APART, "cluster.environment.gpus_per_node=1"], ("cluster.environment.gpus_per_node", "unsupported")),
        ([APART, "algorithm=sft"], ("cluster.environment.nodes", "has-no-effect")),
        (["cluster.environment.nodes=-1"], ("cluster.environment.nodes", "too-small")),
    ],
)
def test_wrong_keys_are_refused(load, overrides, problem):
    with refused(problem):
        load(*overrides)


def test_plans_price_the_other_components_alone(load):
    def planned(*overrides: str) -> estimate.Plan:
        return estimate.plan(*backend_choice.choose(load(*GPUS, *overrides), []))

    apart = planned(APART)
    assert list(placement.problems(apart.recipe)) == [] and apart.gpus == 2
    assert apart.step == planned().step > 0
    assert re.search(r"^environment +2 ranks on 2 nodes, no GPUs$", plan_table.text(apart), re.MULTILINE)


def test_the_note_on_sandboxes_names_its_ranks(load):
    notes: list[str] = []
    recipe = load(APART, "env.math={_override_: true, kind: code_interpreter}")
    assert list(installed.sandbox_problems(recipe, "slurm", notes)) == []
    assert any("the environment ranks check" in note for note in notes), notes
