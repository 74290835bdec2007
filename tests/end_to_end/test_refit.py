"""Refits in whole runs: a fault is caught, named and not served; every transport gives the same numbers."""

import pytest

from pipeline.observe.metrics import read
from tests.end_to_end.runs import LOCAL, Fault, left_alive, pids_of, submit

REFIT = ("cluster.timeouts.refit=8", "cluster.timeouts.silence=20")
SECOND = {"phase": "send", "victim": 1, "actor": 1, "count": 3}  # the refit after step 2; the first is the start's


@pytest.mark.full  # by default: tests/refit/test_transfer.py
@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (Fault(**SECOND, message="flip"), ("refit to version 2 failed, version 1 stays", "differs in model.")),
        pytest.param(Fault(**SECOND, message="drop"), ("(generate)", "round", "from rank"), marks=pytest.mark.long),
        pytest.param(Fault(**SECOND, message="die"), ("rank 1 (train) was ended by",), marks=pytest.mark.long),
    ],
    ids=["flipped bit", "dropped message", "killed sender"],
)
def test_a_fault_in_a_refit_is_named_and_not_served(tmp_path, whole, fault, named):
    broken = submit(tmp_path / "run", *LOCAL, *REFIT, fault=fault)
    assert broken.status == 1, broken.output
    assert (pids_of(broken.folder) / "done").exists(), "the fault never struck"
    assert left_alive(broken.folder) == []
    assert all(words in broken.output for words in named), broken.output
    assert broken.metrics() == whole.metrics()[:1]  # step 2 is over only once its weights are served
    assert not list((broken.folder / "rollouts").glob("step_000003.jsonl"))
    if fault.message == "flip":  # the others leave what any kill leaves: see test_kill
        rerun = submit(broken.folder, *LOCAL)
        assert rerun.status == 0, rerun.output
        assert rerun.metrics() == whole.metrics()


@pytest.mark.full  # by default: tests/refit/test_transfer.py
@pytest.mark.parametrize("transport", [pytest.param("broadcast", marks=pytest.mark.long), "delta"])
def test_every_transport_gives_the_same_run(tmp_path, whole, transport):
    run = submit(tmp_path / "run", *LOCAL, f"policy.generation.refit_transport={transport}")
    assert run.status == 0, run.output

    def without_bytes(lines):
        return [{key: value for key, value in line.items() if not key.startswith("refit/")} for line in lines]

    assert without_bytes(run.metrics()) == without_bytes(whole.metrics())


def test_each_step_has_its_refits_metrics(whole):
    for line in read(whole.folder / "metrics.jsonl"):
        assert line["refit/bytes_received_max"] > 3e6
        parts = [line[f"time/refit_{part}"] for part in ("pack", "wire", "apply", "pause", "digest")]
        assert all(seconds >= 0 for seconds in parts) and sum(parts) > 0
        assert line["throughput/refit_gb_per_s"] > 0 and line["throughput/refit_efficiency"] > 0
    assert "bound by" in whole.output + "".join(path.read_text() for path in whole.folder.glob("attempts/*/rank*.log"))
