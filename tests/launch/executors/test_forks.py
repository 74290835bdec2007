"""When ranks are forks of the controller."""

import json
import time

from launch.executors import forks
from launch.executors.local import HetLocalExecutor
from launch.executors.rank_task import rank_main
from pipeline.config import ClusterConfig, ComponentConfig


def test_a_variable_that_python_reads_at_its_start_keeps_ranks_from_being_forks():
    own = {"HETSTEP_RANK": "0", "OMP_NUM_THREADS": "1"}
    assert forks.possible([own, {**own, "HETSTEP_RANK": "1"}])
    assert not forks.possible([{**own, "PYTHONPATH": "/a"}, {**own, "PYTHONPATH": "/a"}])
    assert not forks.possible([own, {**own, "TOKENIZERS_PARALLELISM": "false"}])
    assert not forks.possible([{**own, "CUDA_VISIBLE_DEVICES": "0"}])


def test_an_import_error_is_in_the_ranks_logs(tmp_path, monkeypatch):
    """The ranks import it themselves then; the controller survives to give its verdict."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/torch.py").write_text("raise ImportError('a broken torch')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    job = HetLocalExecutor(tmp_path / "run", ClusterConfig(time_min=5), {"train": ComponentConfig()}).submit(
        rank_main, str(tmp_path / "run")
    )
    deadline = time.monotonic() + 60
    while not (status := job.status()).ended:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert status.state == "FAILED" and "rank 0 (train) exited with status 1" in status.reason
    assert json.loads((tmp_path / "run/submitit/plan.json").read_text())["fork"]
    (log,) = (tmp_path / "run").glob("attempts/*/rank00000.log")
    assert "a broken torch" in log.read_text()
