"""A run with the section `evaluation` on Slurm: each checkpoint is evaluated in a job of its own while the run goes on."""

import json

import pytest

from launch.runs import evaluated_checkpoints, follower_process
from tests.end_to_end.runs import submit
from tests.launch.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.long]
SMALL = "{policy.generation.backend: transformers, evaluate.tasks.addition.data.max_samples: 8}"
KEYS = (
    *("recipe=tiny_sft", "cluster.executor=slurm", "cluster.train.ranks_per_node=1", "cluster.time_min=20"),
    # Enough steps between two checkpoints for the follower to see the first before the second removes it.
    *("sft.max_num_steps=400", "sft.val_at_end=false", "checkpointing.save_period=200", "checkpointing.keep_top_k=1"),
    f"evaluation={{suite: tiny, overrides: {SMALL}, cluster: {{time_min: 10}}}}",
)


def test_checkpoints_are_evaluated_in_jobs_of_their_own(tmp_path, slurm_cluster):
    folder = tmp_path / "run"
    run = submit(folder, *KEYS, env=slurm_cluster.env)
    assert run.status == 0, run.output
    suite = folder / "evaluations/tiny"
    wait_until((suite / follower_process.RECORD).exists, "the start of the follower")
    wait_until(lambda: not follower_process.is_followed(suite), "the end of the follower", 300)
    log = (folder / "evaluations/follow.log").read_text()
    (record,) = evaluated_checkpoints.of_run(folder)
    assert sorted(record.scores) == [200, 400] and not (record.begun or record.pending or record.failed), log
    for step, scores in record.scores.items():
        assert scores["step"] == step and scores["run"] == str(folder) and scores["tasks"]["addition"]["questions"] == 8
        job = json.loads((suite / f"step_{step:06d}/job.json").read_text())
        assert job["executor"] == "slurm" and f"step {step}: Slurm job {job['job_id']}" in log
    assert [path.name for path in (folder / "checkpoints").glob("step_*")] == ["step_000400"]
    assert not list(suite.glob("*/checkpoint"))
    again = submit(folder, *KEYS, env=slurm_cluster.env)  # complete: nothing starts
    assert again.status == 0 and "is complete at step 400" in again.output and not follower_process.is_followed(suite)
