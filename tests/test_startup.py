"""The startup record of a run, and how it is shown."""

import json
import time

from launch.runs import startup_stages
from launch.runs.run_setup import append_manifest
from pipeline.job.startup import SETTING_UP, Startup
from tests.launch import made_runs


def wait_until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_stages_and_the_phase_of_most_ranks_of_a_realm(tmp_path):
    attempt = made_runs.attempt(tmp_path, "local-1-0", made_runs.ago(5))
    append_manifest(tmp_path, "local", "1", ["submit.py"])
    heard: dict[int, tuple[str, str]] = {}
    startup = Startup(attempt, {"train": (0, 1, 2), "generate": (3,), "reward": ()}, lambda: heard)

    def told() -> dict:
        return json.loads((attempt / "startup.json").read_text())

    startup.enter("join the world")
    heard[0] = ("join", "")
    wait_until(lambda: told()["here"] == 1)
    assert startup_stages.now(startup_stages.stages(tmp_path)) == "joining the world (1 of 4 ranks)"

    heard |= {1: ("idle", ""), 2: ("idle", ""), 3: ("setup", "load engine")}
    startup.enter(SETTING_UP)
    wait_until(lambda: told()["realms"].get("generate"))
    heard[0] = ("setup", "load data")
    wait_until(lambda: told()["realms"]["train"][-1][0] == "load data")
    heard |= dict.fromkeys((1, 2), ("setup", "load policy"))
    wait_until(lambda: told()["realms"]["train"][-1][0] == "load policy")
    assert startup_stages.now(startup_stages.stages(tmp_path)) == "setting up (train: load policy; generate: load engine)"
    assert "setting up" in startup_stages.text(startup_stages.stages(tmp_path)) and "so far" in startup_stages.text(
        startup_stages.stages(tmp_path)
    )

    startup.enter("first step")
    startup.end()
    startup.end()
    found = told()
    names = [[name for name, *_ in rows] for rows in (found["stages"], *found["realms"].values())]
    assert names == [["join the world", "set up", "first step"], ["wait", "load data", "load policy"], ["load engine"]]
    for rows in (found["stages"], *found["realms"].values()):
        ends = [end for _, begin, end in rows if begin <= end]
        assert [begin for _, begin, _ in rows[1:]] == ends[:-1] and len(ends) == len(rows)  # one right after another
    assert startup_stages.now(startup_stages.stages(tmp_path)) == ""


def test_the_run_continues_if_it_cannot_be_written(tmp_path):
    startup = Startup(tmp_path / "gone", {"train": (0,)})
    startup.enter(SETTING_UP)
    startup.end()
    assert not (tmp_path / "gone").exists()


def test_a_rank_that_is_not_the_first_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    startup = Startup()
    startup.enter("join the world")
    startup.end()
    assert not list(tmp_path.iterdir())


def test_the_queue_counts_once_and_an_earlier_jobs_attempt_does_not(tmp_path):
    append_manifest(tmp_path, "slurm", "17", ["submit.py"])
    assert startup_stages.now(startup_stages.stages(tmp_path)) == "waiting in the queue"
    attempt = made_runs.attempt(tmp_path, "17-0", time.time() + 100)
    queue, processes = startup_stages.stages(tmp_path)
    assert 98 < queue.ended - queue.began < 102
    assert processes.name == "starting the processes" and processes.ended is None
    made_runs.attempt(tmp_path, "17-1", time.time() + 200)
    assert [stage.name for stage in startup_stages.stages(tmp_path)] == ["starting the processes"]
    append_manifest(tmp_path, "slurm", "18", ["submit.py"])
    assert [stage.name for stage in startup_stages.stages(tmp_path)] == ["waiting in the queue"]
    assert attempt.exists()


def test_a_run_that_failed_during_startup_names_the_phase(tmp_path):
    attempt = made_runs.attempt(tmp_path, "local-1-0", 100.0)
    append_manifest(tmp_path, "local", "1", ["submit.py"])
    told = {"began": 102.0, "here": 2, "world": 2, "stages": [["join the world", 102.0, 103.5], ["set up", 103.5, None]]}
    (attempt / "startup.json").write_text(json.dumps(told | {"realms": {"train": [["load policy", 103.5, None]]}}))
    assert startup_stages.text(startup_stages.stages(tmp_path), until=110.0) == (
        "starting the processes 2 s, joining the world 1.5 s, setting up 6.5 s, not completed"
        " (train: load policy 6.5 s, not completed)"
    )
