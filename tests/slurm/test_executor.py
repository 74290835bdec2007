"""The Slurm executor against a real Slurm: four nodes, two components of two ranks."""

import getpass
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from launch.executors import slurm, slurm_client
from launch.executors.components import components
from launch.executors.record import JobRecord, read_record, write_record
from launch.executors.slurm import HetSlurmExecutor, HetSlurmJob
from launch.runs.follow import failure
from pipeline import config
from pipeline.config import ClusterConfig, ComponentConfig
from tests.launch import tasks
from tests.launch.model import write_recipe
from tests.launch.waiting import none_alive, reports, wait_until, wait_until_ended
from tests.slurm.cluster import SlurmCluster

pytestmark = pytest.mark.slurm


@pytest.fixture
def cluster(slurm_cluster, monkeypatch):
    slurm_cluster.enter(monkeypatch)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return slurm_cluster


def executor(run_dir: Path, after: tuple[str, ...] = (), **generate) -> HetSlurmExecutor:
    components = {"train": ComponentConfig(nodes=2, cpus_per_task=1), "generate": ComponentConfig(**{"nodes": 2, **generate})}
    return HetSlurmExecutor(run_dir, "a test", ClusterConfig(time_min=5), components, after)


def test_two_components_form_one_world(cluster, tmp_path):
    job = executor(tmp_path, env_vars={"TEST_VAR": "it's set"}).submit(tasks.report_and_finish, str(tmp_path))
    wait_until_ended(job)

    assert job.status().state == "COMPLETED"
    assert job.watcher.get_info(job.job_id)["NodeList"].count("127.0.0.") == 2  # one list for each component
    found = reports(tmp_path, 4)
    assert [each["HETSTEP_RANK"] for each in found] == ["0", "1", "2", "3"]
    assert [each["HETSTEP_COMPONENT"] for each in found] == ["train", "train", "generate", "generate"]
    assert [each["TEST_VAR"] for each in found] == [None, None, "it's set", "it's set"]
    assert {each["HETSTEP_WORLD_SIZE"] for each in found} == {"4"}
    assert {each["HETSTEP_LOCAL_RANK"] for each in found} == {"0"}
    assert {each["HETSTEP_JOB_ID"] for each in found} == {job.job_id}
    assert {each["HETSTEP_RUN_DIR"] for each in found} == {str(tmp_path)}
    assert {each["HETSTEP_MASTER_ADDR"] for each in found} == {found[0]["HETSTEP_NODE"]}
    assert sorted(each["HETSTEP_NODE"] for each in found) == cluster.nodes
    assert {each["HETSTEP_ATTEMPT"] for each in found} == {f"{job.job_id}-0"}
    assert {each["OMP_NUM_THREADS"] for each in found} == {"1"}
    logs = sorted((tmp_path / f"attempts/{job.job_id}-0").glob("*.log"))
    assert [log.name for log in logs] == [f"rank{rank:05d}.log" for rank in range(4)]
    for rank, log in enumerate(logs):
        assert f"rank {rank} says hello" in log.read_text()


def test_sbatch_srun_and_the_ranks_read_texts_as_they_are(cluster, tmp_path, monkeypatch):
    """No part of them is parsed as syntax, and `hetjob`, which would end a component's options for sbatch, is no separator."""
    odd = r"""it's "50%j" of #1 \' \n hetjob PackJob; $(touch pwned) `touch pwned` a[$(touch pwned)]"""
    run_dir = tmp_path / odd.replace("\\", "").replace("%", "")
    variables = {"TEST_VAR": odd, "RANDOM": "a[$(touch pwned)]", "SLURM_PROCID": "a[$(touch pwned)]"}
    train = ComponentConfig(cpus_per_task=1, account=odd.replace(" ", "_").lower(), env_vars=variables)
    components = {"train": train, "generate": ComponentConfig(account=train.account, mem="1G")}
    monkeypatch.chdir(tmp_path)
    job = HetSlurmExecutor(run_dir, odd, ClusterConfig(time_min=5), components).submit(tasks.report_and_finish, str(run_dir))
    shown = slurm_client.run_command("scontrol", "show", "job", "-o", job.job_id)
    assert shown.count(f" JobName={odd.replace(' ', '_')} ") == shown.count(f" Account={train.account} ") == 2, shown
    wait_until_ended(job)

    assert job.status().state == "COMPLETED", (run_dir / f"submitit/{job.job_id}_0_log.out").read_text()
    assert [each["TEST_VAR"] for each in reports(run_dir, 2)] == [odd, None]
    assert list(tmp_path.iterdir()) == [run_dir]


