"""Faults of a real cluster in real runs on six nodes: time limits, preemption, cancelling, lost nodes.

At a chosen moment a rank is stopped (SIGSTOP), the cluster does its worst, and the rank goes on if it still can. Whatever
comes, the run's metrics are in the end those of a run that nothing happened to, to the last bit; no half checkpoint is taken
for a whole one, and nothing of a job outlives it. What can be told without a pipeline is in tests/slurm/test_requeue.py. All of
it is `make test-long`; what Slurm's versions differ in (marked `faults`) also `make test-slurm-matrix`.
"""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.executors.record import read_record
from launch.runs.attempts import all_attempts
from tests.conftest import require_slurm
from tests.end_to_end.runs import SLURM, Fault, Run, launch, left_alive, pids_of, printed, submit
from tests.end_to_end.test_kill import ACTORS, PHASES
from tests.launch.waiting import wait_until
from tests.slurm.cluster import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(900)]
faults = pytest.mark.faults

# Jobs of `high` take the nodes of others' away: those of `low` at once, those of `polite` have a minute to leave.
PARTITIONS = """\
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE
PartitionName=polite Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF"""
SETTINGS = "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE"
RESTARTS = "cluster.requeue.max_restarts=3"
PATIENT = "cluster.timeouts.silence=300"
SAVES_WHEN_TOLD = "checkpointing.save_period=1000"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[SlurmCluster]:
    require_slurm()
    cluster = SlurmCluster(tmp_path_factory.mktemp("faults"), 6, PARTITIONS, SETTINGS)
    cluster.start()
    yield cluster
    cluster.stop()


class Held:
    """A run of four ranks on four nodes, one of which is stopped in a phase of the third of its four steps."""

    def __init__(self, cluster: SlurmCluster, folder: Path, *overrides: str, phase: str = "decode"):
        self.cluster, self.folder = cluster, folder
        self.rank = ACTORS[phase]
        fault = Fault(phase, self.rank, self.rank, count=3, signal=signal.SIGSTOP)  # what a second start has left is less
        self.process = launch(folder, *SLURM, *overrides, env=cluster.env, fault=fault)
        wait_until(self._is_held, f"phase {phase} of step 3", 240)
        self.job_id = read_record(folder).job_id
        self.held = self.pid(self.rank)

    def _is_held(self) -> bool:
        assert self.process.poll() is None, printed(self.folder)
        return (pids_of(self.folder) / "done").exists()

    def pid(self, rank: int) -> int:
        return int((pids_of(self.folder) / str(rank)).read_text())

    def node(self, rank: int) -> str:
        entries = Path(f"/proc/{self.pid(rank)}/environ").read_bytes().split(b"\0")
        return next(entry.partition(b"=")[2].decode() for entry in entries if entry.startswith(b"HETSTEP_NODE="))

    def go_on(self) -> None:
        os.kill(self.held, signal.SIGCONT)

    def slurm(self, *command: str) -> str:
        return subprocess.run(command, env=self.cluster.env, capture_output=True, text=True, check=True).stdout

    def job(self) -> str:
        """Return Slurm's record of the job, with restarts and times."""
        return self.slurm("scontrol", "show", "job", "-o", self.job_id)

    def end(self, seconds: float = 300) -> Run:
        """Wait for the job's end; of its processes only the stopped rank may remain."""
        start = time.monotonic()
        try:
            output = self._wait(start + seconds)
        finally:
            self.process.kill()
        assert left_alive(self.folder) == []
        return Run(self.folder, self.process.returncode, output, time.monotonic() - start)

    def _wait(self, deadline: float) -> str:
        while True:
            try:
                return self.process.communicate(timeout=1)[0]
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    raise
                if (pid := self.pid(self.rank)) != self.held and _stopped(pid):
                    os.kill(pid, signal.SIGCONT)  # the fault is for the first start


def _stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except FileNotFoundError:
        return False


def checkpoints(folder: Path) -> list[int]:
    """Return steps of complete checkpoints: every file exists in its full size."""
    steps = []
    for path in sorted((folder / "checkpoints").glob("step_*")):
        record = json.loads((path / "complete.json").read_text())  # a checkpoint by name is a complete one
        assert all((path / name).stat().st_size == size for name, size in record["files"].items()), path
        steps.append(record["step"])
    return steps


def complete(run: Run, uninterrupted: list[dict]) -> None:
    """Check that the run is complete after one requeue."""
    assert run.status == 0, run.output
    assert len(run.verdicts()) == 2 and run.verdicts()[1] == "done"
    assert run.metrics() == uninterrupted
    assert checkpoints(run.folder)[-1] == 4


@faults
def test_the_time_limit(cluster, tmp_path, uninterrupted):
    """Most of the minute goes by in step 3; the fourth and a save would not fit."""
    held = Held(cluster, tmp_path / "run", SAVES_WHEN_TOLD, PATIENT, "cluster.time_min=1")
    (first,) = all_attempts(held.folder)
    wait_until(lambda: time.time() > first.started + 45, "most of the minute")
    held.go_on()
    complete(held.end(), uninterrupted)
    assert first.verdict.startswith("requeue: the allocation ends in ")
    assert (first.folder / "progress").read_text() == "3\n" and first.failure is None


