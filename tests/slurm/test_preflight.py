"""Preflight against a real Slurm: requests refused, by recipe key, and requests accepted that never start."""

import functools
import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.executors import slurm_client, slurm_environment
from launch.executors.slurm import batch_script
from launch.executors.slurm_client import gpus, megabytes, minutes
from launch.preflight import slurm_job, slurm_limits, slurm_request
from launch.preflight.slurm_cluster import Cluster, option_problems
from launch.preflight.slurm_request import requests
from pipeline.config import ClusterConfig, ComponentConfig, Problem, Recipe
from tests.launch.waiting import wait_until
from tests.problems import named
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


def started(settings: str):
    if lacking := missing():
        (pytest.fail if os.environ.get("HETSTEP_REQUIRE_SLURM") == "1" else pytest.skip)(f"no Slurm here: {lacking}")
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # a short path: it holds a Unix socket
        cluster = SlurmCluster(Path(folder), NODES, PARTITIONS, settings)
        cluster.start()
        yield cluster
        cluster.stop()


@pytest.fixture(scope="module")
def own_cluster():
    yield from started("EnforcePartLimits=ALL")


@pytest.fixture(scope="module")
def lenient_cluster():
    """Start a cluster whose sbatch takes jobs beyond a partition's limits, which then wait forever: Slurm's default."""
    yield from started("EnforcePartLimits=NO")


@pytest.fixture
def cluster(own_cluster, monkeypatch):
    return own_cluster.enter(monkeypatch)


def recipe(time_min: int = 30, **parts: ComponentConfig) -> Recipe:
    recipe = Recipe(name="x", algorithm="grpo" if "generate" in parts else "sft", run_dir="/tmp/x")
    recipe.cluster = ClusterConfig(time_min=time_min, **parts)
    return recipe


def examined(asked: Recipe) -> set[tuple[str, str]]:
    return named(slurm_job.problems(asked))


def of_train(found: set[tuple[str, str]]) -> dict[str, str]:
    """Return {key under cluster.train: code}."""
    return {key.removeprefix("cluster.train."): code for key, code in found}


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"partition": "bigg"}, {"partition": "not-a-choice"}),
        ({"nodes": 3}, {"nodes": "over-limit"}),
        ({"nodes": 2, "partition": "small"}, {"nodes": "over-limit"}),
        ({"partition": "pair"}, {"nodes": "too-small"}),
        ({"gpus_per_node": 9}, {"gpus_per_node": "over-limit"}),
        ({"nodes": 3, "gpus_per_node": 8, "partition": "all"}, {"nodes": "over-limit"}),
        ({"mem": "17G"}, {"mem": "over-limit"}),
        ({"mem": "17 gigs"}, {"mem": "bad-format"}),
        ({"ranks_per_node": 4, "cpus_per_task": 3}, {"cpus_per_task": "over-limit"}),
        ({"ranks_per_node": 9}, {"ranks_per_node": "over-limit"}),
        ({"constraint": "h10"}, {"constraint": "not-a-choice"}),
        ({"constraint": "ib&a100", "partition": "all"}, {"constraint": "over-limit"}),
        ({"constraint": "cpu", "gpus_per_node": 1, "partition": "all"}, {"gpus_per_node": "over-limit"}),
        ({"partition": "big,small", "nodes": 3}, {"nodes": "over-limit"}),
        ({"partition": "held"}, {"partition": "permission-denied"}),
        ({"partition": "off"}, {"partition": "refused-by-slurm"}),
        ({"partition": "private", "account": "other"}, {"account": "permission-denied"}),
        ({"nodes": 2, "sbatch_options": {"exclude": "127.0.0.10"}}, {"nodes": "over-limit"}),
        ({"sbatch_options": {"reservation": "weekly"}}, {"sbatch_options.reservation": "refused-by-slurm"}),
        ({"sbatch_options": {"contiguos": None}}, {"sbatch_options.contiguos": "unknown-key"}),
        ({"sbatch_options": {"comment": None}}, {"sbatch_options.comment": "missing-value"}),
        ({"sbatch_options": {"begin": "never"}}, {"sbatch_options.begin": "bad-format"}),
        (
            {"nodes": 3, "gpus_per_node": 9, "constraint": "ibb"},
            {"nodes": "over-limit", "gpus_per_node": "over-limit", "constraint": "not-a-choice"},
        ),
    ],
)
def test_requests_that_slurm_refuses_are_problems(cluster, asked, found):
    assert of_train(examined(recipe(train=ComponentConfig(**asked)))) == found


