"""Runs with planted faults, which the resource monitor must find on their ranks."""

import json

import pytest

from pipeline.observe.metrics import read
from tests.end_to_end.runs import LOCAL, submit

FAST = ("logger.monitor.period_s=0.2",)


@pytest.mark.full
def test_metrics_and_samples_of_a_run(tmp_path):
    run = submit(tmp_path / "run", *LOCAL, *FAST, "grpo.max_num_steps=3")
    assert run.status == 0, run.output
    last = read(run.folder / "metrics.jsonl")[-1]
    for component in ("train", "generate"):
        assert 0 <= last[f"resources/{component}_waiting_min"] <= last[f"resources/{component}_waiting_max"] <= 1.01
        assert last[f"resources/{component}_rss_gb_mean"] > 0.05 and last[f"resources/{component}_tflops_per_rank"] > 0
    assert last["resources/generate_rss_gb_max_rank"] in (2, 3) and "resources/train_mfu" not in last, "there is no GPU"
    for rank, component in enumerate(("train", "train", "generate", "generate")):
        (path,) = run.folder.glob(f"attempts/*/resources/rank{rank:05d}.jsonl")
        about, *samples = map(json.loads, path.read_text().splitlines())
        assert about["rank"] == rank and about["component"] == component and samples[-1]["cpu"] > samples[0]["cpu"]
