"""Commands and the Python API record their actions in the audit log, and refuse them if they cannot."""

import json
import os

import hetstep
import pytest

from launch import audit_log
from launch.attempts import latest
from launch.audit_check import verify
from tests.launch import tasks
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
