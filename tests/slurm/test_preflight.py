"""What preflight says of a recipe and a real Slurm, beside what the real sbatch says."""

import os
import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.components import components
from launch.executors.slurm import batch_script
from launch.preflight import slurm, slurm_accounts
from launch.preflight.slurm_cluster import SlurmCluster as Answers
from launch.preflight.slurm_cluster import gpus, megabytes, minutes
from launch.preflight.slurm_request import requests
from pipeline.config import ClusterConfig, ComponentConfig, Recipe
from tests.launch.waiting import wait_until
from tests.slurm.cluster import SlurmCluster, missing

pytestmark = pytest.mark.slurm

NODES = [
    *2 * ["Gres=gpu:h100:8 Feature=ib,h100"],
    *2 * ["Gres=gpu:a100:4 Feature=eth,a100 CPUs=4"],
    "Feature=eth,cpu RealMemory=64000",
]
PARTITIONS = """\
PartitionName=big Nodes=127.0.0.[10-11] Default=YES MaxTime=60
PartitionName=small Nodes=127.0.0.[12-13] MaxTime=1-00:00:00 MaxNodes=1
PartitionName=all Nodes=ALL
PartitionName=off Nodes=ALL State=DRAIN
PartitionName=private Nodes=ALL AllowAccounts=team
PartitionName=pair Nodes=ALL MinNodes=2
PartitionName=club Nodes=ALL AllowGroups=daemon
PartitionName=held Nodes=ALL ReqResv=YES
"""


@pytest.fixture(scope="module")
def own_cluster():
    if lacking := missing():
        (pytest.fail if os.environ.get("HETSTEP_REQUIRE_SLURM") == "1" else pytest.skip)(f"no Slurm here: {lacking}")
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # a short path: it holds a Unix socket
        cluster = SlurmCluster(Path(folder), NODES, PARTITIONS, "EnforcePartLimits=ALL")
        cluster.start()
        yield cluster
        cluster.stop()


@pytest.fixture
def cluster(own_cluster, monkeypatch):
    return own_cluster.enter(monkeypatch)


def recipe(time_min: int = 30, **parts: ComponentConfig) -> Recipe:
    recipe = Recipe(name="x", algorithm="grpo" if "generate" in parts else "sft", run_dir="/tmp/x")
    recipe.cluster = ClusterConfig(time_min=time_min, **parts)
    return recipe


def sbatch_takes(asked: Recipe, tmp_path) -> bool:
    """Whether `sbatch --test-only` takes the components one by one; it never looks at two together."""
    for name, component in components(asked).items():
        script = tmp_path / f"{name}.sh"
        script.write_text(batch_script(tmp_path, "x", asked.cluster, {name: component}))
        answer = subprocess.run(["sbatch", "--test-only", str(script)], capture_output=True, text=True)
        print(name, answer.stderr.strip())
        if answer.returncode:
            return False
    return True


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"partition": "bigg"}, "cluster.train.partition: there is no partition 'bigg'; did you mean 'big'"),
        ({"partition": "off"}, "cluster.train.partition: off is DRAIN"),
        ({"nodes": 3}, "cluster.train.nodes: 3, but partition big has 2 nodes; at most 2"),
        ({"nodes": 2, "partition": "small"}, "cluster.train.nodes: 2, but a job in partition small may have 1; at most 1"),
        ({"partition": "pair"}, "cluster.train.nodes: 1, but a job in partition pair must have 2; at least 2"),
        ({"gpus_per_node": 9}, "cluster.train.gpus_per_node: that is 9 GPUs on each of 1 nodes, but 0 of the 2 nodes"),
        ({"nodes": 3, "gpus_per_node": 8, "partition": "all"}, "but 2 of the 5 nodes of partition all have so much; at most 4"),
        ({"mem": "17G"}, "cluster.train.mem: that is 17408 MB of memory on each of 1 nodes, but 0 of the 2"),
        ({"mem": "17 gigs"}, "cluster.train.mem: '17 gigs' is not an amount of memory such as 500G"),
        ({"ranks_per_node": 4, "cpus_per_task": 3}, "cluster.train.cpus_per_task: that is 12 CPUs"),
        ({"ranks_per_node": 9}, "at most 1, with cluster.train.ranks_per_node=8"),
        (
            {"constraint": "h10"},
            "cluster.train.constraint: no node of partition big has the feature 'h10'; did you mean 'h100'",
        ),
        ({"constraint": "ib&a100", "partition": "all"}, "cluster.train.constraint: 0 of the 5 nodes of partition all"),
        (
            {"constraint": "cpu", "gpus_per_node": 1, "partition": "all"},
            "cluster.train.nodes: 1, but 0 of the 5 nodes of partition all have all that is asked for",
        ),
        ({"partition": "big,small", "nodes": 3}, "cluster.train.nodes: 3, but partition small has 2 nodes"),
        (
            {"partition": "held"},
            "takes only jobs with a reservation; another, or cluster.train.sbatch_options={reservation: NAME}",
        ),
    ],
)
def test_what_sbatch_refuses(cluster, tmp_path, asked, says):
    wrong = recipe(train=ComponentConfig(**asked))
    problems = list(slurm.problems(wrong))
    assert any(says in problem for problem in problems), problems
    assert not sbatch_takes(wrong, tmp_path)


