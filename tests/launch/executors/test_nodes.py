"""Components that share nodes, each with GPUs of its own; and the CPUs, memory and threads of components with GPUs."""

import re
import subprocess

import pytest

from launch.executors import allocation, nodes
from launch.executors.components import components
from launch.executors.local import rank_environments
from launch.executors.nodes import ColocatedComponent
from launch.executors.slurm import batch_script
from launch.plan.refit import node_names
from launch.preflight import current_allocation as allocated
from launch.preflight import slurm_request
from pipeline import config
from pipeline.config import ComponentConfig
from tests.launch.model import write_recipe
from tests.problems import refused

SHARE = "cluster.share_nodes=true"
FOUR_AND_TWO = ("cluster.train.gpus_per_node=4", "cluster.generate.gpus_per_node=2")
TOGETHER = "policy.generation.colocated.enabled=true"


@pytest.fixture
def load(tmp_path):
    path = write_recipe(tmp_path)
    return lambda *overrides: config.load(str(path), list(overrides))


@pytest.fixture
def load_judged(load, tmp_path):
    """Load a recipe with a reward model that has ranks of its own."""
    judge = f"env={{judge: {{kind: reward_model, model_name: {tmp_path}/model, served_by: reward}}, math: {{kind: math}}}}"
    return lambda *overrides: load(judge, *overrides)


def bash(lines: list[str], variable: str, **environment: str) -> str:
    """Return a variable's value after these lines of bash."""
    command = ["bash", "-uc", "\n".join([*lines, f'echo "${variable}"'])]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


# ---- the recipe's checks ------------------------------------------------------------------------------------------------


def test_all_components_take_trains_nodes(load_judged):
    asked = ("nodes=2", "gpu=h200", "gpu_memory_gb=99", "partition=p", "account=a", "qos=q", "mem=50G", "constraint=c")
    cluster = load_judged(SHARE, *(f"cluster.train.{setting}" for setting in asked), "cluster.train.exclusive=false").cluster
    for other in (cluster.generate, cluster.reward):
        assert all(getattr(other, key) == getattr(cluster.train, key) for key in config.cluster.OF_NODES)
        assert other.gpus_per_node == 0
    assert load_judged("cluster.train.nodes=2").cluster.reward == ComponentConfig()


@pytest.mark.parametrize("component", ["generate", "reward"])
@pytest.mark.parametrize("setting", ["nodes=2", "gpu=h200", "partition=other", "account=other", "mem=1G", "exclusive=true"])
def test_invalid_keys_for_shared_nodes_are_refused(load_judged, component, setting):
    with refused((f"cluster.{component}.{setting.partition('=')[0]}", "contradiction")):
        load_judged(SHARE, f"cluster.{component}.{setting}")


def test_nodes_are_shared_in_one_way(load):
    with refused(("cluster.share_nodes", "contradiction")):
        load(SHARE, TOGETHER)


def test_a_run_of_one_component_shares_nothing(load):
    parts = components(load(SHARE, "algorithm=sft"))
    assert list(parts) == ["train"] and not isinstance(parts["train"], ColocatedComponent)


# ---- one allocation -----------------------------------------------------------------------------------------------------


def test_the_job_of_one_node(load, tmp_path):
    recipe = load(SHARE, *FOUR_AND_TWO)
    script = batch_script(tmp_path, "a", recipe.cluster, components(recipe))
    header = re.findall(r"^#SBATCH --(?!job-name|time|output|open-mode|requeue|signal)(\S+)", script, re.M)
    assert header == ["nodes=1", "ntasks-per-node=6", "gpus-per-node=6", "mem=0", "exclusive"]
    train, generate = re.findall(r"srun --overlap (.*)", script)
    assert "--ntasks=4 --ntasks-per-node=4 --cpu-bind=none --gpus-per-node=6" in train
    assert "--ntasks=2 --ntasks-per-node=2 --cpu-bind=none --gpus-per-node=6" in generate
    assert "CUDA_VISIBLE_DEVICES=$(cut -d, -f1-4 " in train and "CUDA_VISIBLE_DEVICES=$(cut -d, -f5-6 " in generate
    assert "HETSTEP_RANK=$((4 + SLURM_PROCID))" in generate and "hetjob" not in script
    assert allocated.salloc_command(recipe).count("--nodes") == 1


