"""Steps of ranks between samples, and leaks."""

import random

import pytest

from pipeline.monitor.history import POINTS, Growth, History, between


def sample(at, **values):
    return {"at": float(at), "count": at / 5, **values}


def test_a_step_has_rates_means_and_levels():
    before = sample(10, cpu=100.0, rss_gb=1.0, kv_cache=0.5, **{"sum:kv_cache": 1.0})
    after = sample(30, cpu=140.0, rss_gb=3.0, kv_cache=0.1, **{"sum:kv_cache": 2.2})
    step = between(before, after)
    assert step.values == pytest.approx({"cpu": 2.0, "rss_gb": 3.0, "kv_cache": 0.3}) and step.grown == {"cpu": 40.0}


def test_a_rank_without_a_new_sample_keeps_its_last_step():
    history = History({"train": (0, 1)}, {0: "a", 1: "b"}, (), 10, False)
    history.now = {0: sample(5, cpu=1.0), 1: sample(5, cpu=1.0)}
    assert history.step_ended(1, {}).ranks == {}, "a rate needs two samples"
    history.now = {0: sample(10, cpu=6.0), 1: sample(10, cpu=11.0)}
    assert history.step_ended(2, {}).of("cpu", (0, 1)) == {0: 1.0, 1: 2.0}
    history.now[0] = sample(15, cpu=21.0)
    assert history.step_ended(3, {}).of("cpu", (0, 1)) == {0: 3.0, 1: 2.0}
    assert history.mean("cpu", (0, 1)) == {}
    history.now[0] = sample(20, cpu=46.0)
    history.step_ended(4, {})
    assert history.mean("cpu", (0, 1)) == {0: 3.0}, "rank 1 has one step with a new sample"


def grown(sizes):
    growth = Growth()
    for step, size in enumerate(sizes):
        growth.add(step, size)
    return growth


def test_steady_growth_is_a_leak():
    noise = random.Random(1)
    growth = grown(2 + 0.01 * step + noise.uniform(-0.002, 0.002) for step in range(1000))
    assert growth.slope(0.1) == pytest.approx(0.01, rel=0.02) and len(growth.points) <= POINTS


@pytest.mark.parametrize(
    "sizes",
    [
        [1 + 0.5 * step for step in range(31)],
        [5 - 4 * 0.9**step for step in range(200)],
        [5 - 4 * 0.97**step for step in range(500)],
        [3 + (step % 7) * 0.2 for step in range(200)],
        [3 + 0.00001 * step for step in range(200)],
        [3.0] * 150 + [6.0] * 50,
    ],
    ids=["short", "caches", "slow caches", "saw", "little", "jump"],
)
def test_warm_up_and_noise_are_no_leak_at_any_step(sizes):
    assert len(sizes) > 30
    assert [count for count in range(1, len(sizes) + 1) if grown(sizes[:count]).slope(0.1) is not None] == []


def test_a_growth_that_has_ended_is_no_leak():
    assert grown(1 + min(step, 40) * 0.1 for step in range(100)).slope(0.1) is None
