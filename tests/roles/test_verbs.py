"""Verbs can be called: `RpcGroup` turns every attribute that it lacks into a call."""

import pytest

from pipeline.roles import GenerateRole, RewardRole, TrainRole
from pipeline.rpc import RpcGroup


@pytest.mark.parametrize("role", [TrainRole, GenerateRole, RewardRole])
def test_no_verb_has_the_name_of_a_method_of_rpc_group(role):
    verbs = {name for name, value in vars(role).items() if hasattr(value, "timeout")}
    assert "setup" in verbs and verbs & set(dir(RpcGroup)) == set()