def test_a_partition_for_reservations_takes_one(cluster):
    given = ComponentConfig(partition="held", sbatch_options={"reservation": "weekly"})
    assert not any("reservation" in problem for problem in slurm.problems(recipe(train=given)))


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"nodes": 2, "gpus_per_node": 8, "ranks_per_node": 8, "cpus_per_task": 1, "mem": "15G", "constraint": "h100&ib"},
        {"nodes": 4, "gpus_per_node": 4, "partition": "all", "constraint": "h100|a100"},
        {"nodes": 4, "partition": "all", "constraint": "(h100|a100)&(ib|eth)"},
        {"nodes": 2, "partition": "all", "constraint": "[h100|a100]"},
        {"mem": "60G", "partition": "all", "exclusive": True},
        {"mem": "0"},
    ],
)
def test_what_sbatch_takes(cluster, tmp_path, asked):
    right = recipe(train=ComponentConfig(**asked))
    assert list(slurm.problems(right)) == []
    assert sbatch_takes(right, tmp_path)


def test_the_time_limit_and_what_would_do(cluster, tmp_path):
    wrong = recipe(time_min=61, train=ComponentConfig(gpus_per_node=8))
    open_to_us = "all or private or club" if os.getuid() == 0 else "all or private"  # club is for a group
    assert list(slurm.problems(wrong)) == [
        "cluster.time_min: 61, but partition big (cluster.train) allows 60 minutes; at most 60",
        f"cluster.train.partition: {open_to_us} would do for what cluster.train asks for",
    ]
    assert not sbatch_takes(wrong, tmp_path)
    wrong.cluster.train.partition = "all"
    assert list(slurm.problems(wrong)) == []
    assert sbatch_takes(wrong, tmp_path)


def test_all_problems_of_all_components_at_once(cluster):
    wrong = recipe(
        train=ComponentConfig(nodes=3, gpus_per_node=9, constraint="ibb"),
        generate=ComponentConfig(partition="smal", container_image="/images/x.sqsh"),
    )
    problems = "\n".join(slurm.problems(wrong))
    keys = ("train.nodes", "train.gpus_per_node", "train.constraint", "generate.partition", "generate.container_image")
    assert all(re.search(rf"^cluster\.{key}: ", problems, re.MULTILINE) for key in keys), problems


def test_components_that_share_a_node(cluster, tmp_path):
    four = {"gpus_per_node": 4, "constraint": "ib"}
    asked = recipe(train=ComponentConfig(nodes=2, **four), generate=ComponentConfig(nodes=2, **four))
    (apart,) = slurm.problems(asked)
    assert "2 + 2 nodes, but there are 2 that would do, and two components share one only with cluster.share_nodes" in apart
    asked.cluster.share_nodes = True
    assert list(slurm.problems(asked)) == []
    asked.cluster.generate.gpus_per_node = 5
    nine = "cluster.train.gpus_per_node + cluster.generate.gpus_per_node: that is 9 GPUs on each of 2 nodes"
    assert any(problem.startswith(nine) for problem in slurm.problems(asked))


def test_gpus_that_a_job_takes_and_does_not_use_are_noted(cluster):
    for given, found in (({}, True), ({"exclusive": False, "cpus_per_task": 1, "mem": "1G"}, False)):
        list(slurm.problems(recipe(train=ComponentConfig(gpus_per_node=6, **given)), notes := []))
        idle = "cluster.train.gpus_per_node: 6, and the job takes whole nodes of 8 or more GPUs; cluster.train.exclusive=false"
        assert any(note.startswith(idle) for note in notes) == found, notes


def test_accounts_of_a_partition(cluster):
    """sbatch looks at them only where there is accounting, or in some versions."""
    asked = recipe(train=ComponentConfig(account="other", partition="private"))
    assert list(slurm.problems(asked)) == [
        "cluster.train.account: 'other' may not use partition private; one of: team",
        "cluster.train.partition: big or small or all would do for what cluster.train asks for",
    ]
    asked.cluster.train.account = "team"
    assert list(slurm.problems(asked)) == []


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be someone else")
def test_groups_of_a_partition(cluster):
    asked = recipe(train=ComponentConfig(partition="club"))
    assert list(slurm.problems(asked)) == []  # root may
    command, nobody = ["sbatch", "--test-only", "--partition=club", "--wrap=true"], 65534
    for groups in ([], [1]):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {"getuid": nobody, "getgid": nobody, "getgroups": groups}.items():
                patch.setattr(os, name, lambda value=value: value)
            problems = list(slurm.problems(asked))
        someone = {"user": nobody, "group": nobody, "extra_groups": groups, "cwd": "/"}
        answer = subprocess.run(command, capture_output=True, text=True, **someone)
        if groups:
            assert problems == []
        else:
            assert "cluster.train.partition: club is for the groups daemon" in problems[0]
            assert answer.returncode and "group" in answer.stderr


