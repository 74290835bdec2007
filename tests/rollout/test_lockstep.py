"""Two ranks of one engine beside rank 0: real processes, the real store, gloo."""

import json
import os

import pytest

from tests.fork_server import Program
from tests.rollout import ranks
from tests.world.secret import write_secret


@pytest.fixture
def run(tmp_path, checkpoint):
    """Run the ranks. Return (exit statuses, rank 0's output, failure.json)."""
    processes = []

    def begin(scenario: str):
        write_secret(tmp_path)
        for rank in range(3):
            env = os.environ | {
                "HETSTEP_RANK": str(rank),
                "HETSTEP_WORLD_SIZE": "3",
                "HETSTEP_LOCAL_RANK": str(rank),
                "HETSTEP_NODE": "here",
                "HETSTEP_MASTER_ADDR": "127.0.0.1",
                "HETSTEP_ATTEMPT": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
                "OMP_NUM_THREADS": "1",
            }
            arguments = (tmp_path, scenario, checkpoint.folder)
            processes.append(Program(ranks.main, arguments, env, tmp_path / f"{rank}.log"))
        statuses = [process.wait(150) for process in processes]
        failures = list(tmp_path.glob("attempts/*/failure.json"))
        return statuses, "\n".join((tmp_path / f"{rank}.log").read_text() for rank in range(3)), failures

    yield begin
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_the_ranks_of_an_engine_act_alike_and_verbs_run_between_steps(run):
    """Streaming replies, a snapshot, new weights in flight, a drain and a cut: see tests/rollout/ranks.py."""
    statuses, said, failures = run("check")
    assert statuses == [0, 0, 0] and "checked" in said and not failures, said[-4000:]


@pytest.mark.long
def test_an_engine_that_hangs_is_named_though_its_reply_streams(run):
    statuses, said, (failure,) = run("hang")
    failure = json.loads(failure.read_text())
    assert statuses[0] == 124, said[-4000:]
    assert (failure["rank"], failure["verb"], failure["phase"]) == (1, "rollout", "decode")
    assert "verb 'rollout' has not ended after 3 s: rank 1 (generate)" in failure["message"]
    assert "rank 2 (generate)" in failure["message"]  # it only follows, but rank 1 might be waiting for it


@pytest.mark.long
def test_an_engine_that_raises_between_verbs_ends_the_run_with_its_traceback(run):
    statuses, said, (failure,) = run("raise")
    failure = json.loads(failure.read_text())
    assert statuses[1] == 1 and 0 not in statuses, said[-4000:]
    assert (failure["rank"], failure["verb"]) == (1, "rollout")
    assert failure["message"] == "rank 1 (generate): ValueError: the engine is on fire"
