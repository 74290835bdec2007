"""Optimizers take a trial step where a plan is made; a stranger's code does not run."""

import pytest

from launch.plan.memory_parts import optimizer_state
from launch.preflight import libraries, tried_optimizers
from launch.recipes.trust import Trust, trusting
from pipeline import config
from tests.problems import named

CODE = """\
import os
import pathlib
import torch

pathlib.Path(__file__).with_suffix(".imported").touch()

class Sign(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter].setdefault("m", torch.zeros_like(parameter))
                state.mul_(group["momentum"]).add_(parameter.grad)
                parameter.sub_(state.sign(), alpha=group["lr"])

class Closure(torch.optim.SGD):
    def step(self, closure):
        return closure()

class Rows(Sign):
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["rows"] = torch.zeros(parameter.shape[0], 1, 1)

class Exits(Sign):
    def step(self, closure=None):
        os._exit(3)

NotAClass = Sign.step
"""
KEY = "policy.optimizer"


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.delenv("HETSTEP_TRUSTED", raising=False)

    def inspected(name, **kwargs):
        loaded = config.inspect("tiny_sft", [f"module_folders=[{tmp_path}]"]).recipe
        loaded.policy.optimizer = config.OptimizerConfig(name, kwargs)
        return loaded

    return inspected


FULL = pytest.mark.full  # each starts a Python that imports torch


@pytest.mark.parametrize(
    ("name", "kwargs", "key", "code", "said"),
    [
        pytest.param("mine.Sign", {"lr": "fast"}, f"{KEY}.name", "unsupported", "cannot update", marks=FULL),
        pytest.param("mine.Sign", {"lr": 1, "momentum": "high"}, f"{KEY}.kwargs.momentum", "unsupported", "'high'", marks=FULL),
        pytest.param("mine.Closure", {"lr": 0.1}, f"{KEY}.name", "unsupported", "closure", marks=FULL),
        pytest.param("mine.Rows", {"lr": 0.1}, f"{KEY}.name", "unsupported", "checkpoints cannot store", marks=FULL),
        pytest.param("mine.NotAClass", {}, f"{KEY}.name", "wrong-type", "expected a subclass of Optimizer", marks=FULL),
        ("torch.optim.AdamW", {"lr": 0.1, "betas": [0.9, 2.0]}, f"{KEY}.kwargs.betas", "unsupported", "Invalid beta"),
        ("torch.optim.Muon", {"lr": 0.1, "ns_coefficients": [3]}, f"{KEY}.kwargs.ns_coefficients", "unsupported", "3 values"),
        ("torch.optim.Muon", {"lr": 0.1, "ns_steps": 5.5}, f"{KEY}.kwargs.ns_steps", "unsupported", "a whole number"),
        ("torch.optim.Muon", {"lr": 0.1, "adamw": {"eps": -1.0}}, f"{KEY}.kwargs.adamw.eps", "unsupported", "epsilon"),
    ],
)
def test_a_trial_names_the_option_or_the_optimizer(recipe, name, kwargs, key, code, said):
    notes = []
    with trusting(Trust.EVERYTHING):
        problems = list(tried_optimizers.problems(recipe(name, **kwargs), notes))
    assert named(problems) == {(key, code)} and not notes
    assert all(said in problem.message for problem in problems)


def test_code_that_is_not_trusted_is_read_alone(recipe, tmp_path, monkeypatch):
    notes = []
    assert not list(tried_optimizers.problems(recipe("mine.Sign", lr=0.1), notes))
    assert "trust=true" in notes[0] and not (tmp_path / "mine.imported").exists()
    assert optimizer_state(recipe("mine.Sign", lr=0.1), recipe("mine.Sign", lr=0.1).policy.optimizer)[1]
    for kwargs, key, code in (
        ({"lr": 0.1, "momentu": 1}, f"{KEY}.kwargs.momentu", "unknown-key"),
        ({"momentum": 0.5}, f"{KEY}.kwargs.lr", "missing-value"),
        ({"lr": 0.1, "momentum": [1]}, f"{KEY}.kwargs.momentum", "wrong-type"),
    ):
        assert named(libraries.problems(recipe("mine.Sign", **kwargs))) == {(key, code)}
    assert named(libraries.problems(recipe("mine.Closure", lr=0.1, betas=1))) == {(f"{KEY}.kwargs.betas", "unknown-key")}
    assert named(libraries.problems(recipe("mine.Sing", lr=0.1))) == {(f"{KEY}.name", "not-a-choice")}
    assert named(libraries.problems(recipe("nine.Sign", lr=0.1))) == {(f"{KEY}.name", "not-importable")}
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # as if installed, for this process and its children
    monkeypatch.syspath_prepend(tmp_path)
    assert not list(tried_optimizers.problems(recipe("mine.Sign", lr=0.1), notes)) and len(notes) == 2
    assert not (tmp_path / "mine.imported").exists()


@pytest.mark.full
def test_a_process_that_ends_is_noted(recipe):
    notes = []
    with trusting(Trust.EVERYTHING):
        assert not list(tried_optimizers.problems(recipe("mine.Exits", lr=0.1), notes))
    assert "was not tried: Python ended with status 3" in notes[0]


@pytest.mark.parametrize(
    ("name", "kwargs", "expected"),
    [
        ("torch.optim.AdamW", {"lr": 0.1}, (8, 8)),
        ("torch.optim.AdamW", {"lr": 0.1, "amsgrad": True}, (12, 12)),
        ("torch.optim.Muon", {"lr": 0.1}, (4, 8)),
        ("torch.optim.SGD", {"lr": 0.1}, (0, 0)),
        ("torch.optim.SGD", {"lr": 0.1, "momentum": 0.9}, (4, 4)),
        ("mine.Sign", {"lr": 0.1}, (4, 4)),
    ],
)
def test_bytes_of_state(recipe, name, kwargs, expected):
    with trusting(Trust.EVERYTHING):
        assert optimizer_state(recipe(name, **kwargs), recipe(name, **kwargs).policy.optimizer) == (expected, "")