@pytest.mark.parametrize(
    ("time_min", "asked", "found"),
    [
        (61, {}, {("cluster.time_min", "over-limit")}),
        (30, {"nodes": 2, "partition": "small"}, {("cluster.train.nodes", "over-limit")}),
        (30, {"partition": "pair"}, {("cluster.train.nodes", "too-small")}),
        (30, {"partition": "private", "account": "other"}, {("cluster.train.account", "permission-denied")}),
        (30, {"partition": "private", "account": "team"}, set()),
        (30, {"gpus_per_node": 9}, {("cluster.train.gpus_per_node", "over-limit")}),
    ],
)
def test_limits_that_slurm_does_not_enforce_are_checked(lenient_cluster, monkeypatch, time_min, asked, found):
    lenient_cluster.enter(monkeypatch)
    assert examined(recipe(time_min, train=ComponentConfig(**asked))) == found


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"partition": "bigg"}, "Did you mean 'big'?"),
        ({"constraint": "h10"}, "Did you mean 'h100'?"),
        ({"gpus_per_node": 9}, "expected at most 8"),
        ({"nodes": 3, "gpus_per_node": 8, "partition": "all"}, "expected at most 2 with --gpus-per-node=8"),
        ({"ranks_per_node": 4, "cpus_per_task": 3}, "expected at most 2 with --ntasks-per-node=4"),
        ({"partition": "off"}, "off has State=DRAIN"),
        ({"partition": "held"}, "held has ReqResv=YES. Try cluster.train.sbatch_options={reservation: NAME}"),
        ({"sbatch_options": {"contiguos": None}}, "Did you mean 'contiguous'?"),
    ],
)
def test_the_advice_names_a_valid_value(cluster, asked, says):
    assert says in "\n".join(map(str, slurm_job.problems(recipe(train=ComponentConfig(**asked)))))


def test_a_wrong_option_needs_no_controller(cluster, monkeypatch):
    """sbatch reads its options itself, so a dry run finds them where no controller answers."""
    asked = requests(recipe(train=ComponentConfig(sbatch_options={"contiguos": None})))
    monkeypatch.setattr(slurm_client, "ANSWER_S", 2.0)
    os.kill(cluster.pid("slurmctld"), signal.SIGSTOP)
    try:
        assert named(option_problems(asked)) == {("cluster.train.sbatch_options.contiguos", "unknown-key")}
        assert list(option_problems(requests(recipe(train=ComponentConfig(constraint="h10"))))) == []
    finally:
        os.kill(cluster.pid("slurmctld"), signal.SIGCONT)


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
def test_requests_that_slurm_accepts_pass(cluster, asked):
    assert examined(recipe(train=ComponentConfig(**asked))) == set()


def test_the_time_limit_is_named(cluster):
    wrong = recipe(time_min=61, train=ComponentConfig(gpus_per_node=8))
    (problem,) = slurm_job.problems(wrong)
    assert named([problem]) == {("cluster.time_min", "over-limit")} and "at most 60 minutes in partition big" in problem.message
    wrong.cluster.train.partition = "all"
    assert examined(wrong) == set()


def test_all_problems_of_all_components_are_reported_at_once(cluster):
    wrong = recipe(
        train=ComponentConfig(nodes=3, gpus_per_node=9, constraint="ibb"),
        generate=ComponentConfig(partition="smal", container_image="/images/x.sqsh"),
    )
    keys = ("train.nodes", "train.gpus_per_node", "train.constraint", "generate.partition", "generate.container_image")
    assert {key for key, _ in examined(wrong)} == {f"cluster.{key}" for key in keys}


def test_components_on_the_same_nodes_add_up(cluster):
    four = {"gpus_per_node": 4, "constraint": "ib"}
    asked = recipe(train=ComponentConfig(nodes=2, **four), generate=ComponentConfig(nodes=2, **four))
    (apart,) = slurm_job.problems(asked)
    assert named([apart]) == {("cluster.generate.nodes", "over-limit")} and "cluster.share_nodes=true" in apart.message
    asked.cluster.share_nodes = True
    assert examined(asked) == set()
    asked.cluster.generate.gpus_per_node = 5
    problems = [*slurm_job.problems(asked)]
    assert "gpus_per_node" in of_train(named(problems))
    assert any("cluster.train.gpus_per_node + cluster.generate.gpus_per_node" in problem.message for problem in problems)


