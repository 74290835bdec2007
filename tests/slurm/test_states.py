"""The parsing of Slurm's job states; the lines are those of Slurm 22.05 to 26.05."""

from launch.executors import slurm_client
from launch.executors.executor import JobStatus
from launch.executors.slurm import HetSlurmJob
from launch.executors.slurm_client import TERMINAL, JobComponent, merge_components, read_jobs, read_sacct

LEADER = (
    "JobId=17 HetJobId=17 HetJobOffset=0 HetJobIdSet=17-18 JobName=a UserId=root(0) JobState=FAILED Reason=NonZeroExitCode"
    " NodeList=n[1-2] SubmitLine=sbatch --comment JobState=COMPLETED JobId=99"
)
CHILD = "JobId=18 HetJobId=17 HetJobOffset=1 HetJobIdSet=17-18 JobName=a JobState=RUNNING Reason=None NodeList=n[3-4]"


def test_free_text_at_the_end_of_a_line_does_not_count():
    (part,) = read_jobs(LEADER)
    assert (part.job_id, part.state) == ("17", "FAILED")


def test_a_job_has_ended_when_every_component_has():
    ended = CHILD.replace("RUNNING", "CANCELLED")
    assert merge_components(read_jobs(f"{CHILD}\n{LEADER}")).state == "COMPLETING"
    assert merge_components(read_jobs(f"{ended}\n{LEADER}")) == JobComponent("17", "FAILED", "n[1-2],n[3-4]", "NonZeroExitCode")


def test_sacct_rows_of_a_het_job():
    parts = [read_sacct("17+0", "CANCELLED by 1000", "n1"), read_sacct("17+1", "COMPLETED", "n3")]
    assert merge_components(parts) == JobComponent("17", "CANCELLED", "n1,n3")


def test_an_unknown_state_is_not_an_end():
    for state in (
        *("SIGNALING", "PENDING", "RUNNING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "STAGE_OUT"),
        "SOMETHING_NEW",
    ):
        assert state not in TERMINAL


def test_times_are_requested_in_the_parsed_format(tmp_path, monkeypatch):
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho $SLURM_TIME_FORMAT\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    assert slurm_client.run_command("scontrol", "show", "job") == "standard\n"


def test_a_slurmctld_that_hangs_leaves_the_state_open(tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\nexec sleep 60\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(slurm_client, "ANSWER_S", 0.2)
    assert HetSlurmJob(tmp_path, "17").status(now=True) == JobStatus("UNKNOWN")
