"""Checks of the sandbox at submission."""

import pytest

from launch.preflight.installed import sandbox_problems as problems
from pipeline import config
from pipeline.sandbox import sandbox
from tests.sandbox.conftest import unusable


def told(*overrides: str, executor: str = "local") -> tuple[list[config.Problem], list[str]]:
    recipe = config.inspect("tiny_grpo", ["env.c.kind=code", *overrides]).recipe
    notes: list[str] = []
    return list(problems(recipe, executor, notes)), notes


def test_this_machines_sandbox_is_tried(monkeypatch: pytest.MonkeyPatch):
    if reason := unusable():
        pytest.skip(reason)
    assert told() == ([], [])
    monkeypatch.setattr(sandbox, "PROBE", b"raise SystemExit('nothing is allowed')")
    sandbox._first_working.cache_clear()
    (problem,) = told()[0]
    sandbox._first_working.cache_clear()
    assert (problem.key, problem.code) == ("env.c.kwargs.sandbox", "unsupported") and "install bubblewrap" in problem.message


def test_other_nodes_are_only_noted():
    found, (note,) = told(executor="slurm")
    assert not found and note.startswith("env.c.kwargs: the generate ranks check when they start")


def test_an_uncontained_sandbox_is_noted():
    found, (note,) = told("env.c.kwargs.sandbox=none")
    assert not found and "env.c.kwargs.sandbox: none: programs that the policy writes run with this user's rights" in note