def test_gpus_that_a_job_takes_and_does_not_use_are_noted(cluster):
    for given, found in (({}, True), ({"exclusive": False, "cpus_per_task": 1, "mem": "1G"}, False)):
        list(slurm_job.problems(recipe(train=ComponentConfig(gpus_per_node=6, **given)), notes := []))
        idle = (
            "cluster.train.gpus_per_node: 6, but the job takes whole nodes of 8 or more GPUs. Try cluster.train.exclusive=false"
        )
        assert any(note.startswith(idle) for note in notes) == found, notes


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be someone else")
@pytest.mark.parametrize(("number", "found"), [(65534, {"partition": "permission-denied"}), (1, {})], ids=["nobody", "daemon"])
def test_groups_of_a_partition(cluster, monkeypatch, number, found):
    asked = recipe(train=ComponentConfig(partition="club"))
    assert examined(asked) == set()  # root may
    run = functools.partial(subprocess.run, user=number, group=number, extra_groups=[], cwd="/")
    monkeypatch.setattr(slurm_client, "subprocess", SimpleNamespace(**{**vars(subprocess), "run": run}))
    assert of_train(examined(asked)) == found


def test_two_components_never_share_a_node(cluster):
    """Slurm accepts the job, and it waits forever: each component alone would fit."""
    wrong = recipe(train=ComponentConfig(nodes=2, gpus_per_node=4), generate=ComponentConfig(nodes=1, gpus_per_node=4))
    (problem,) = slurm_job.problems(wrong)
    assert named([problem]) == {("cluster.generate.nodes", "over-limit")}
    assert "2 + 1 nodes, but there are 2 suitable ones" in problem.message
    wrong.cluster.generate.partition = "big,small"
    assert examined(wrong) == set()
    wrong.cluster.generate = ComponentConfig(nodes=3, gpus_per_node=4, partition="all")
    assert "2 + 3 nodes, but there are 4" in "".join(map(str, slurm_job.problems(wrong)))
    wrong.cluster.generate = ComponentConfig(nodes=2, gpus_per_node=4, partition="all")
    assert examined(wrong) == set()
    wrong.cluster.generate.sbatch_options = {"exclude": "127.0.0.12"}
    assert "2 + 2 nodes, but there are 3" in "".join(map(str, slurm_job.problems(wrong)))


def test_drained_nodes_are_noted(cluster):
    """They may be back when the job starts, and sbatch accepts such jobs; --test-only does not."""
    change = ["scontrol", "update", f"nodename={cluster.nodes[1]}"]
    subprocess.run([*change, "state=drain", "reason=test"], check=True)
    try:
        assert list(slurm_job.problems(recipe(train=ComponentConfig(nodes=2)), notes := [])) == []
        assert of_train(examined(recipe(train=ComponentConfig(nodes=3)))) == {"nodes": "over-limit"}
        assert of_train(examined(recipe(train=ComponentConfig(gpus_per_node=9)))) == {"gpus_per_node": "over-limit"}
    finally:
        subprocess.run([*change, "state=resume"], check=True)
        wait_until(lambda: all(node.available for node in Cluster().nodes.values()), "the node's return")
    assert any("only 1 of 2 suitable nodes are in service" in note for note in notes), notes


def test_a_variable_of_the_site_counts_where_the_recipe_says_nothing(cluster, monkeypatch):
    monkeypatch.setenv("SBATCH_PARTITION", "all")
    assert examined(recipe(train=ComponentConfig(nodes=5))) == set()  # Slurm's default has 2
    both = recipe(train=ComponentConfig(partition="big"), generate=ComponentConfig(nodes=3))
    options = {request.key: request.partitions for request in requests(both)}
    assert options == {"cluster.train": ["big"], "cluster.generate": ["all"]} and examined(both) == set()
    notes = [*slurm_request.notes(both)]
    assert notes == ["SBATCH_PARTITION=all from the environment: used for cluster.generate"]
    script = batch_script(Path("/tmp/x"), "x", both.cluster, {"train": both.cluster.train, "generate": both.cluster.generate})
    assert re.findall("--partition=(.*)", script) == ["big", "all"]


