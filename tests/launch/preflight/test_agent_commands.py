"""Programs and folders of agents that do not exist where they run are refused before submission."""

import json
from pathlib import Path

import pytest

from launch.preflight import agent_commands, input_files
from pipeline import config
from tests.launch.model import write_recipe
from tests.problems import named


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Return load(kwargs, *overrides) of a recipe with an agent, beside which are a script, a program and an image."""
    path = write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (tmp_path / "quiet.sh").write_text("#!/bin/sh\n")
    (tmp_path / "runs.sh").write_text("#!/bin/sh\n")
    (tmp_path / "runs.sh").chmod(0o755)
    (tmp_path / "root/bin").mkdir(parents=True)
    (tmp_path / "root/bin/sh").symlink_to("busybox")

    def recipe(kwargs: str, *overrides: str) -> config.Recipe:
        chat = "data.apply_chat_template=true", "policy.tokenizer.chat_template=chat.jinja"
        agent = f"env.math={{_override_: true, kind: agent, kwargs: {kwargs}}}"
        return config.load(str(path), [*chat, "policy.generation.backend=vllm", agent, *overrides])

    return recipe


@pytest.fixture
def found(load):
    def problems(kwargs: str, *overrides: str, executor: str = "local") -> tuple[set, list[str]]:
        notes: list[str] = []
        return named(list(agent_commands.problems(load(kwargs, *overrides), executor, notes))), notes

    return problems


COMMAND = "env.math.kwargs.command"


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ("{command: [python, any.py]}", None),
        ("{command: [./runs.sh]}", None),
        ("{command: [./askk.sh]}", (COMMAND, "file-not-found")),
        ("{command: [no-such-program, a.js]}", (COMMAND, "file-not-found")),
        ("{command: [./quiet.sh]}", (COMMAND, "permission-denied")),
        ("{command: [python], files: /nowhere}", ("env.math.kwargs.files", "file-not-found")),
        ("{command: [python], reward: command, score: [./nosuch.sh]}", ("env.math.kwargs.score", "file-not-found")),
        ("{command: [sh, started.sh], sandbox: {image: ROOT}}", None),
        ("{command: [/bin/sh, -c, 'echo 1'], sandbox: {image: ROOT}}", None),
        ("{command: [sh, quiet.sh], sandbox: {image: ROOT}}", (COMMAND, "not-mounted")),
        ("{command: [python3, x.py], sandbox: {image: ROOT}}", (COMMAND, "file-not-found")),
        ("{command: [./x.sh], sandbox: {image: ROOT}}", None),
        ("{command: [python3, x.py], sandbox: {image: '/images/{name}.sqsh'}}", None),
        ("{command: [sh, quiet.sh], sandbox: {image: '/images/{name}.sqsh'}}", (COMMAND, "not-mounted")),
    ],
)
def test_what_an_agent_runs_must_exist(found, tmp_path, kwargs, problem):
    problems, notes = found(kwargs.replace("ROOT", str(tmp_path / "root")))
    assert problems == ({problem} if problem else set()) and not notes


def test_other_nodes_may_have_other_programs(found):
    elsewhere = "{command: [no-such-program]}"
    problems, notes = found(elsewhere, executor="slurm")
    assert not problems and "no-such-program is not in PATH here" in notes[0]
    assert found(elsewhere, "cluster.generate.container_image=a.sqsh", executor="slurm") == (set(), [])
    apart = "cluster.environment.container_image=a.sqsh", "cluster.environment.nodes=1"
    assert found("{command: [./askk.sh]}", *apart, executor="slurm") == (set(), [])


def test_an_agents_columns_must_be_in_the_records(load, tmp_path):
    def absent(kwargs: str) -> set:
        return named([problem for problem in input_files.problems(load(kwargs), []) if problem.code == "missing-column"])

    lines = Path(tmp_path / "data.jsonl").read_text().splitlines()
    records = [json.dumps({**json.loads(line), "name": "a"}) for line in lines]
    (tmp_path / "data.jsonl").write_text("\n".join(records))
    assert absent("{command: [python], columns: [difficulty]}") == {("env.math.kwargs.columns", "missing-column")}
    image = "{command: [sh], columns: [name], sandbox: {image: '/images/{task}.sqsh'}}"
    assert absent(image) == {("env.math.kwargs.sandbox.image", "missing-column")}
    assert absent(image.replace("{task}", "{name}")) == set()