def test_two_components_never_share_a_node(cluster, tmp_path):
    """Slurm takes the job, and it waits for ever: each component alone would fit."""
    wrong = recipe(train=ComponentConfig(nodes=2, gpus_per_node=4), generate=ComponentConfig(nodes=1, gpus_per_node=4))
    assert sbatch_takes(wrong, tmp_path)
    (problem,) = slurm.problems(wrong)
    assert problem.startswith("cluster.train.nodes, cluster.generate.nodes: 2 + 1 nodes, but there are 2 that would do")
    wrong.cluster.generate.partition = "big,small"
    assert list(slurm.problems(wrong)) == []
    wrong.cluster.generate = ComponentConfig(nodes=3, gpus_per_node=4, partition="all")
    assert "2 + 3 nodes, but there are 4" in "".join(slurm.problems(wrong))


def test_drained_nodes_are_noted(cluster, tmp_path):
    """They may be back when the job's turn comes, and sbatch takes such jobs."""
    right, notes = recipe(train=ComponentConfig(nodes=2)), []
    change = ["scontrol", "update", f"nodename={cluster.nodes[1]}"]
    subprocess.run([*change, "state=drain", "reason=test"], check=True)
    try:
        assert list(slurm.problems(right, notes)) == []
    finally:
        subprocess.run([*change, "state=resume"], check=True)
        wait_until(lambda: all(node.available for node in Answers().nodes), "the node's return")
    assert any("of the 2 nodes that would do 1 are not down or drained just now" in note for note in notes), notes


def test_variables_that_sbatch_takes_before_the_recipe(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("SBATCH_PARTITION", "all")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "2:00:00")
    right = recipe(time_min=120, train=ComponentConfig(nodes=5))
    assert list(slurm.problems(right)) == []
    assert sbatch_takes(right, tmp_path)
    wrong = recipe(train=ComponentConfig(partition="big"))
    problems = list(slurm.problems(wrong))
    assert [problem.split(":")[0] for problem in problems] == ["cluster.train.partition", "cluster.time_min"]
    assert all("SBATCH_" in problem and "unset it" in problem for problem in problems)


def test_what_slurm_does_not_answer_is_noted(cluster, monkeypatch, tmp_path):
    notes = []
    assert list(slurm.problems(recipe(train=ComponentConfig()), notes)) == []
    assert notes == ["accounts and QOS were not checked: this cluster does not enforce them"]
    monkeypatch.setenv("PATH", str(tmp_path))
    notes.clear()
    assert list(slurm.problems(recipe(train=ComponentConfig(nodes=99)), notes)) == []
    assert notes == ["partitions, nodes and accounts were not checked: there is no scontrol here"]


# ---- accounts -----------------------------------------------------------------------------------------------------------

# What the real sacctmgr of Slurm 22.05 printed, where account team is below research and QOS short and long were limited; and
# what the real slurmctld made of the jobs below: sbatch took them, and they waited for ever, but for those of QOS long.
SACCTMGR = r"""#!/bin/sh
case "$*" in
*"show assoc"*user=*)
    echo 'other|jo||small|normal|||||||'
    echo 'team|jo|||long,normal,short||||||03:00:00|' ;;
*"show assoc"*account=other,team*)
    echo 'other||root||normal|||||||'
    echo 'other|jo||small|normal|||||||'
    echo 'team||research||normal||||||03:00:00|'
    echo 'team|jo|||long,normal,short||||||03:00:00|' ;;
*"show assoc"*account=*)
    echo 'research||root||normal||gres/gpu=12||||03:00:00|'
    echo 'root||||normal|||||||'
    echo 'root|root|||normal|||||||' ;;
*"show qos"*)
    echo 'normal|||||||||||'
    echo 'short||cpu=6,mem=2G||||00:20:00|gres/gpu=8|1|||'
    echo 'long|DenyOnLimit|||node=1|||||||gres/gpu=2' ;;
*"show user"*)
    echo 'team' ;;
esac
"""