def test_an_error_blames_the_variable_and_not_the_partition(cluster, monkeypatch):
    for variable, value, code in (
        ("SBATCH_RESERVATION", "none_such", "refused-by-slurm"),
        ("SBATCH_CONSTRAINT", "none_such", "not-a-choice"),
        ("SBATCH_PARTITION", "none_such", "not-a-choice"),
    ):
        with monkeypatch.context() as now:
            now.setenv(variable, value)
            assert examined(recipe(train=ComponentConfig(nodes=1))) == {(variable, code)}
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    assert examined(recipe(train=ComponentConfig(partition="private"))) >= {("SBATCH_ACCOUNT", "permission-denied")}


BEATS = {
    **dict.fromkeys(
        ("SBATCH_NO_REQUEUE", "SBATCH_EXCLUSIVE", "SBATCH_TIMELIMIT", "SBATCH_WAIT", "SBATCH_OF_A_LATER_VERSION"), "1"
    ),
    "SBATCH_MEM_PER_NODE": "1M",
    "SBATCH_OUTPUT": "/tmp/elsewhere.%j",
    "SBATCH_ARRAY_INX": "0-1",
    "SBATCH_JOB_NAME": "theirs",
    "SBATCH_GRES": "gpu:9",
    "SBATCH_OPEN_MODE": "truncate",
    "SBATCH_EXPORT": "NONE",
    "SBATCH_SIGNAL": "KILL@9",
}


def test_no_variable_beats_the_script_and_each_is_told(cluster, monkeypatch, tmp_path):
    for name, value in BEATS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_TIMELIMIT", "1")  # srun would end a step by it
    asked = recipe(train=ComponentConfig(nodes=1, cpus_per_task=1))
    notes = []
    assert list(slurm_job.problems(asked, notes)) == []
    told = [re.split("[= ]", note)[0] for note in notes if " from the environment: not used" in note]
    assert sorted(told) == sorted([*BEATS, "SLURM_TIMELIMIT"])
    assert next(note for note in notes if "MEM_PER_NODE" in note).endswith("because mem of a component sets this option")
    assert next(note for note in notes if "SIGNAL" in note).endswith(
        "because the job sets its own, so that ranks save before the time limit"
    )
    script = batch_script(tmp_path, "ours", asked.cluster, {"train": asked.cluster.train})
    (tmp_path / "submitit").mkdir()
    job_id = slurm_client.submit(script, "--hold")
    try:
        shown = subprocess.run(["scontrol", "show", "job", "-o", job_id], capture_output=True, text=True, check=True).stdout
    finally:
        subprocess.run(["scancel", job_id], check=True)
    fields = slurm_client.parse_records(shown).__next__()
    assert shown.count("JobId=") == 1 and "ArrayJobId" not in fields
    assert (fields["JobName"], fields["Requeue"], fields["TimeLimit"]) == ("ours", "1", "00:30:00")
    assert fields["StdOut"].startswith(str(tmp_path)) and "gpu:9" not in shown
    alone = fields["Exclusive"] != "NO" if "Exclusive" in fields else fields["OverSubscribe"] == "NO"  # from 26.05; before
    assert not alone
    assert not fields.get("MinMemoryNode", "0").startswith("1M")


def test_the_steps_of_a_job_ignore_variables_of_its_shell(cluster, monkeypatch, tmp_path):
    """A user's shell has options for srun, which the job inherits; a step runs all the same, where its output is expected."""
    for name, value in {"SLURM_TIMELIMIT": "x", "SLURM_STDOUTMODE": str(tmp_path / "away"), "SLURM_GRES": "gpu:9"}.items():
        monkeypatch.setenv(name, value)
    for unset, works in (("", False), (slurm_environment.unset_for_steps(), True)):
        out = tmp_path / f"out{works}"
        script = f"#!/bin/bash\n#SBATCH --output=/dev/null\n{unset} srun -n1 echo hello >{out} 2>&1; touch {out}.ended\n"
        slurm_client.submit(script)
        wait_until((tmp_path / f"out{works}.ended").exists, "the end of the step")
        assert (out.read_text().strip() == "hello") == works