def test_requests_of_components_are_summed(load_judged):
    cpus = ("cluster.train.cpus_per_task=8", "cluster.generate.cpus_per_task=3", "cluster.reward.gpus_per_node=1")
    recipe = load_judged(SHARE, *FOUR_AND_TWO, *cpus)
    (host,) = nodes.hosts(components(recipe)).values()
    assert (host.gpus_per_node, host.ranks_per_node) == (7, 7)
    assert host.cpus_per_task == 6  # 4 x 8 + 2 x 3 + 1 x 1 for 7 ranks
    (request,) = slurm_request.requests(recipe)
    assert (request.gpus, request.cpus, nodes.takes_whole_nodes(request.host)) == (7, 42, True)
    three = "cluster.train.gpus_per_node + cluster.generate.gpus_per_node + cluster.reward.gpus_per_node"
    assert request.keys("gpus_per_node") == three


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6"}, ["0,1,2,3", "4,5", "6"]),
        (
            {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e,GPU-f,GPU-g"},
            ["GPU-a,GPU-b,GPU-c,GPU-d", "GPU-e,GPU-f", "GPU-g"],
        ),
        ({}, ["0,1,2,3", "4,5", "6"]),
    ],
)
def test_gpus_of_a_rank(load_judged, given, shown):
    parts = components(load_judged(SHARE, *FOUR_AND_TWO, "cluster.reward.gpus_per_node=1"))
    found = [bash(nodes.gpu_exports(share), "CUDA_VISIBLE_DEVICES", **given) for share in nodes.shares(parts).values()]
    assert found == shown


def test_colocated_ranks_and_single_components_see_all_gpus(load):
    for keys in ((TOGETHER, "cluster.train.gpus_per_node=4"), FOUR_AND_TWO):
        assert not any(map(nodes.gpu_exports, nodes.shares(components(load(*keys))).values()))


@pytest.mark.parametrize("given", [{}, {"CUDA_VISIBLE_DEVICES": "0,1"}], ids=["unset", "set"])
def test_a_component_without_gpus_sees_none(given):
    """Its node may have some, which Slurm hides only with ConstrainDevices; torch uses every GPU that it sees."""
    (share,) = nodes.shares({"reward": ComponentConfig()}).values()
    assert bash(nodes.gpu_exports(share), "CUDA_VISIBLE_DEVICES", **given) == ""


def test_inside_an_allocation(load, monkeypatch):
    monkeypatch.delenv("SLURM_HET_SIZE", raising=False)
    places = allocation._places(components(load(SHARE, *FOUR_AND_TWO)), "x")
    assert [place.split(" --immediate")[0] for place in places] == ["--relative=0 --overlap"] * 2


def test_on_this_machine(load, monkeypatch):
    monkeypatch.setattr("launch.executors.gpus.count", lambda: (8, "nvidia-smi"))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(64))
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    ranks = rank_environments(components(load(SHARE, *FOUR_AND_TWO)))
    assert [each["CUDA_VISIBLE_DEVICES"] for each in ranks] == ["0,1,2,3"] * 4 + ["4,5"] * 2
    assert {each["OMP_NUM_THREADS"] for each in ranks} == {"10"}  # of 64 CPUs for 6 ranks
    in_turn = rank_environments(components(load(TOGETHER, "cluster.train.gpus_per_node=4")))
    assert {each["OMP_NUM_THREADS"] for each in in_turn} == {"16"}


def test_the_plan_counts_shared_nodes(load):
    names = node_names(
        load(SHARE, "cluster.train.nodes=2", "cluster.train.gpus_per_node=2", "cluster.generate.gpus_per_node=1")
    )
    assert [names[rank] for rank in range(6)] == [f"train node {i}" for i in (0, 0, 1, 1, 0, 1)]


