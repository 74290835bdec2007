"""A reward model with its own ranks, in a real world of three realms that the local executor's controller starts."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from launch.executors.components import components
from launch.executors.local import rank_environments
from pipeline import config
from tests.fork_server import Program
from tests.roles import reward_rank
from tests.roles.judges import eager_scores, recipe, write_judge, write_tokenizer
from tests.roles.reward_rank import conversations
from tests.world.secret import write_secret


def run(folder: Path, *overrides: str) -> dict:
    """Return rank 0's scores in a world with one train, one generate and two reward ranks."""
    judged = recipe(folder, "env.judge.served_by=reward", "cluster.reward.ranks_per_node=2", *overrides)
    (folder / "run").mkdir()
    write_secret(folder / "run")
    config.write(judged, folder / "run/recipe.yaml")
    logs, processes = [], []
    try:
        for environment in rank_environments(components(judged)):
            logs.append(folder / f"{environment['HETSTEP_RANK']}.log")
            environment = {**os.environ, **environment, "HETSTEP_ATTEMPT": "1", "CUDA_VISIBLE_DEVICES": ""}
            processes.append(Program(reward_rank.main, (folder / "run",), environment, logs[-1]))
        statuses = [process.wait(120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert statuses == [0] * 4, [log.read_text()[-3000:] for log in logs]
    return json.loads((folder / "run/scores.json").read_text())


@pytest.fixture
def folder(tmp_path):
    write_judge(tmp_path / "judge")
    recipe(tmp_path)
    write_tokenizer(tmp_path / "model")
    return tmp_path


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_two_ranks_score_like_transformers(folder, backend):
    found = run(folder, *([] if backend == "dtensor" else ["policy.megatron_cfg.enabled=true"]))
    expected = eager_scores(folder / "judge", [[*asked, *answered] for asked, answered in conversations()])
    assert found["places"] == [[0, 2], [1, 2]]
    assert np.allclose(found["scores"], expected, atol=1e-5)
    assert np.std(expected) > 0.1
    assert np.allclose(found["alone"], expected[:2], atol=1e-5)  # with a data rank that has no samples