@pytest.mark.parametrize("partition", [pytest.param("polite", marks=faults), "low"])
def test_preemption(cluster, tmp_path, uninterrupted, partition):
    """With time to leave, nothing is lost; without, what KillWait does not suffice to save."""
    given = [f"cluster.{name}.partition={partition}" for name in ("train", "generate")]
    held = Held(cluster, tmp_path / "run", PATIENT, *given)
    held.slurm("sbatch", "--partition=high", "--nodes=6", "--exclusive", "--output=/dev/null", "--wrap=sleep 5")
    wait_until(lambda: "PreemptTime=2" in held.job() or "Restarts=1" in held.job(), "the preemption", 60)
    if partition == "polite":
        held.go_on()
    complete(held.end(), uninterrupted)
    if partition == "polite":
        first = all_attempts(held.folder)[0]
        assert first.verdict == "requeue: SIGTERM came" and (first.folder / "progress").read_text() == "3\n"


@faults
def test_requeued_by_hand(cluster, tmp_path, uninterrupted):
    held = Held(cluster, tmp_path / "run", PATIENT)
    held.slurm("scontrol", "requeue", held.job_id)  # Slurm wakes up the rank: SIGCONT comes before SIGTERM
    complete(held.end(), uninterrupted)
    assert all_attempts(held.folder)[0].verdict in ("requeue: SIGTERM came", None)  # None: KillWait was too short


def test_cancelled(cluster, tmp_path, uninterrupted):
    """Cancel it during a save. It stays cancelled; the same command resumes it."""
    held = Held(cluster, tmp_path / "run", PATIENT, RESTARTS, phase="write checkpoint")
    held.slurm("scancel", held.job_id)
    run = held.end()
    assert run.status == 1 and "CANCELLED" in run.output, run.output
    assert run.verdicts() == ["stop: Slurm has ended the job"]
    assert checkpoints(run.folder) in ([1], [1, 2], [1, 2, 3])  # Slurm wakes up the rank, which may end its save
    wait_until(lambda: not cluster.steps_alive(), "the end of every step")
    again = submit(run.folder, *SLURM, env=cluster.env)
    assert again.status == 0, again.output
    assert again.metrics() == uninterrupted and checkpoints(run.folder) == [1, 2, 3, 4]


@faults
def test_the_batch_script_is_killed(cluster, tmp_path, uninterrupted):
    """Nothing can requeue the job: it has failed, and the same command resumes it."""
    held = Held(cluster, tmp_path / "run", PATIENT, RESTARTS)
    (script,) = [pid for pid in cluster.on(held.node(0)) if b"slurm_script" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(script, signal.SIGKILL)
    run = held.end()
    assert run.status == 1 and "FAILED" in run.output, run.output
    assert run.verdicts() == [None]
    wait_until(lambda: not cluster.steps_alive(), "the end of every step")
    again = submit(run.folder, *SLURM, env=cluster.env)
    assert again.status == 0, again.output
    assert again.metrics() == uninterrupted


def test_the_budget_is_spent(cluster, tmp_path, uninterrupted):
    """Killed at its second step, each start has done one: with one restart step 2 is the last."""
    fault = Fault("step", victim=1, actor=0, count=3)  # a step has two updates
    run = submit(tmp_path / "run", *SLURM, "cluster.requeue.max_restarts=1", env=cluster.env, fault=fault)
    assert run.status == 1, run.output
    first, second = run.verdicts()
    assert re.match(r"requeue: crashed with status \d+, after checkpoint 1; restart 1 of 1", first)
    assert second.startswith("stop: ") and "cluster.requeue.max_restarts: 1" in run.output
    assert left_alive(run.folder) == [] and checkpoints(run.folder) == [1, 2]
    again = submit(run.folder, *SLURM, env=cluster.env)
    assert again.status == 0, again.output
    assert again.metrics() == uninterrupted


@pytest.mark.parametrize("verb", [pytest.param(verb, marks=faults if verb == "save" else []) for verb in PHASES])
def test_a_node_dies(cluster, tmp_path, uninterrupted, verb):
    """Everything on the node ends with it; the job continues on other nodes."""
    held = Held(cluster, tmp_path / "run", RESTARTS, phase=PHASES[verb])
    node = held.node(held.rank)
    cluster.lose(node)
    try:
        run = held.end()
        complete(run, uninterrupted)
        assert node not in _nodes(run)
    finally:
        cluster.bring_back(node)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=faults), 2])
def test_a_node_is_given_up_while_its_rank_lives_on(cluster, tmp_path, uninterrupted, rank):
    """A rank, and beside rank 0 the batch script, wakes up when the job has run again elsewhere: it does no harm."""
    held = Held(cluster, tmp_path / "run", RESTARTS, PATIENT, phase="step" if rank == 0 else "decode")
    node = held.node(rank)
    cluster.cut_off(node)
    try:
        wait_until(lambda: "Restarts=1" in held.job(), "the requeue", 120)
        run = held.end()
        complete(run, uninterrupted)
        before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file() and "attempts" not in path.parts}
        held.go_on()
        wait_until(lambda: not cluster.on(node), "the end of what was left on the node", 120)
        after = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file() and "attempts" not in path.parts}
        assert {path for path in before | after if before.get(path) != after.get(path)} <= {_batch_log(run)}
        complete(run, uninterrupted)
        assert "Restarts=1 " in held.job() and "JobState=COMPLETED" in held.job()
    finally:
        cluster.end_all_on(node)
        cluster.bring_back(node)


def _nodes(run: Run) -> set[str]:
    """Return the nodes of the last attempt."""
    last = all_attempts(run.folder)[-1]
    return {re.search(r"Starting with rank \d+ .* on (\S+),", log.read_text())[1] for log in last.logs}


def _batch_log(run: Run) -> Path:
    return run.folder / f"submitit/{read_record(run.folder).job_id}_0_log.out"
