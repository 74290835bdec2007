"""On Slurm, a cancelled, a killed and a timed-out evaluation continue to the scores of an uninterrupted one."""

import json
import subprocess

import pytest

from launch.executors.record import read_record
from tests.end_to_end.runs import LOCAL, Fault, Run, launch, left_alive, printed, submit
from tests.evaluation.evaluations import ANSWERS, judged, kept, overrides, scores
from tests.launch.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.full, pytest.mark.timeout(900)]
SLURM = ("cluster.executor=slurm", "cluster.generate.nodes=2", "cluster.generate.ranks_per_node=1")


@pytest.fixture(scope="session")
def whole(made_once) -> Run:
    """Return an evaluation that nothing happened to, on this machine and on one engine."""

    def make(folder):
        run = submit(folder / "run", *LOCAL, *overrides(folder, "cluster.generate.ranks_per_node=1"))
        assert run.status == 0, run.output

    folder = made_once("evaluation on one engine", make) / "run"
    return Run(folder, 0, "", 0.0)


def test_cancelled(slurm_cluster, tmp_path, whole):
    given = (*SLURM, *overrides(tmp_path, "env.digits.kwargs.delay_s=0.3"))
    process = launch(tmp_path / "run", *given, env=slurm_cluster.env, fault=Fault("never", 0))
    wait_until(lambda: judged(tmp_path) >= ANSWERS["sampled"] // 2, "half of the answers", 240)
    job = read_record(tmp_path / "run").job_id
    subprocess.run(["scancel", job], env=slurm_cluster.env, check=True)
    assert process.wait(120) == 1 and "CANCELLED" in printed(tmp_path / "run")
    assert left_alive(tmp_path / "run") == []
    wait_until(lambda: not slurm_cluster.steps_alive(), "the end of every step")
    before, told = kept(tmp_path / "run"), judged(tmp_path)
    assert 0 < len(before["sampled"]) < ANSWERS["sampled"] and not before["lm_eval"]
    again = submit(tmp_path / "run", *given, env=slurm_cluster.env)
    assert scores(again) == scores(whole) and kept(again.folder) == kept(whole.folder)
    assert judged(tmp_path) - told == ANSWERS["sampled"] - len(before["sampled"])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_requeued(slurm_cluster, tmp_path, whole, victim):
    """The rank dies at its first unit of likelihoods; the second attempt keeps the sampled answers."""
    fault = Fault("likelihoods", victim, actor=victim, count=1, once=True)
    given = (*SLURM, *overrides(tmp_path, "cluster.requeue.max_restarts=1"))
    run = submit(tmp_path / "run", *given, env=slurm_cluster.env, fault=fault)
    assert scores(run) == scores(whole) and kept(run.folder) == kept(whole.folder)
    first, second = run.verdicts()
    assert first.startswith("requeue: crashed ") and second == "done"
    assert judged(tmp_path) == ANSWERS["sampled"]
    assert left_alive(run.folder) == []


@pytest.mark.long
def test_the_time_limit(slurm_cluster, tmp_path, whole):
    """The answers take longer than the minute, of which the start takes a part."""
    given = (*SLURM, *overrides(tmp_path, "env.digits.kwargs.delay_s=2.4", "cluster.time_min=1"))
    run = submit(tmp_path / "run", *given, env=slurm_cluster.env, timeout=600)
    assert scores(run) == scores(whole) and kept(run.folder) == kept(whole.folder)
    *early, last = run.verdicts()
    assert early and last == "done" and all(verdict.startswith("requeue: the allocation ends in ") for verdict in early)
    assert json.loads((run.folder / "done.json").read_text()) == {"step": 0}
