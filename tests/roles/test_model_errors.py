"""An error of building a model is the error that leaves `setup`, and names the model."""

import contextlib
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from pipeline import algorithms, config, train
from pipeline.roles import TrainRole
from tests.train.conftest import realm  # noqa: F401


@pytest.mark.parametrize(("failing", "message"), [("policy", "no such layer"), ("critic", "of the critic: no such layer")])
def test_it_names_the_model_and_is_no_cause_of_itself(failing, message, realm, tmp_path, monkeypatch):  # noqa: F811
    original = train.build

    def build(policy, group, seed, role):
        if (role.head == "values") == (failing == "critic"):
            raise ValueError("no such layer")
        return original(policy, group, seed, role)

    monkeypatch.setattr(train, "build", build)
    overrides = ["needs=[]", "policy.model_name=recipes/tiny", "policy.random_init=true", f"run_dir={tmp_path}"]
    recipe = config.load("tiny_ppo", overrides)
    world = SimpleNamespace(own=dist.group.WORLD, rank=0, info=SimpleNamespace(run_dir=tmp_path), phase=contextlib.nullcontext)
    with pytest.raises(ValueError) as raised:
        TrainRole(recipe, 7, world, algorithms.build(recipe), None).setup()
    assert str(raised.value) == message
    assert raised.value.__cause__ is not raised.value