def test_more_options_of_sbatch_of_all_components_and_of_one(cluster, tmp_path):
    second, third = cluster.nodes[1:3]
    reservation = [
        "ReservationName=weekly",
        "StartTime=now",
        "Duration=10",
        f"Users={getpass.getuser()}",
        f"Nodes={second},{third}",
    ]
    slurm_client.run_command("scontrol", "create", *reservation)
    given = [
        "cluster.sbatch_options={reservation: weekly, comment: it's ours, contiguous: null}",
        f"cluster.train.sbatch_options={{nodelist: {third}, comment: theirs}}",
        "cluster.time_min=5",
    ]
    recipe = config.load(str(write_recipe(tmp_path)), given)
    run_dir = Path(recipe.run_dir)
    try:
        job = HetSlurmExecutor(run_dir, "a", recipe.cluster, components(recipe)).submit(tasks.report_and_finish, str(run_dir))
        shown = slurm_client.run_command("scontrol", "show", "job", "-o", job.job_id).splitlines()
        wait_until_ended(job)
        assert job.status().state == "COMPLETED"
    finally:
        slurm_client.run_command("scontrol", "delete", "ReservationName=weekly")
    assert [each["HETSTEP_NODE"] for each in reports(run_dir, 2)] == [third, second]
    for line, comment in zip(shown, ("theirs", "it's ours"), strict=True):
        assert f" Comment={comment} " in f"{line} " and " Contiguous=1 " in line


def test_components_of_different_shape_get_their_own_gpus_and_ranks(cluster, tmp_path):
    components = {
        "train": ComponentConfig(nodes=1, gpus_per_node=4, mem="2G"),
        "generate": ComponentConfig(nodes=1, gpus_per_node=2, cpus_per_task=2, mem="1G", exclusive=True),
    }
    job = HetSlurmExecutor(tmp_path, "gpus", ClusterConfig(time_min=5), components).submit(
        tasks.report_and_finish, str(tmp_path)
    )
    wait_until_ended(job)

    assert job.status().state == "COMPLETED", (tmp_path / f"submitit/{job.job_id}_0_log.out").read_text()
    found = reports(tmp_path, 6)
    assert [each["HETSTEP_LOCAL_RANK"] for each in found] == ["0", "1", "2", "3", "0", "1"]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["0,1,2,3"] * 4 + ["0,1"] * 2


def test_three_components_form_one_world_and_a_killed_rank_of_the_third_is_named(cluster, tmp_path):
    components = {name: ComponentConfig(cpus_per_task=1) for name in ("train", "generate")}
    components["reward"] = ComponentConfig(nodes=2, ranks_per_node=2, env_vars={"TEST_VAR": "third"})
    cluster_config = ClusterConfig(time_min=5)
    job = HetSlurmExecutor(tmp_path, "three", cluster_config, components).submit(tasks.report_and_wait, str(tmp_path))
    found = reports(tmp_path, 6)
    assert [each["HETSTEP_COMPONENT"] for each in found] == ["train", "generate", *["reward"] * 4]
    assert [each["HETSTEP_RANK"] for each in found] == ["0", "1", "2", "3", "4", "5"]
    assert [each["HETSTEP_LOCAL_RANK"] for each in found] == ["0", "0", "0", "1", "0", "1"]
    assert [each["TEST_VAR"] for each in found] == [None, None, *["third"] * 4]
    assert {each["HETSTEP_WORLD_SIZE"] for each in found} == {"6"}
    assert {each["HETSTEP_MASTER_ADDR"] for each in found} == {found[0]["HETSTEP_NODE"]}
    assert len({found[rank]["HETSTEP_NODE"] for rank in (0, 1, 2, 4)}) == 4
    os.kill(found[5]["pid"], signal.SIGKILL)
    wait_until_ended(job)

    assert job.status().state == "FAILED"
    none_alive(found)
    told = failure(tmp_path, job, job.status())
    assert told[0].startswith(f"the run failed: {job.name()} is FAILED")
    assert any(line.endswith("task 3: Killed") for line in told), told
    assert "hetstep: the reward component failed; task 0 of its step is rank 2" in told


def test_a_status_is_kept_and_ends_the_job(cluster, tmp_path):
    job = executor(tmp_path).submit(tasks.exit_with_7_on_rank_1, str(tmp_path))
    wait_until_ended(job)

    assert job.status().state == "FAILED"
    assert "Exited with exit code 7" in (tmp_path / f"submitit/{job.job_id}_0_log.out").read_text()  # srun says so
    none_alive(reports(tmp_path, 4))


