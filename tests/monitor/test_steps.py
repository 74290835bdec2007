"""Metrics and warnings of steps on rank 0, from samples of real processes where a process can have the fault."""

import json
import subprocess
import sys

import msgspec
import pytest

from pipeline.monitor.history import History
from pipeline.monitor.host import HostReader
from pipeline.monitor.sampler import Sampler
from pipeline.monitor.steps import MOST_RANKS, StepMonitor

LEAKS = """
import sys
kept = []
for line in sys.stdin:
    kept.append(b"x" * int(line))
    print("done", flush=True)
"""


def encoded(**values):
    return msgspec.msgpack.encode({name: float(value) for name, value in values.items()})


def monitor(path, samples, ranks=2, gpus=0, engines=()):
    components = {"train": tuple(range(ranks - len(engines))), "generate": tuple(engine[0] for engine in engines)}
    history = History(components, dict.fromkeys(range(ranks), "node1"), engines, 10**6, False)
    return StepMonitor(history, None, gpus, lambda: samples, path / "resources/warnings.jsonl")


def warnings(path):
    file = path / "resources/warnings.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_process_that_leaks_is_named_with_its_rank(tmp_path):
    """Rank 1's child keeps 8 MB in each step, rank 0's only at first, as a warm-up does."""
    children = [subprocess.Popen([sys.executable, "-c", LEAKS], stdin=-1, stdout=-1, text=True) for _ in range(2)]
    samplers = [Sampler([HostReader(tmp_path, rank == 0, child.pid).read], 1.0) for rank, child in enumerate(children)]
    samples = {}
    steps = monitor(tmp_path, samples)
    try:
        for step in range(1, 41):
            for rank, child in enumerate(children):
                child.stdin.write(f"{8_000_000 if rank or step < 8 else 0}\n")
                child.stdin.flush()
                child.stdout.readline()
                samplers[rank].sample()
                samples[rank] = samplers[rank].encoded
            steps.step_ended(step, {}, None)
    finally:
        for child in children:
            child.kill()
            child.wait()
    steps.look()
    (line,) = warnings(tmp_path)
    assert (line["check"], line["rank"], line["node"]) == ("host_leak", 1, "node1")
    grows = float(line["message"].partition("grows by ")[2].split()[0])
    assert grows == pytest.approx(8, rel=0.1), "MB a step"


def test_metrics_over_ranks_and_those_derived(tmp_path):
    samples = {}
    steps = monitor(tmp_path, samples, ranks=3, gpus=3, engines=((2,),))
    for now in (0, 10):
        train = {"at": now, "count": now, "gpu_index": 0, "rss_gb": 2}
        samples[0] = encoded(**train, waiting=1 * now / 10, collective=0.5 * now, energy_j=600 * now)
        samples[1] = encoded(**train | {"rss_gb": 4}, waiting=2 * now / 10, collective=0.1 * now, energy_j=600 * now)
        engine = {"prefix_queries": 40 * now, "prefix_hits": 30 * now, "preemptions": 0.2 * now}
        samples[2] = encoded(at=now, count=now, **engine, waiting=0, gpu_index=1, energy_j=300 * now)
        found = steps.step_ended(now + 1, {"throughput/tokens_per_s": 1000.0}, None)
    expected = {
        "train_rss_gb_mean": 3,
        "train_rss_gb_min": 2,
        "train_rss_gb_max": 4,
        "train_rss_gb_max_rank": 1,
        "train_waiting_mean": 0.15,
        "train_straggling": (0.7 - 0.55) / 0.7,  # own shares of time: 0.4 and 0.7
        "generate_prefix_hits": 0.75,
        "generate_preemptions": 2,
        "tokens_per_s_per_gpu": 1000 / 3,
        "energy_wh_per_million_tokens": 900 / 1000 * 1e6 / 3600,  # ranks 0 and 1 share a GPU
        "warnings": 0,
    }
    assert {name: found[f"resources/{name}"] for name in expected} == pytest.approx(expected)
    assert not [key for key in found if "energy_j" in key or "gpu_index" in key], "only what is shown"


def test_a_full_disk_is_told_during_a_step_and_not_at_every_sample(tmp_path):
    full = encoded(at=1, count=1, disk=0.99, disk_free_gb=1.0)
    steps = monitor(tmp_path, {0: full})
    steps.look()
    steps.look()
    (line,) = warnings(tmp_path)
    assert line["check"] == "full_disk" and line["rank"] == 0
    steps.step_ended(30, {}, None)
    steps.look()
    assert [each["step"] for each in warnings(tmp_path)] == [0, 30]


def test_a_warning_of_many_ranks_names_some(tmp_path):
    ranks = 100
    full = encoded(at=1, count=1, node_memory=0.99, node_memory_free_gb=1.0)
    monitor(tmp_path, dict.fromkeys(range(ranks), full), ranks).look()
    assert len(warnings(tmp_path)) == MOST_RANKS
    assert f"on {ranks - MOST_RANKS} more ranks" in warnings(tmp_path)[-1]["message"]


def test_an_error_of_the_monitor_costs_its_metrics_alone(tmp_path, caplog):
    assert monitor(tmp_path, {0: b"no sample"}).step_ended(1, {}, None) == {}
    assert "the run goes on" in caplog.text
