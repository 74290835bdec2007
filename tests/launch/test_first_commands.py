"""README's first commands, unchanged, in each situation of a new user's shell."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import status, submit
from launch.executors import slurm_client
from launch.executors.executor import ROOT
from launch.executors.record import JobRecord, write_record
from pipeline import config
from tests.launch.model import write_recipe
from tests.slurm import situations
from tests.slurm.situations import Situation, first_commands, first_run


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    """Remove the surrounding job's variables and the cached choices."""
    for key in [key for key in os.environ if key.startswith("SLURM_")]:
        monkeypatch.delenv(key)
    monkeypatch.setattr(slurm_client, "_unreachable", {})
    monkeypatch.chdir(ROOT)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def enter(monkeypatch, situation: Situation) -> None:
    for key, value in situation.environment.items():
        monkeypatch.delenv(key, raising=False) if value is None else monkeypatch.setenv(key, value)


def check(situation: Situation, printed: str) -> None:
    (line,) = {line for line in printed.splitlines() if "cluster.executor=auto:" in line}
    assert line.startswith(f"# cluster.executor=auto: {situation.chosen} (") and situation.says in line


def test_the_page_starts_with_set_up_and_a_run():
    setup, run = first_commands()
    assert setup == "make setup"
    assert run.startswith(".venv/bin/python launch/submit.py recipe=")


@pytest.mark.parametrize("number", range(3), ids=["no Slurm", "no cluster", "down"])
def test_the_commands_without_a_cluster(tmp_path, monkeypatch, capsys, number):
    if number == 1 and Path("/etc/slurm/slurm.conf").exists():
        pytest.skip("this machine is part of a cluster")
    situation = situations.without_cluster(tmp_path)[number]
    enter(monkeypatch, situation)
    assert submit.main([*first_run(), "dry_run=true"]) == 0
    check(situation, capsys.readouterr().out)
    assert submit.main([*first_run(), "cluster.executor=slurm", "dry_run=true"]) == 0
    assert "# cluster.executor: got slurm; Slurm's" in (out := capsys.readouterr().out) or "; Slurm is not" in out
    monkeypatch.setattr("launch.submission.prepare.RESTART_S", 0.0)
    monkeypatch.chdir(tmp_path)
    assert submit.main([f"recipe={write_recipe(tmp_path)}", "cluster.executor=slurm"]) == 2
    assert f"error: cluster.executor: got slurm; {slurm_client.unreachable()}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", range(3), ids=["no Slurm", "no cluster", "down"])
def test_a_run_whose_job_cannot_be_queried_is_reported(tmp_path, monkeypatch, capsys, number):
    situation = situations.without_cluster(tmp_path)[number]
    enter(monkeypatch, situation)
    monkeypatch.setattr("launch.submission.foreground.RESTART_S", 0.0)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    recipe = str(write_recipe(tmp_path, cluster={}))
    config.write(config.load(recipe, ["policy.dtensor_cfg.enabled=true"]), run_dir / "recipe.yaml")
    write_record(run_dir, JobRecord("slurm", "17", "login", cluster="a"))
    for _ in range(2):
        assert status.main([str(run_dir)]) == 0
        assert f"unknown; {slurm_client.unreachable()}" in capsys.readouterr().out
    assert submit.main([f"follow={run_dir}"]) == 2
    assert "follow: the state of Slurm job 17 is unknown: " in capsys.readouterr().err
    assert submit.main([f"recipe={recipe}"]) == 2
    assert "Slurm job 17 was the last to write into" in capsys.readouterr().err


@pytest.mark.slurm
def test_the_commands_with_a_cluster(slurm_cluster, tmp_path, monkeypatch, capsys):
    situation, inside = situations.with_cluster(slurm_cluster)
    enter(monkeypatch, situation)
    assert submit.main([*first_run(), "dry_run=true"]) == 0
    check(situation, out := capsys.readouterr().out)
    assert "#SBATCH hetjob" in out

    command = [*inside.inside, sys.executable, str(ROOT / "launch/submit.py"), *first_run(), "dry_run=true"]
    environment = {**os.environ, **inside.environment}
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")  # the recipe's paths are from the current folder too
    answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    check(inside, answer.stdout)


@pytest.mark.slurm
def test_a_hanging_controller_is_waited_for_within_the_limit(slurm_cluster, monkeypatch):
    from launch.executors import selection
    from pipeline.config import Recipe

    monkeypatch.setattr(slurm_client, "PING_S", 1.0)
    with situations.hanging(slurm_cluster) as situation:
        enter(monkeypatch, situation)
        begin = time.monotonic()
        choice = selection.choose(Recipe(name="x", algorithm="grpo", run_dir="x"))
        again = selection.choose(Recipe(name="y", algorithm="grpo", run_dir="y"))
        seconds = time.monotonic() - begin
    assert choice == again and choice.name == "local" and situation.says in choice.reason
    print(f"two choices in {seconds:.2f} s")


@pytest.mark.full
def test_the_run_of_the_page(tmp_path, monkeypatch):
    """Run it in a clone whose folder's name has spaces and non-ASCII letters, without Slurm."""
    clone = tmp_path / "a b ü"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    (clone / ".venv").symlink_to(Path(ROOT, ".venv").resolve())
    enter(monkeypatch, situations.without_cluster(tmp_path)[0])
    answer = subprocess.run(["bash", "-c", first_commands()[1]], cwd=clone, capture_output=True, text=True, timeout=540)
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
    assert "cluster.executor=auto: local (" in answer.stdout
    assert "done: step" in answer.stdout and (clone / "runs/tiny_grpo/done.json").exists()