def test_cancel_ends_both_components(cluster, tmp_path):
    job = executor(tmp_path).submit(tasks.report_and_wait, str(tmp_path))
    write_record(tmp_path, JobRecord.of("slurm", job))
    found = reports(tmp_path, 4)
    assert read_record(tmp_path).cluster == "hetstep"
    again = read_record(tmp_path).attach(tmp_path)
    assert again.status(now=True).state == "RUNNING"
    again.cancel()
    wait_until_ended(again)

    assert again.status().state == "CANCELLED"
    none_alive(found)
    wait_until(lambda: not cluster.steps_alive(), "the end of every step")


def test_a_dependent_job_waits_and_never_starts_if_the_first_fails(cluster, tmp_path):
    first = executor(tmp_path / "first").submit(tasks.report_and_wait, str(tmp_path / "first"))
    second = executor(tmp_path / "second", after=(first.job_id,)).submit(tasks.report_and_finish, str(tmp_path / "second"))
    reports(tmp_path / "first", 4)
    assert second.status(now=True) == slurm.JobStatus("PENDING", "Dependency")
    first.cancel()
    wait_until_ended(second)

    assert second.status().state == "CANCELLED"
    assert not (tmp_path / "second/attempts").exists()


def test_slurm_variables_of_the_submitting_shell_do_not_reach_the_ranks(cluster, tmp_path, monkeypatch):
    """The job is a plain one, since the recipe does not generate.

    The variables are as in a step with --export=NONE, in a heterogeneous salloc, and with another format of times.
    """
    around = "SLURM_CPU_BIND=mask_cpu:nonsense SLURM_MEM_BIND=nonsense SLURM_GPU_BIND=single:1 SLURM_DISTRIBUTION=cyclic"
    around += " SLURM_EXPORT_ENV=NONE SLURM_HET_SIZE=2 SLURM_JOB_NODELIST_HET_GROUP_0=n99 SLURM_TIME_FORMAT=%s"
    for variable in around.split():
        monkeypatch.setenv(*variable.split("="))
    components = {"train": ComponentConfig(nodes=2, gpus_per_node=2)}
    job = HetSlurmExecutor(tmp_path, "plain", ClusterConfig(time_min=5), components).submit(
        tasks.report_and_finish, str(tmp_path)
    )
    wait_until_ended(job)

    assert job.status().state == "COMPLETED", (tmp_path / f"submitit/{job.job_id}_0_log.out").read_text()
    found = reports(tmp_path, 4)
    nodes = [each["HETSTEP_NODE"] for each in found]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert [each["HETSTEP_LOCAL_RANK"] for each in found] == ["0", "1"] * 2
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["0,1"] * 4
    assert {each["HETSTEP_MASTER_ADDR"] for each in found} == {nodes[0]}
    assert 0 < int(found[0]["HETSTEP_END_TIME"]) - time.time() <= 300


def test_ranks_start_where_the_sites_mpi_is_not_installed(tmp_path, monkeypatch):
    """As with MpiDefault=pmix and an image without PMIx."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # a short path: it holds a Unix socket
        own = SlurmCluster(Path(folder), settings="MpiDefault=pmix_v9")
        own.start()
        try:
            own.enter(monkeypatch)
            refused = subprocess.run(["srun", "true"], env=own.env, capture_output=True, text=True)
            assert refused.returncode and "pmix_v9" in refused.stderr
            job = executor(tmp_path).submit(tasks.report_and_finish, str(tmp_path))
            wait_until_ended(job)
            assert job.status().state == "COMPLETED"
        finally:
            own.stop()


def test_an_array_is_refused(cluster, tmp_path):
    with pytest.raises(ValueError, match="array"):
        executor(tmp_path).map_array(tasks.report_and_finish, ["a", "b"])


def test_an_unknown_job_is_gone_until_one_has_its_id(cluster, tmp_path):
    first = executor(tmp_path / "first").submit(tasks.report_and_finish, str(tmp_path / "first"))
    later = str(int(first.job_id) + 2)
    assert HetSlurmJob(tmp_path, later).status(now=True) == slurm.JobStatus("GONE", ended=True)
    second = executor(tmp_path / "second").submit(tasks.report_and_finish, str(tmp_path / "second"))
    assert second.job_id == later
    for job in (first, second):
        wait_until_ended(job)
        assert job.status().state == "COMPLETED"
