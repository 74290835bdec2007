"""Commands and the Python API record their actions in the audit log, and refuse them if they cannot."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import hetstep
import pytest

from launch.executors.local import start_time
from launch.executors.record import JobRecord, write_record
from launch.executors.slurm import HetSlurmExecutor
from launch.governance import audit_log
from launch.governance.audit_check import verify
from launch.runs import steer_request
from launch.runs.attempts import latest
from launch.submission import run_control
from pipeline.config import ClusterConfig, ComponentConfig
from tests.launch import made_runs, tasks
from tests.launch.api.test_api import submitted
from tests.launch.test_submit import command, here, interruptible  # noqa: F401 fixtures
from tests.launch.waiting import reports, wait_until
from tests.problems import refused


def actions(folder):
    return [entry["action"] for entry in map(json.loads, (folder / audit_log.LOG).read_text().splitlines())]


def damage(folder):
    (folder / audit_log.LOG).write_text("")
    (folder / audit_log.HEAD).write_text(f"end 1 {'0' * 64}\n")


def test_a_submission_and_its_job_are_recorded(here, command):  # noqa: F811
    status, out, err = command("recipe=tiny")
    assert status == 0, out + err
    first, second = map(json.loads, (here / audit_log.LOG).read_text().splitlines())
    (entry,) = json.loads((here / "run/manifest.json").read_text())
    assert (first["action"], first["subject"], first["details"]["recipe"]) == ("submit", str(here / "run"), "tiny")
    assert entry["audit"] == {"folder": str(here), "number": 1, "hash": first["hash"]}
    assert entry["recipe"] == first["details"]["recipe_sha256"] and first["details"]["commit"] == entry["git"]["commit"]
    assert (second["action"], second["details"]["job_id"]) == ("submitted", entry["job_id"])
    check = verify(here)
    assert (check.findings, check.receipts) == ((), 1)


def test_nothing_is_submitted_if_it_cannot_be_recorded(here, command):  # noqa: F811
    damage(here)
    status, _, err = command("recipe=tiny")
    assert status == 2 and f"cluster.audit: got {here / audit_log.LOG}, " in err and "[tampered]" in err
    assert not (here / "run/job.json").exists() and not (here / "run/recipe.yaml").exists()


@pytest.mark.full
def test_without_an_audit_log_a_damaged_one_does_not_matter(here, command):  # noqa: F811
    damage(here)
    status, out, err = command("recipe=tiny", "cluster.audit=none")
    assert status == 0, out + err
    assert (here / audit_log.LOG).read_text() == "" and json.loads((here / "run/manifest.json").read_text())[0]["audit"] is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_refused_access_is_recorded(here, command):  # noqa: F811
    (here / "run").mkdir()
    os.chown(here / "run", 65534, -1)
    assert command("recipe=tiny")[0] == 2
    (line,) = map(json.loads, (here / audit_log.LOG).read_text().splitlines())
    assert line["action"] == "refuse" and "belongs to" in line["details"]["why"][0]


def denied_to_nobody(action) -> bool:
    """Return whether an action raises permission-denied in a process of the user nobody."""
    if not (child := os.fork()):
        os.setgid(65534)
        os.setuid(65534)
        try:
            action()
        except hetstep.RecipeError as error:
            os._exit(3 if error.codes == ("permission-denied",) else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def of_nobody(folder: Path) -> list[str]:
    """Return the actions on a run that the log has of the user nobody."""
    assert not verify(folder.parent).findings
    lines = [json.loads(line) for line in (folder.parent / audit_log.LOG).read_text().splitlines()]
    return [line["action"] for line in lines if (line["user"], line["subject"]) == ("nobody", str(folder))]


@pytest.fixture
def roots_run():
    """A run of root that goes on, in a folder whose log everybody may write, and its job, a process that waits."""
    with tempfile.TemporaryDirectory() as name:  # pytest's folders are private
        root = Path(name).resolve() / "runs"
        root.mkdir()
        root.parent.chmod(0o755)
        root.chmod(0o1777)
        made = made_runs.folder(root / "one", "tiny_grpo")
        with subprocess.Popen(["sleep", "600"], start_new_session=True) as waiting:
            try:
                made_runs.attempt(made, f"{waiting.pid}-0", made_runs.ago(600))
                job = SimpleNamespace(job_id=str(waiting.pid), start_time=start_time(waiting.pid))
                record = JobRecord.of("local", job)
                write_record(made, record)
                audit_log.record("submit", made, {}, root)  # the log is there, as after a submission
                yield made, record.attach(made)
                assert waiting.poll() is None
            finally:
                waiting.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("what", ["cancel", "stop_and_save", "change", "read"])
def test_a_refused_action_of_another_user_is_recorded(roots_run, what):
    folder, job = roots_run
    actions = {
        "cancel": lambda: run_control.cancel(folder, job),
        "stop_and_save": lambda: run_control.stop_and_save(folder, job, 1),
        "change": lambda: steer_request.ask(folder, ["grpo.max_num_steps=50"]),
        "read": lambda: hetstep.load(folder),
    }
    if what == "read":
        folder.chmod(0o700)
    elif what == "change":
        steer_request.ask(folder, ["grpo.max_num_steps=60"])  # imports what the other user may not read
    assert denied_to_nobody(actions[what])
    assert of_nobody(folder) == (["refuse"] if what == "read" else [what, "refuse"])


@pytest.mark.slurm
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_cancellation_that_slurm_refuses_is_recorded(roots_run, slurm_cluster, monkeypatch):
    folder, _ = roots_run
    slurm_cluster.enter(monkeypatch)
    components = {"train": ComponentConfig(cpus_per_task=1)}
    executor = HetSlurmExecutor(folder, "stand_in", ClusterConfig(time_min=5), components)
    job = executor.submit(tasks.save_on_request, str(folder))
    assert denied_to_nobody(lambda: run_control.cancel(folder, job))
    assert of_nobody(folder) == ["cancel", "refuse"]
    assert run_control.cancel(folder, job).ended


@pytest.mark.full  # by default: a cancellation
def test_a_stop_is_recorded_once_and_refused_if_it_cannot_be(tmp_path):
    run = submitted(tmp_path / "run", tasks.save_on_request)
    reports(run.folder, 2)
    damage(tmp_path)
    with refused(("cluster.audit", "tampered")):
        run.stop_and_save()
    assert not latest(run.folder).asked_to_stop
    for name in (audit_log.LOG, audit_log.HEAD):
        (tmp_path / name).unlink()
    assert run.stop_and_save().state == "stopped"
    assert run.stop_and_save().state == run.cancel().state == "stopped"  # it has ended: nothing is recorded
    assert actions(tmp_path) == ["stop_and_save"]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_cancellation_is_recorded_and_never_refused(tmp_path, damaged):
    run = submitted(tmp_path / "run", tasks.save_on_request)
    wait_until(lambda: latest(run.folder), "the start of the ranks")
    if damaged:
        damage(tmp_path)
        with refused(("cluster.audit", "tampered")):
            run.cancel()
        assert run.status().state == "stopped"
        return
    assert run.cancel().state == "stopped"
    assert actions(tmp_path) == ["cancel"]


def test_a_place_that_is_no_folder_is_refused():
    with pytest.raises(hetstep.RecipeError) as error:
        hetstep.recipe("tiny_sft", cluster__audit="somewhere")
    assert error.value.codes == ("bad-format",)
    assert hetstep.recipe("tiny_sft", cluster__audit="./somewhere").cluster.audit == f"{os.getcwd()}/somewhere"
