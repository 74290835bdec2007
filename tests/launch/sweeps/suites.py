"""A suite of trivial runs, and the sweep command as a user calls it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from launch import sweep as command
from launch.sweeps import submission
from tests.launch.model import write_recipe

LR = "policy.optimizer.kwargs.lr"
KL = "loss_fn.reference_policy_kl_penalty"
ROOT = Path(__file__).parents[3]
STANDIN = Path(__file__).parent / "standin"
GATES = {
    "on policy": {"value": "at(train/ppo_kl, 1)", "equals": 0},
    "loss": {"value": "last(train/loss)", "band": {"better": "lower", "floor": 1e-9}},
    "speed": {"value": "min(time/step)", "speed": {"at_most": 1.25}},
}


def write_suite(folder: Path, **changes: Any) -> Path:
    """Write a suite `some` of two runs, `a` and `b`, with two seeds each, of a recipe that passes every check."""
    recipe = str(write_recipe(folder))
    runs = {name: {"recipe": recipe, "overrides": {LR: 0.5}} for name in ("a", "b")}
    suite = {"seeds": [1, 2], "max_concurrent": 2, "folder": str(folder / "sweeps"), "runs": runs, "gates": GATES}
    path = folder / "some.yaml"
    path.write_text(yaml.safe_dump({**suite, **changes}, sort_keys=False))
    return path


def write_search(folder: Path, *, recipe: str | None = None, top: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Write a suite `some` with a search of a grid of two learning rates; `changes` are keys of the search, `top` others."""
    search = {
        "recipe": recipe or str(write_recipe(folder)),
        "overrides": {"grpo.max_num_steps": 4},
        "parameters": {LR: [1.0, 0.5]},
        "metric": "train/reward",
        "direction": "maximize",
        "sampler": "grid",
    }
    path = folder / "some.yaml"
    suite = {"folder": str(folder / "sweeps"), "search": {**search, **changes}, **(top or {})}
    path.write_text(yaml.safe_dump(suite, sort_keys=False))
    return path


def environment(env: dict | None = None, **more: str) -> dict[str, str]:
    """Return the environment in which ranks run tasks.learn. env: the Slurm cluster's."""
    standin = {"PYTHONPATH": str(STANDIN), "HETSTEP_TEST_TASK": "tests.launch.sweeps.tasks:learn"}
    return {**os.environ, **(env or {}), **standin, **more}


def in_process(monkeypatch, capsys, task: Callable[[str], None]) -> Callable[..., tuple[int, str]]:
    """Return a function that runs the command in this process, and returns (status, output). Its runs are processes.

    Its keyword `fails` is HETSTEP_TEST_FAILS, which the tasks read.
    """
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("launch.executors.rank_task.rank_main", task)
    monkeypatch.setitem(submission.POLL_S, "local", 0.05)
    monkeypatch.chdir(os.getcwd())

    def run(*arguments: str, fails: str = "") -> tuple[int, str]:
        monkeypatch.setenv("HETSTEP_TEST_FAILS", fails)
        status = command.main(list(arguments))
        return status, "".join(capsys.readouterr())

    return run


def launch(*arguments: str, env: dict, cwd: Path = ROOT) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "launch/sweep.py"), *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd)


def sweep(*arguments: str, env: dict, cwd: Path = ROOT, timeout: float = 240) -> tuple[int, str]:
    """Run the sweep command; return (status, output)."""
    process = launch(*arguments, env=env, cwd=cwd)
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, output


def outcomes(folder: Path) -> dict[tuple[str, str], str]:
    """Return (run, gate) -> outcome of a judged sweep."""
    verdicts = json.loads((folder / "verdict.json").read_text())["verdicts"]
    return {(each["run"], each["gate"]): each["outcome"] for each in verdicts}


def known(folder: Path) -> int:
    """Return how many runs have a job, or have ended before their lost job was found again."""
    return len({path.parent for name in ("job", "done") for path in folder.glob(f"runs/*/{name}.json")})


def starts(folder: Path) -> dict[str, int]:
    """Return how often each run was started."""
    return {path.parent.name: len(path.read_text().splitlines()) for path in folder.glob("runs/*/starts")}


def submitted(folder: Path) -> list[str]:
    """Return the names of the jobs, one for each submission, from the run folders and Slurm's ids."""
    return [json.loads(line)["job"] for line in (folder / "jobs.jsonl").read_text().splitlines()]
