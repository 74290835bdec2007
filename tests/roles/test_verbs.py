"""Pyright checks the calls of verbs: their arguments, the types of their replies, and the roles that serve them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CALLS = """
from pipeline.roles import GenerateRole, TrainRole
from pipeline.rollout.rollout_messages import FinishedGroup, RolloutWork
from pipeline.rpc import RpcGroup
from pipeline.types import DataParallelRank, Update

def of(train: RpcGroup[TrainRole], generate: RpcGroup[GenerateRole], updates: list[list[Update]], work: RolloutWork) -> None:
    places: list[DataParallelRank] = train.call(TrainRole.setup).result()
    metrics: dict[str, list[dict[str, float]]] = train.call(TrainRole.step, ["policy"]).result()[0]
    none: list[None] = train.scatter(TrainRole.load, updates).result()
    groups: list[list[FinishedGroup]] = generate.call(GenerateRole.rollout, work).result()
    parts: list[tuple[int, list[FinishedGroup]]] = generate.call(GenerateRole.rollout, work).take()
    train.call(TrainRole.step, "policy")  # argument
    train.call(TrainRole.step)  # missing
    train.scatter(TrainRole.load, [1, 2])  # part
    wrong: list[str] = train.call(TrainRole.setup).result()  # reply
    stream: list[list[int]] = generate.call(GenerateRole.rollout, work).result()  # item
    train.call(TrainRole.step, ["policy"]).take()  # take
    train.call(GenerateRole.setup)  # role
"""


@pytest.mark.full
def test_pyright_refuses_a_wrong_argument_reply_and_role(tmp_path):
    path = tmp_path / "calls.py"
    path.write_text(CALLS)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    command = [Path(sys.executable).with_name("pyright"), "--pythonpath", sys.executable, "--outputjson", "-p", tmp_path]
    reported = json.loads(subprocess.run(command, capture_output=True, text=True, check=False, timeout=300).stdout)
    refused = {found["range"]["start"]["line"] for found in reported["generalDiagnostics"] if found["severity"] == "error"}
    lines = CALLS.split("\n")
    assert refused == {number for number, line in enumerate(lines) if "  # " in line} and len(refused) == 7
