"""The status of runs: from real jobs of both executors, and from folders as runs leave them."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import status
from launch.executors import slurm_client
from launch.executors.executor import ROOT
from launch.executors.record import JobRecord, write_record
from launch.executors.slurm import HetSlurmExecutor
from launch.runs import run_state, run_summary, status_text
from launch.runs.run_folder import RunFolder
from pipeline.checkpoints.checkpoint import Checkpoints
from pipeline.config import CheckpointingConfig, ClusterConfig, ComponentConfig
from pipeline.files import small_files
from pipeline.observe.metrics import read
from tests.launch import made_runs, tasks
from tests.launch.made_runs import Texts
from tests.launch.waiting import reports, wait_until

TEXTS = Texts("2+5=", "7", "8", "9")


@pytest.fixture
def run(tmp_path) -> Path:
    """Write a run that started ten minutes ago, at step 6 of 100, in its second attempt."""
    made = made_runs.folder(tmp_path / "runs/one")
    write_record(made, JobRecord.of("local", made_runs.Alive()))
    made_runs.attempt(made, "7-0", made_runs.ago(1000), "requeue: crashed with status 9, after checkpoint 2; restart 1 of 3")
    made_runs.attempt(made, "7-1", made_runs.ago(600))
    made_runs.steps(made, 1, 6, TEXTS)
    lines = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["time"] = made_runs.ago(720 - 100 * line["step"])  # every 100 s, the first one before the second attempt
    (made / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 7, "ti')
    return made


def asked(capsys, *arguments: object) -> tuple[int, str]:
    answer = status.main([str(each) for each in arguments])
    return answer, capsys.readouterr().out


def test_all_fields_of_a_run(run, capsys):
    checkpoints = Checkpoints(run, "7-1", CheckpointingConfig())
    partial = checkpoints.begin(4)
    (partial / "weights").write_bytes(b"x" * 5000)
    checkpoints.commit(partial, 4, None, {})
    checkpoints.begin(6)

    answer, text = asked(capsys, run, "json=true")
    told = json.loads(text)
    assert answer == 0
    assert (told["state"], told["step"], told["max_steps"], told["restarts"]) == ("running", 6, 100, 1)
    assert told["seconds_per_step"] == pytest.approx(100)
    assert told["seconds_left"] == pytest.approx(9400)
    assert told["phases"] == pytest.approx({"rollout": 0.2, "train": 0.3, "refit": 0.1, "rest": 0.05, "validation": 0.2})
    assert told["metrics"]["train/grad_norm"] == [1.0, 1.0, None, 1.0, 1.0, 1.0]
    kept = told["checkpoint"]
    assert (kept["step"], kept["partial"], kept["count"]) == (4, ["step_000006"], 1)
    assert 5000 < kept["bytes"] < 6000
    assert [part["name"] for part in told["components"]] == ["train", "generate"]
    assert told["ends_by"] == pytest.approx(float((run / "attempts/7-1/started").read_text()) + 240 * 60)
    assert (told["starting"], told["failure"]) == (False, [])

    _, text = asked(capsys, run)
    assert "state       running\n" in text
    limit = re.search(r"100 s from step to step; 2:36:40 left; time limit in (\d+):(\d\d):(\d\d), at ", text)
    hours, minutes, seconds = map(int, limit.groups())
    assert told["ends_by"] - time.time() <= hours * 3600 + minutes * 60 + seconds + 1 and hours * 60 + minutes <= 230
    assert "train 300 ms (35%)" in text and "1,000 tokens/s" in text
    assert re.search(r"step 4, 0:\d\d:\d\d", text) and "being written, or interrupted: step_000006" in text
    assert "crashed with status 9" in text and "under way" in text
    write_record(run, JobRecord.of("local", made_runs.Ended()))
    assert "ended without a verdict" in asked(capsys, run)[1]


def test_a_checkpoint_that_is_removed_meanwhile_costs_its_size_alone(run, capsys, monkeypatch):
    checkpoints = Checkpoints(run, "7-1", CheckpointingConfig())
    checkpoints.commit(checkpoints.begin(4), 4, None, {})

    def walk(folder, walk=os.walk):
        for found in walk(folder):
            shutil.rmtree(run / "checkpoints")
            yield found

    monkeypatch.setattr(run_summary.os, "walk", walk)
    answer, text = asked(capsys, run)
    assert answer == 0 and "checkpoint  step 4" in text and not (run / "checkpoints").exists()


def test_a_run_that_its_data_ends_has_no_time_left(run, capsys):
    path = run / "recipe.yaml"
    assert path.read_text().count("max_num_steps: 100\n") == 1
    path.write_text(path.read_text().replace("max_num_steps: 100\n", "max_num_steps: 1000000\n"))
    told = json.loads(asked(capsys, run, "json=true")[1])
    assert (told["step"], told["max_steps"], told["seconds_left"]) == (6, None, None)
    _, text = asked(capsys, run)
    assert "step        6; last written" in text and "100 s from step to step; time limit" in text
    _, text = asked(capsys, run.parent)
    assert text.splitlines()[1].split()[:5] == ["running", "6", "100", "s", "1"]


def test_a_starting_run_is_shown_as_starting(run, capsys):
    made_runs.attempt(run, "7-2", time.time())
    _, text = asked(capsys, run)
    assert "running; the ranks are starting" in text


def test_a_failed_run_shows_the_first_failure_and_exits_with_1(tmp_path, capsys):
    run = made_runs.folder(tmp_path / "one")
    said = {"rank": 3, "realm": "generate", "host": "n2", "verb": "rollout", "phase": "decode", "message": "ValueError: no"}
    made_runs.attempt(run, "1-0", made_runs.ago(90), "requeue: crashed with status 9, after checkpoint 2; restart 1 of 3", said)
    traceback = 'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: no\n'
    made_runs.attempt(run, "1-1", made_runs.ago(50), "stop: crashed with status 1", said | {"traceback": traceback})
    answer, text = asked(capsys, run)
    assert answer == 1
    assert "state       failed; crashed with status 1\n" in text
    assert "failure     rank 3 (realm generate, host n2, verb rollout, phase decode): ValueError: no\n" in text
    assert '  File "a.py", line 1\n' in text
    assert text.count("   rank 3: ValueError: no\n") == 1  # of the first start, in short
    assert f"logs        {run}/attempts/1-1" in text


def test_a_run_without_failure_json_shows_the_end_of_a_log(tmp_path, capsys):
    run = made_runs.folder(tmp_path / "one")
    log = "line 1\n" * 100 + "Traceback (most recent call last):\nMemoryError\n"
    made_runs.attempt(run, "1-0", made_runs.ago(50), "stop: crashed with status 137", log=log)
    answer, text = asked(capsys, run)
    assert answer == 1
    assert "the end of" in text and "  MemoryError\n" in text and text.count("line 1\n") == 18


def test_a_stopped_run_and_a_complete_run(tmp_path, capsys):
    run = made_runs.folder(tmp_path / "one")
    made_runs.attempt(run, "7-0", made_runs.ago(50))
    (run / "submitit").mkdir()
    small_files.write(run / "submitit/1_end.json", {"state": "CANCELLED", "reason": "by SIGTERM"})
    answer, text = asked(capsys, run)
    assert (answer, "stopped; by SIGTERM" in text) == (1, True)
    made_runs.ended(run, 100)
    answer, text = asked(capsys, run)
    assert (answer, "state       done\n" in text) == (0, True)


def test_hundreds_of_runs_in_a_list_newest_first(run, tmp_path, capsys):
    done = made_runs.folder(tmp_path / "runs/deep/two", "tiny_sft")
    made_runs.ended(done, 350)
    for path in ("recipe.yaml", "job.json", "done.json"):
        os.utime(done / path, (1e9, 1e9))
    spoiled = made_runs.folder(tmp_path / "runs/three")
    (spoiled / "metrics.jsonl").mkdir()
    hidden = made_runs.folder(tmp_path / "runs/hidden")
    (hidden / "job.json").unlink()
    (hidden / "job.json").mkdir()  # as unreadable as another user's, for whoever runs this test
    for path in ("recipe.yaml", "job.json"):
        os.utime(hidden / path, (1.5e9, 1.5e9))
    none = tmp_path / "runs/four"
    none.mkdir()
    (none / "recipe.yaml").write_text("a: [")
    for i in range(100):
        copy = tmp_path / f"runs/many/{i:03d}"
        copy.mkdir(parents=True)
        for name in ("recipe.yaml", "metrics.jsonl", "job.json"):
            (copy / name).write_bytes((run / name).read_bytes())

    answer, text = asked(capsys, tmp_path / "runs")
    lines = text.splitlines()
    assert answer == 0
    assert len(lines) == 1 + 105
    assert all(line.startswith("running  6/100") for line in lines[1:102])
    assert [line.split()[0] for line in lines[102:]] == ["unknown", "done", "unknown", "unknown"]
    assert "it is a folder" in text and "recipe.yaml: got invalid YAML" in text

    answer, text = asked(capsys, spoiled)
    assert answer == 2


def test_a_named_failed_run_exits_with_1_in_a_list_too(run, tmp_path, capsys):
    other = made_runs.folder(tmp_path / "runs/other")
    assert asked(capsys, run, other)[0] == 1
    assert asked(capsys, tmp_path / "runs")[0] == 0


def test_idle_shares_are_means_of_the_last_steps(run, capsys):
    told = [line | {"idle/train": 0.1 * line["step"], "idle/generate": 0.25} for line in read(run / "metrics.jsonl")]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    assert "idle        train 35%, generate 25%\n" in asked(capsys, run)[1]  # the mean of 10%, 20% ... 60%


def test_only_the_end_of_a_long_run_is_read(run, capsys):
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[5])
    spoiled = ["x" * len(json.dumps(line))] * 19_000  # would raise, if it were read
    lines = [json.dumps(line | {"step": step, "time": 1e9 + step}) for step in range(19_001, 20_001)]
    (run / "metrics.jsonl").write_text("\n".join([*spoiled, *lines]) + "\n")
    told = json.loads(asked(capsys, run, "json=true")[1])
    assert told["step"] == 20_000
    assert len(told["metrics"]["train/reward"]) == 20


def test_validations_many_steps_apart_have_a_trend(run, capsys):
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[5])
    line.pop("val/accuracy", None)
    lines = [line | {"step": step} | ({} if step % 60 else {"val/accuracy": step / 1000}) for step in range(1, 301)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert json.loads(asked(capsys, run, "json=true")[1])["metrics"]["val/accuracy"] == [0.06, 0.12, 0.18, 0.24, 0.3]


def test_long_names_of_metrics_and_components_stand_apart_from_their_values(run, capsys):
    lines = [json.loads(line) | {"train/broke_judge": 0.9922} for line in (run / "metrics.jsonl").read_text().splitlines()[:6]]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = run_summary.full(RunFolder.at(run), run_state.state(RunFolder.at(run)))
    summary["components"] = [{"name": "reward_model", "state": "RUNNING", "nodes": "n1", "reason": ""}]
    text = status_text.text(summary)
    assert "  reward_model RUNNING  n1" in text
    starts = {re.match(r"train/\w+ +", line).end() for line in text.splitlines() if line.startswith("train/")}
    assert starts == {len("train/broke_judge ")}


def test_watching_ends_with_the_run(run, monkeypatch, capsys):
    monkeypatch.setattr(status.time, "sleep", lambda _: made_runs.ended(run, 100))
    answer, text = asked(capsys, run, "watch=5")
    assert answer == 0
    assert text.index("state       running\n") < text.index("state       done\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "there is no such folder"),
        (["."], "is not a run folder, and has none below it"),
    ],
)
def test_a_folder_that_is_not_a_run_is_refused(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert status.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_without_runs_the_list_says_how_to_start_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # without the folder, then with an empty one
        assert asked(capsys) == (0, f"no runs in {tmp_path}/runs yet. Start one: python launch/submit.py recipe=tiny_sft\n")
        assert asked(capsys, "json=true") == (0, "[]\n")
        (tmp_path / "runs").mkdir(exist_ok=True)
    assert status.main(["runs"]) == 2


def test_a_job_that_cannot_be_queried_is_reported(run, tmp_path, monkeypatch, capsys):
    small_files.write(run / "job.json", {"executor": "local", "job_id": "1", "host": "another", "start_time": 5})
    assert "unknown; its processes are on another; query its state on that machine" in asked(capsys, run)[1]

    small_files.write(run / "job.json", {"executor": "slurm", "job_id": "17", "host": "another", "start_time": None})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(slurm_client, "REMEMBERED_S", 0.0)
    assert "unknown; Slurm is not installed here (there is no scontrol)" in asked(capsys, run)[1]

    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'Slurmctld(primary) at a is DOWN'\nexit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    assert (
        "unknown; Slurm's controller does not answer (`scontrol ping`: Slurmctld(primary) at a is DOWN)"
        in asked(capsys, run)[1]
    )

    answers = "ping) echo 'Slurmctld(primary) at a is UP';; show\\ config) echo ClusterName = b;; *) echo Invalid job id >&2"
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\ncase "$1${{2:+ $2}}" in {answers}; esac\n')
    small_files.write(run / "job.json", {"executor": "slurm", "job_id": "17", "host": "another", "cluster": "a"})
    assert "unknown; its job is on the cluster a, not on b; query its state on that cluster" in asked(capsys, run)[1]

    small_files.write(run / "job.json", {"executor": "slurm", "job_id": "17", "host": "another", "start_time": None})
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexec /bin/sleep 30\n")
    monkeypatch.setattr(slurm_client, "ANSWER_S", 0.2)
    assert "did not answer within 0.2 s" in asked(capsys, run)[1]

    (tmp_path / "scontrol").write_text("#!/bin/sh\necho Unable to contact slurm controller >&2\nexit 1\n")
    assert "Unable to contact slurm controller" in asked(capsys, run)[1]
    made_runs.attempt(run, "17-2", time.time(), "stop: crashed with status 1", {"rank": 0, "message": "no"})
    assert asked(capsys, run)[0] == 1


def test_status_imports_no_library_of_the_job(run):
    program = "import sys; sys.modules |= dict.fromkeys(('torch', 'vllm', 'transformers', 'tensorboard', 'matplotlib'))\n"
    program += f"from launch import report, status; status.main(['{run}']); sys.exit(report.main(['{run}']))"
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    assert (run / "report.html").exists()


# ---- real jobs --------------------------------------------------------------------------------------------------------------


@pytest.mark.slurm
def test_a_slurm_run_by_component(slurm_cluster, tmp_path, monkeypatch, capsys):
    slurm_cluster.enter(monkeypatch)
    run = made_runs.folder(tmp_path / "one")
    components = {"train": ComponentConfig(nodes=2, cpus_per_task=1), "generate": ComponentConfig(nodes=1, cpus_per_task=1)}
    job = HetSlurmExecutor(run, "a", ClusterConfig(time_min=5), components).submit(tasks.report_and_wait, str(run))
    write_record(run, JobRecord.of("slurm", job))
    reports(run, 3)

    of = run_state.state(RunFolder.at(run))
    assert (of.name, of.job) == ("running", f"Slurm job {job.job_id}")
    assert [(name, part.state) for name, part in of.components.items()] == [("train", "RUNNING"), ("generate", "RUNNING")]
    assert all(part.nodes.startswith("127.0.0.") for part in of.components.values())
    assert of.ends_by == pytest.approx(time.time() + 300, abs=60)
    assert "generate  RUNNING  127.0.0." in asked(capsys, run)[1]

    job.cancel()
    wait_until(lambda: run_state.state(RunFolder.at(run)).name == "stopped", "the end of the job")
    assert asked(capsys, run)[0] == 1
