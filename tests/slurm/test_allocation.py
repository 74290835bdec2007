"""Runs in an existing allocation: an salloc, plain and heterogeneous, and a batch job of launch/hetstep.sbatch."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch import hetstep_sbatch, submit
from launch.executors.executor import ROOT
from launch.executors.record import read_record
from launch.runs.attempts import all_attempts
from pipeline import config
from tests.launch.model import write_recipe
from tests.launch.waiting import none_alive, reports, wait_until
from tests.slurm.wrapper import SUBMIT, sbatch, wait_for


@pytest.fixture
def here(tmp_path, slurm_cluster, monkeypatch) -> Path:
    """Change to a folder with a recipe `tiny` of two components of one rank."""
    write_recipe(tmp_path, cluster={})
    monkeypatch.chdir(tmp_path)
    slurm_cluster.enter(monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HETSTEP_SETTLE_S", "1")
    return tmp_path


def in_salloc(options: str, task: str, *overrides: str) -> list[str]:
    """The command: `python launch/submit.py recipe=tiny.yaml ...` inside an allocation, the ranks doing one of tests' tasks."""
    return ["salloc", *options.split(), sys.executable, "-c", SUBMIT, task, "recipe=tiny.yaml", *overrides]


def salloc(options: str, task: str, *overrides: str) -> subprocess.CompletedProcess:
    return subprocess.run(in_salloc(options, task, *overrides), capture_output=True, text=True, timeout=180)


@pytest.mark.slurm
@pytest.mark.parametrize(
    "options",
    ["-N3", pytest.param("-N2 --gpus-per-node=2 : -N1 --gpus-per-node=1", marks=pytest.mark.full)],
    ids=["plain", "heterogeneous"],
)
def test_a_run_inside_an_salloc(here, options):
    sizes = ("train.gpus_per_node=2", "train.ranks_per_node=1", "generate.gpus_per_node=1")
    gpus = [f"cluster.{size}" for size in sizes] if "gpus" in options else []
    answer = salloc(options, "report_and_finish", "cluster.train.nodes=2", "grpo.max_num_steps=1", *gpus)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "runs in Slurm job" in answer.stdout and "done: step 1" in answer.stdout
    found = reports(here / "run", 3)
    assert [each["HETSTEP_COMPONENT"] for each in found] == ["train", "train", "generate"]
    assert len({each["HETSTEP_NODE"] for each in found}) == 3
    assert {each["HETSTEP_MASTER_ADDR"] for each in found} == {found[0]["HETSTEP_NODE"]}
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == (["0,1", "0,1", "0"] if gpus else [""] * 3)
    (attempt,) = all_attempts(here / "run")
    assert [log.name for log in attempt.logs] == ["rank00000.log", "rank00001.log", "rank00002.log"]
    assert attempt.verdict == "done"
    record = read_record(here / "run")
    assert record.executor == "allocation"
    assert record.attach(here / "run").status().succeeded


@pytest.mark.slurm
def test_an_allocation_that_is_too_small(here):
    answer = salloc(
        *("-N1 -c2", "report", "cluster.train.gpus_per_node=4", "cluster.train.cpus_per_task=2", "cluster.time_min=30"),
        *("cluster.generate.nodes=2", "policy.train_global_batch_size=4"),
    )
    assert answer.returncode == 2
    found = re.findall(r"^  - (cluster\.\S+): .* \[over-limit\]$", answer.stderr, re.M)
    keys = ("train.gpus_per_node", "train.cpus_per_task", "generate.nodes", "executor")
    assert found == [f"cluster.{key}" for key in keys], answer.stderr
    assert "Try a new allocation, `salloc --time=30 --nodes=1 " in answer.stderr
    assert not (here / "run").exists()


