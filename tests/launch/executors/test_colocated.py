"""Train and generate ranks that share nodes and GPUs: the recipe's checks, and where the ranks start."""

import dataclasses
import re

import pytest

from launch.executors import allocation
from launch.executors.components import components
from launch.executors.local import rank_environments
from launch.executors.nodes import ColocatedComponent, hosts
from launch.executors.slurm import batch_script
from launch.preflight import current_allocation as allocated
from launch.preflight.slurm_request import requests
from pipeline import config
from pipeline.config.cluster import SHARED
from tests.launch.model import write_recipe
from tests.problems import refused

SHARE = "policy.generation.colocated.enabled=true"
TWO_NODES = (
    *("cluster.train.nodes=2", "cluster.train.gpus_per_node=2", "cluster.generate.ranks_per_node=1"),
    *("cluster.train.cpus_per_task=3", "cluster.generate.cpus_per_task=4", "cluster.train.partition=gpus"),
)


@pytest.fixture
def load(tmp_path):
    path = write_recipe(tmp_path)
    return lambda *overrides: config.load(str(path), list(overrides))


# ---- the recipe's checks ------------------------------------------------------------------------------------------------


def test_generate_takes_trains_values(load):
    given = ("nodes=2", "gpus_per_node=4", "gpu=h200", "gpu_memory_gb=99", "mem=50G", "account=a", "qos=b", "exclusive=true")
    asked = [f"cluster.train.{setting}" for setting in (*given, "constraint=c", "partition=d")]
    batch = ("policy.train_global_batch_size=8", "grpo.num_prompts_per_step=4")
    shared = load(SHARE, *batch, *asked, "cluster.generate.python=other").cluster
    assert all(getattr(shared.generate, key) == getattr(shared.train, key) != apart for key, apart in SHARED.items())
    assert shared.generate.python == "other" and shared.train.python is None
    apart = load(*batch, *asked).cluster.generate
    assert {key: getattr(apart, key) for key in SHARED} == SHARED
    assert apart == config.ComponentConfig()  # whose defaults these are


@pytest.mark.parametrize("setting", ["nodes=2", "gpus_per_node=1", "gpu=h200", "partition=other", "mem=1G", "exclusive=true"])
def test_other_values_of_generate_are_refused(load, setting):
    with refused((f"cluster.generate.{setting.partition('=')[0]}", "contradiction")):
        load(SHARE, f"cluster.generate.{setting}")


@pytest.mark.parametrize(("setting", "other"), [("served_by", "reward"), ("cpu_offload", "false")])
def test_a_reward_model_is_served_by_the_train_ranks_and_makes_room(load, tmp_path, setting, other):
    judge = f"env={{judge: {{kind: reward_model, model_name: {tmp_path}/model, {setting}: {other}}}, math: {{kind: math}}}}"
    load(judge)
    with refused((f"env.judge.{setting}", "contradiction")):
        load(SHARE, judge)
    load(SHARE, judge, "env.judge.served_by=train", "env.judge.cpu_offload=true")


def test_it_does_not_affect_a_run_without_sampling(load):
    assert list(components(load(SHARE, "algorithm=sft"))) == ["train"]
    assert not config.colocated(load(SHARE, "algorithm=sft"))


# ---- placement of ranks -------------------------------------------------------------------------------------------------


def test_two_processes_have_one_gpu(load, monkeypatch):
    monkeypatch.setattr("launch.executors.gpus.count", lambda: (8, "nvidia-smi"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ranks = rank_environments(components(load(SHARE, *TWO_NODES)))
    assert [each["CUDA_VISIBLE_DEVICES"] for each in ranks] == ["0,1", "0,1", "2,3", "2,3", "0,1", "2,3"]
    assert [each["HETSTEP_COMPONENT"] for each in ranks] == ["train"] * 4 + ["generate"] * 2
    assert [each["HETSTEP_LOCAL_RANK"] for each in ranks] == ["0", "1", "0", "1", "0", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    alone = rank_environments(components(load(SHARE, "cluster.train.gpus_per_node=2")))
    assert [each["CUDA_VISIBLE_DEVICES"] for each in alone] == ["5,7"] * 4
    after = {"train": config.ComponentConfig(gpus_per_node=1), "generate": ColocatedComponent(gpus_per_node=1)}
    after["reward"] = config.ComponentConfig(gpus_per_node=1)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in rank_environments(after)] == ["5", "5", "7"]


def test_one_allocation_and_two_steps_that_overlap(load, tmp_path):
    recipe = load(SHARE, *TWO_NODES)
    script = batch_script(tmp_path, "a", recipe.cluster, components(recipe))
    header = re.findall(r"^#SBATCH --(nodes|ntasks-per-node|cpus-per-task|gpus-per-node|partition)=(\S+)", script, re.M)
    assert dict(header) == {
        "nodes": "2",
        "ntasks-per-node": "2",
        "cpus-per-task": "3",
        "gpus-per-node": "2",
        "partition": "gpus",
    }
    assert "hetjob" not in script and "het-group=" not in script
    train, generate = re.findall(r"srun --overlap (.*?) bash -c", script)
    assert "--nodes=2 --ntasks=4 --ntasks-per-node=2 --cpu-bind=none --gpus-per-node=2" in train
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1 --cpu-bind=none --gpus-per-node=2" in generate
    assert "HETSTEP_RANK=$((4 + SLURM_PROCID))" in script and "HETSTEP_WORLD_SIZE=6" in script
    apart = batch_script(tmp_path, "a", load().cluster, components(load()))
    assert "--overlap" not in apart and "--het-group=1" in apart


def test_slurm_gets_one_request(load):
    recipe = load(SHARE, *TWO_NODES)
    (request,) = requests(recipe)
    assert (request.key, request.host.nodes, request.host.ranks_per_node) == ("cluster.train", 2, 2)
    assert (request.cpus, request.gpus) == (6, 2)
    assert allocated.salloc_command(recipe).count("--nodes") == 1
    assert list(hosts(components(load()))) == ["train", "generate"]
    bare = hosts(components(load(SHARE)))["train"]
    assert bare == dataclasses.replace(load(SHARE).cluster.train, ranks_per_node=1) and bare.cpus_per_task is None


@pytest.mark.parametrize(
    ("train", "generate", "expected"),  # (ranks of a node, CPUs of a rank)
    [((8, 4), (1, 32), (8, 4)), ((8, 3), (1, 32), (8, 4)), ((1, 32), (8, 5), (8, 5)), ((3, None), (2, 2), (3, 2))],
)
def test_the_cpus_of_a_node_are_those_of_the_larger_need(train, generate, expected):
    parts = {
        name: kind(ranks_per_node=count, cpus_per_task=cpus)
        for name, kind, (count, cpus) in (("train", config.ComponentConfig, train), ("generate", ColocatedComponent, generate))
    }
    host = hosts(parts)["train"]
    assert (host.ranks_per_node, host.cpus_per_task) == expected


def test_inside_an_allocation(load, monkeypatch):
    monkeypatch.delenv("SLURM_HET_SIZE", raising=False)
    parts = components(load(SHARE, *TWO_NODES))
    found = allocation._places(parts | {"reward": config.ComponentConfig()}, "x")
    assert [place.split(" --immediate")[0] for place in found] == ["--relative=0 --overlap"] * 2 + ["--relative=2 --overlap"]
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    assert all(place.startswith("--het-group=0 --overlap") for place in allocation._places(parts, "x"))