@pytest.fixture
def accounts(cluster, monkeypatch, tmp_path):
    """(asked) -> problems of user jo."""
    (tmp_path / "sacctmgr").write_text(SACCTMGR)
    (tmp_path / "sacctmgr").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    answers = Answers()
    answers.config["AccountingStorageEnforce"] = "associations,limits,qos"  # which a slurmctld without slurmdbd does not take
    accounting = answers.accounting("jo")

    def problems(asked: Recipe) -> list[str]:
        each = [(request, answers.partitions[request.partitions[0]]) for request in requests(asked)]
        return list(slurm_accounts.problems(answers, accounting, "jo", each))

    return problems


@pytest.mark.parametrize(
    ("time_min", "asked", "says"),
    [
        (30, {"account": "tem"}, ["cluster.train.account: jo may not use account 'tem'; did you mean 'team'"]),
        (30, {"account": "other"}, ["cluster.train.account: account 'other' is jo's in partition small only, not in all"]),
        (30, {"qos": "shor"}, ["cluster.train.qos: there is no QOS 'shor'; did you mean 'short'"]),
        (30, {"qos": "short", "account": "other", "partition": "small"}, ["may not use QOS 'short'; one of: normal"]),
        (200, {}, ["cluster.time_min: 200 minutes, and jo's account team allows 180"]),
        (30, {"qos": "short"}, ["cluster.time_min: 30 minutes, and QOS short allows 20", "or another QOS (of long, normal)"]),
        (20, {"qos": "short", "nodes": 2, "gpus_per_node": 8}, ["16 GPUs at once, and QOS short allows a user 8"]),
        (20, {"qos": "short", "ranks_per_node": 7}, ["7 CPUs at once, and QOS short allows 6"]),
        (20, {"qos": "short", "mem": "3G"}, ["3072 MB of memory at once, and QOS short allows 2048"]),
        (30, {"qos": "long", "nodes": 2, "gpus_per_node": 1}, ["cluster.train.nodes: 2 nodes, and QOS long allows a job 1"]),
        (30, {"qos": "long"}, ["cluster.train.qos: 0 GPUs, and QOS long is for jobs of 2 or more"]),
        (30, {"nodes": 2, "gpus_per_node": 8}, ["16 GPUs at once, and account research allows 12"]),
        (20, {"qos": "short", "gpus_per_node": 8, "mem": "2G", "ranks_per_node": 6}, []),
        (180, {"gpus_per_node": 8}, []),
        (30, {"account": "other", "partition": "small", "gpus_per_node": 4}, []),
    ],
)
def test_accounts_and_qos(accounts, time_min, asked, says):
    problems = accounts(recipe(time_min, train=ComponentConfig(**{"partition": "all", **asked})))
    assert bool(problems) == bool(says), problems
    assert [part for part in says if not any(part in problem for problem in problems)] == []


def test_limits_count_all_components(accounts):
    part = ComponentConfig(partition="all", qos="short")
    problems = accounts(recipe(20, train=part, generate=part))
    assert problems == [
        "cluster.train.qos, cluster.generate.qos: each component is a job to Slurm, and QOS short allows a user 1 at once, not"
        " 2; another QOS or account"
    ]
    part = ComponentConfig(partition="all", gpus_per_node=8)
    (problem,) = accounts(recipe(20, train=part, generate=part))
    assert problem.startswith("cluster.train.nodes, cluster.generate.nodes: 8 + 8 GPUs at once, and account research allows 12")


def test_limits_count_whole_nodes(accounts, monkeypatch):
    """2 nodes of 8 GPUs are more than the account's 12, whatever is used of them."""
    monkeypatch.setattr(slurm.SlurmCluster, "enforced", property(lambda _: frozenset(("associations", "limits"))))
    monkeypatch.setattr(slurm.pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="jo"))
    asked = {"nodes": 2, "gpus_per_node": 4, "constraint": "ib", "partition": "all"}
    (problem,) = slurm.problems(recipe(train=ComponentConfig(**asked)))
    assert problem.startswith("cluster.train.nodes: 16 GPUs at once, and account research allows 12")
    assert list(slurm.problems(recipe(train=ComponentConfig(**asked, exclusive=False)))) == []


# ---- formats ------------------------------------------------------------------------------------------------------------


def test_formats():
    assert [minutes(text) for text in ("UNLIMITED", "30", "30:30", "1:00:00", "1-00:00:00", "2-12", "2-12:30")] == [
        *(None, 30, 30.5, 60, 1440, 3600, 3630)
    ]
    assert [megabytes(text) for text in ("2000", "2G", "1.5T", "512K", "80GB")] == [2000, 2048, 1.5 * 2**20, 0.5, 81920]
    gres = (
        "gpu:8",
        "gpu:h100:8(S:0-1)",
        "gpu:8(S:0,2),nvme:1",
        "gpu:1g.5gb:7,gpu:a100:2",
        "(null)",
        "shard:gpu:3",
        "gpu:4090:4",
    )
    assert [gpus(text) for text in gres] == [8, 8, 8, 9, 0, 0, 4]