# ---- CPUs, memory, threads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({"gpus_per_node": 8}, ["--mem=0", "--exclusive"]),
        ({"gpus_per_node": 8, "mem": "500G"}, ["--mem=500G", "--exclusive"]),
        ({"gpus_per_node": 8, "mem": "default"}, ["--exclusive"]),
        ({"gpus_per_node": 8, "exclusive": False}, []),
        ({"gpus_per_node": 8, "exclusive": False, "mem": "500G"}, ["--mem=500G"]),
        ({}, []),
        ({"exclusive": True}, ["--mem=0", "--exclusive"]),
    ],
)
def test_components_with_gpus_take_whole_nodes(keys, options):
    given = nodes.allocation_options(ComponentConfig(**keys))
    assert [option for option in given if option.startswith(("--mem", "--exclusive"))] == options


def test_the_cpus_of_a_step():
    def options(**keys) -> list[str]:
        (share,) = nodes.shares({"train": ComponentConfig(**keys)}).values()
        return [option for option in nodes.step_options(share) if "cpu" in option]

    assert options(gpus_per_node=8) == ["--cpu-bind=none"]
    assert options(gpus_per_node=8, cpus_per_task=12) == options(cpus_per_task=12) == ["--cpus-per-task=12"]
    assert options() == []


@pytest.mark.parametrize(
    ("keys", "environment", "threads"),
    [
        ({"gpus_per_node": 8}, {"SLURM_CPUS_ON_NODE": "96"}, "12"),
        ({"gpus_per_node": 8}, {"SLURM_CPUS_ON_NODE": "4"}, "1"),
        ({"gpus_per_node": 8}, {"SLURM_CPUS_ON_NODE": "96", "OMP_NUM_THREADS": "3"}, "3"),
        ({"gpus_per_node": 8, "cpus_per_task": 5}, {"SLURM_CPUS_ON_NODE": "96"}, "5"),
        ({"ranks_per_node": 2}, {"SLURM_CPUS_ON_NODE": "96"}, "1"),
    ],
)
def test_threads_of_a_rank(keys, environment, threads):
    (share,) = nodes.shares({"train": ComponentConfig(**keys)}).values()
    assert bash(nodes.thread_exports(share), "OMP_NUM_THREADS", **environment) == threads


@pytest.mark.parametrize(
    ("cpus", "given", "compilers"),
    [("96", {}, "12"), ("512", {}, "32"), ("96", {"TORCHINDUCTOR_COMPILE_THREADS": "3"}, "3")],
)
def test_compilers_of_a_rank(cpus, given, compilers):
    """Inductor starts up to 32 processes for each rank of a node; OMP_NUM_THREADS says nothing of them."""
    (share,) = nodes.shares({"train": ComponentConfig(gpus_per_node=8)}).values()
    environment = {"SLURM_CPUS_ON_NODE": cpus, "OMP_NUM_THREADS": "1", **given}
    assert bash(nodes.thread_exports(share), "TORCHINDUCTOR_COMPILE_THREADS", **environment) == compilers


def test_threads_of_ranks_on_shared_nodes(load):
    for overrides, threads in (((SHARE, *FOUR_AND_TWO), "16"), ((TOGETHER, "cluster.train.gpus_per_node=4"), "24")):
        shares = nodes.shares(components(load(*overrides)))
        assert shares.keys() == {"train", "generate"}
        for share in shares.values():
            assert bash(nodes.thread_exports(share), "OMP_NUM_THREADS", SLURM_CPUS_ON_NODE="96") == threads


def test_a_request_for_part_of_a_node_is_noted(load):
    part = ("cluster.train.exclusive=false", "cluster.train.cpus_per_task=8", *FOUR_AND_TWO)
    (note,) = slurm_request.notes(load(*part))
    assert note.startswith("cluster.train.mem: got null with exclusive=false; Slurm then gives its defaults")
    assert not list(slurm_request.notes(load(*part, "cluster.train.mem=default")))