def test_a_job_that_submits_others_has_the_variables_of_the_site(cluster, monkeypatch, tmp_path):
    monkeypatch.setenv("SBATCH_WCKEY", "it's mine")
    script, out = "#!/bin/bash\n#SBATCH --output=/dev/null\n", tmp_path / "out"
    for lines, wckey in (("", ""), (slurm_environment.export_wishes(), "it's mine")):
        slurm_client.submit(f'{script}{lines}echo "$SBATCH_WCKEY" >{out}.new; mv {out}.new {out}\n')
        wait_until(out.exists, "the end of the job")
        assert out.read_text() == f"{wckey}\n"
        out.unlink()


def test_queries_that_slurm_does_not_answer_are_noted(cluster, monkeypatch, tmp_path):
    notes = []
    assert list(slurm_job.problems(recipe(train=ComponentConfig()), notes)) == []
    assert notes == ["accounts and QOS were not checked: this cluster does not enforce them"]
    monkeypatch.setenv("PATH", str(tmp_path))
    notes.clear()
    assert list(slurm_job.problems(recipe(train=ComponentConfig(nodes=99)), notes)) == []
    assert notes == ["partitions, nodes and accounts were not checked: scontrol is not installed here"]


# ---- accounts -----------------------------------------------------------------------------------------------------------

NODES_OVER = {("cluster.train.nodes", "over-limit")}
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
    accounting, answers = slurm_limits.accounting("hetstep", "jo"), Cluster()

    def problems(asked: Recipe) -> list[Problem]:
        return [*slurm_limits.problems(accounting, "jo", [(each, answers.partition(each)) for each in requests(asked)])]

    return problems


@pytest.mark.parametrize(
    ("time_min", "asked", "found", "says"),
    [
        (200, {}, {("cluster.time_min", "over-limit")}, "at most 180 minutes, the limit of jo's account team"),
        (30, {"qos": "short"}, {("cluster.time_min", "over-limit")}, "another QOS (of long, normal)"),
        (20, {"qos": "short", "nodes": 2, "gpus_per_node": 8}, NODES_OVER, "the 8 that QOS short allows a user"),
        (20, {"qos": "short", "ranks_per_node": 7}, NODES_OVER, "got 7 CPUs at once"),
        (20, {"qos": "short", "mem": "3G"}, NODES_OVER, "at most the 2048 that QOS short allows"),
        (30, {"qos": "long", "nodes": 2, "gpus_per_node": 1}, NODES_OVER, "QOS long allows a job 1"),
        (30, {"qos": "long"}, {("cluster.train.qos", "too-small")}, "QOS long is for jobs of 2 or more"),
        (30, {"nodes": 2, "gpus_per_node": 8}, NODES_OVER, "at most the 12 that account research allows"),
        (20, {"qos": "short", "gpus_per_node": 8, "mem": "2G", "ranks_per_node": 6}, set(), ""),
        (180, {"gpus_per_node": 8}, set(), ""),
        (30, {"account": "other", "partition": "small", "gpus_per_node": 4}, set(), ""),
    ],
)
def test_accounts_and_qos(accounts, time_min, asked, found, says):
    problems = accounts(recipe(time_min, train=ComponentConfig(**{"partition": "all", **asked})))
    assert named(problems) == found
    assert says in "\n".join(map(str, problems))


def test_limits_count_all_components(accounts):
    part = ComponentConfig(partition="all", qos="short")
    assert named(accounts(recipe(20, train=part, generate=part))) == {("cluster.generate.qos", "over-limit")}
    part = ComponentConfig(partition="all", gpus_per_node=8)
    (problem,) = accounts(recipe(20, train=part, generate=part))
    assert "got 8 + 8 GPUs at once (cluster.train + cluster.generate); expected at most the 12" in problem.message


def test_limits_count_whole_nodes(accounts, monkeypatch):
    """Two nodes of 8 GPUs exceed the account's 12, even if the job uses fewer."""
    monkeypatch.setattr(Cluster, "enforced_parts", property(lambda _: frozenset(("associations", "limits"))))
    monkeypatch.setattr(slurm_job.pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="jo"))
    asked = {"nodes": 2, "gpus_per_node": 4, "constraint": "ib", "partition": "all"}
    (problem,) = slurm_job.problems(recipe(train=ComponentConfig(**asked)))
    assert "got 16 GPUs at once (cluster.train); expected at most the 12 that account research allows" in problem.message
    assert examined(recipe(train=ComponentConfig(**asked, exclusive=False))) == set()


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