@pytest.mark.long
@pytest.mark.slurm
def test_a_cancel_ends_the_run_but_not_the_allocation(here):
    command = in_salloc("-N2", "report_and_wait")
    inner = " ".join(["'" + part + "'" for part in command[2:]])
    shell = [
        "salloc",
        "-N2",
        "bash",
        "-c",
        f"{inner} & echo $! >submit.pid; wait $!; echo ended $?; srun -N1 -n1 echo still here",
    ]
    process = subprocess.Popen(shell, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = reports(here / "run", 2)
    os.kill(int((here / "submit.pid").read_text()), signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert "ended 130" in out and "still here" in out, out
    assert "CANCELLED (by a signal); the same command continues from the last checkpoint" in out
    none_alive(found)


def test_an_allocation_is_requested_outside_of_one(tmp_path, capsys):
    assert submit.main([f"recipe={write_recipe(tmp_path)}", "cluster.executor=allocation"]) == 2
    assert re.search(r"error: cluster.executor: .* \[unreachable\]$", capsys.readouterr().err.strip())


@pytest.mark.long
@pytest.mark.slurm
def test_ranks_start_again_in_the_same_allocation_until_they_leave_on_purpose(here):
    acts = [{"progress": 1, "exit": 9}, {"progress": 2, "requeue": "time is short"}, {"done": 3}]
    (here / "run").mkdir(mode=0o700)
    (here / "run/script.json").write_text(json.dumps(acts))
    answer = salloc("-N2", "play")
    assert answer.returncode == 1
    assert "STOPPED (time is short; the same command in another allocation continues it)" in answer.stdout, answer.stdout
    assert [attempt.verdict for attempt in all_attempts(here / "run")] == [
        "requeue: crashed with status 9, after checkpoint 1; restart 1 of 3",
        "requeue: time is short",
    ]


@pytest.mark.long
@pytest.mark.slurm
def test_a_step_of_an_allocation_submits_a_job_of_its_own(here):
    command = ["srun", "-N1", "-n1", *in_salloc("", "report_and_finish", "grpo.max_num_steps=1")[1:]]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "and this is a step of Slurm job" in answer.stdout
    assert read_record(here / "run").executor == "slurm"


# ---- launch/hetstep.sbatch ----------------------------------------------------------------------------------------------


@pytest.mark.slurm
def test_a_batch_job_of_ones_own(here):
    job, out = sbatch(here, "-N1 : -N1", "write_steps")
    wait_for("done: step 3", out)
    assert "step 3/3" in out() and f"runs in Slurm job {job}" in out()
    record = read_record(here / "run")
    assert (record.executor, record.job_id) == ("slurm", job)  # so that it can be followed from anywhere
    assert [attempt.name for attempt in all_attempts(here / "run")] == [f"{job}-0"]
    wait_until(lambda: record.attach(here / "run").status(now=True).succeeded, "the job's end")


@pytest.mark.long
@pytest.mark.slurm
def test_a_batch_job_is_requeued_and_resumes(here):
    acts = [{"progress": 1, "exit": 9}, {"progress": 2, "requeue": "time is short"}, {"done": 3}]
    (here / "run").mkdir(mode=0o700)
    (here / "run/script.json").write_text(json.dumps(acts))
    job, out = sbatch(here, "-N2", "play")
    wait_for("done: step 3", out, 180)
    attempts = all_attempts(here / "run")
    assert [attempt.name for attempt in attempts] == [f"{job}-{restart}" for restart in range(3)]
    assert attempts[1].verdict == "requeue: time is short"
    wait_until(lambda: read_record(here / "run").attach(here / "run").status(now=True).succeeded, "the job's end")


# ---- the environment of ray.sub -----------------------------------------------------------------------------------------

RAY_SUB = {
    "CONTAINER": "/images/nemo rl.sqsh",
    "MOUNTS": "/lustre:/lustre,/home/me:/home/me:ro",
    "GPUS_PER_NODE": "8",
    "CPUS_PER_WORKER": "128",
    "SLURM_SUBMIT_DIR": "/lustre/me",
}


def test_equivalent_variables_become_overrides(tmp_path):
    overrides, lines = hetstep_sbatch.translated(RAY_SUB, ["recipe=x"])
    recipe = config.inspect(str(write_recipe(tmp_path)), overrides).recipe
    for component in (recipe.cluster.train, recipe.cluster.generate):
        assert component.container_image == "/images/nemo rl.sqsh"
        assert component.container_mounts == ["/lustre:/lustre", "/home/me:/home/me:ro"]
        assert component.container_workdir == "/lustre/me"
        assert (component.python, component.gpus_per_node, component.cpus_per_task) == ("python3", 8, 16)
    assert "cluster.train.gpus_per_node=8, from the environment, as in ray.sub" in lines


def test_the_command_line_precedes_the_environment(tmp_path):
    overrides, _ = hetstep_sbatch.translated(
        RAY_SUB, ["cluster.train.container_image=/mine.sqsh", "cluster.generate={nodes: 2}"]
    )
    names = [override.partition("=")[0] for override in overrides]
    assert "cluster.train.container_image" not in names and "cluster.train.container_mounts" in names
    assert not any(name.startswith("cluster.generate") for name in names)


def test_variables_without_a_meaning_here_are_noted():
    overrides, lines = hetstep_sbatch.translated(
        {"COMMAND": "uv run x.py", "BASE_LOG_DIR": "/logs", "CPUS_PER_WORKER": "64"}, []
    )
    assert overrides == []
    assert [line.partition(":")[0] for line in lines] == ["CPUS_PER_WORKER", "COMMAND", "BASE_LOG_DIR"]
    assert hetstep_sbatch.translated({"PATH": "/bin"}, ["recipe=x"]) == ([], [])


def test_gpus_per_node_is_of_all_components_on_shared_nodes():
    halves = [f"cluster.{part}.gpus_per_node=4" for part in ("train", "generate")]
    shared = ["recipe=llama8b_grpo", "cluster.share_nodes=true", *halves]
    assert hetstep_sbatch.shares_nodes(shared) and not hetstep_sbatch.shares_nodes(["recipe=llama8b_grpo"])
    assert not hetstep_sbatch.shares_nodes(["recipe=nowhere"])
    overrides, lines = hetstep_sbatch.translated(
        {"GPUS_PER_NODE": "8", "CPUS_PER_WORKER": "96"}, ["recipe=x"], shares_nodes=True
    )
    assert overrides == [f"cluster.{part}.cpus_per_task=12" for part in ("train", "generate", "reward", "judge")]
    assert lines[0].startswith("GPUS_PER_NODE: not used")
