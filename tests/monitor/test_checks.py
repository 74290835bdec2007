"""Warnings: each check on a history with one planted fault, and on the same one without it."""

import pytest

from pipeline.monitor import resource_warnings
from pipeline.monitor.history import History
from pipeline.monitor.readings import COUNTERS

NODES = {0: "a", 1: "a", 2: "b", 3: "b"}


def history(values, steps=3, ahead=False, max_steps=100, **levels):
    """Return steps in which rank r has the readings `values[r]`; a number is for every rank. levels: of the latest samples."""
    found = History({"train": (0, 1), "generate": (2, 3)}, NODES, ((2,), (3,)), max_steps, ahead)
    for step in range(steps + 1):
        at = 5.0 * (step + 1)
        found.now = {}
        for rank in NODES:
            sample = {"at": at, "count": step + 1.0}
            for name, each in values.items():
                value = each[rank] if isinstance(each, list) else each
                if name in COUNTERS:
                    sample[name] = value * at
                else:
                    sample[name] = value(step) if callable(value) else value
                    sample[f"sum:{name}"] = sample[name] * (step + 1)
            found.now[rank] = sample | levels
        found.step_ended(step + 1, {})
    return found


HEALTHY = {"waiting": 0.3, "collective": 0.2, "engine_steps": 10.0, "engine_s": 0.5, "sm_clock_mhz": 1900, "gpu_util": 0.9}


def warned(check, found):
    return [rank for rank, _ in check(found)]


@pytest.mark.parametrize(
    "check", resource_warnings.AFTER_A_STEP + resource_warnings.AT_ANY_TIME, ids=lambda check: check.__name__
)
@pytest.mark.parametrize("ahead", [False, True])
def test_a_healthy_run_has_no_warning(check, ahead):
    assert warned(check, history(HEALTHY, ahead=ahead)) == []
    assert warned(check, History({"train": (0,)}, {0: "a"}, (), None, False)) == [], "nor one that has no step yet"


FAULTS = [
    (resource_warnings.slow_rank, {"collective": [0.35, 0.0, 0, 0]}, 1, "2.0 times"),
    (resource_warnings.slow_rank, {"collective": [0.05, 0.4, 0, 0]}, 0, "2.2 times"),
    (resource_warnings.slow_engine, {"engine_s": [0, 0, 0.3, 0.9]}, 3, "90.0 ms"),
    (resource_warnings.slow_gpu, {"sm_clock_mhz": [1900, 1400, 1900, 1900]}, 1, "1400 MHz"),
    (
        resource_warnings.throttling,
        {"throttled": [0, 0, 1, 0], "throttle_bits": [0, 0, 0x40, 0]},
        2,
        "hardware thermal slowdown",
    ),
    (resource_warnings.full_cache, {"preemptions": [0, 0, 0, 0.5], "kv_cache": [0, 0, 0.9, 0.95]}, 3, "30.0 a minute"),
    (resource_warnings.full_memory, {"node_memory": [0.5, 0.5, 0.99, 0.5], "node_memory_free_gb": 1.0}, 2, "host memory of b"),
    (resource_warnings.full_disk, {"disk": [0.5, 0.99, 0.99, 0.5], "disk_free_gb": 1.0}, 1, "99.0%"),
]


@pytest.mark.parametrize(("check", "fault", "rank", "says"), FAULTS, ids=lambda each: getattr(each, "__name__", None))
def test_a_fault_is_found_on_its_rank(check, fault, rank, says):
    ((found, message),) = check(history(HEALTHY | fault))
    assert found == rank and says in message and f"rank {rank} (" in message


def test_a_slow_rank_must_last_and_make_its_peers_wait():
    fault = HEALTHY | {"collective": [0.35, 0.0, 0, 0]}
    assert warned(resource_warnings.slow_rank, history(fault, steps=1)) == []
    assert warned(resource_warnings.slow_rank, history(HEALTHY | {"waiting": [0.6, 0.1, 0, 0]})) == [], "nobody waits for it"


def test_steps_between_two_samples_do_not_make_a_fault_last():
    found = history(HEALTHY | {"collective": [0.35, 0.0, 0, 0]}, steps=2)
    for step in range(3, 20):  # without a new sample
        found.step_ended(step, {})
        assert warned(resource_warnings.slow_rank, found) == []


def test_a_node_can_be_left_out_only_if_there_are_others():
    found = history(HEALTHY | {"collective": [0.35, 0.0, 0, 0]})
    assert "leave the node out: cluster.sbatch_options={exclude: a}" in next(resource_warnings.slow_rank(found))[1]
    found.nodes = dict.fromkeys(NODES, "a")
    assert next(resource_warnings.slow_rank(found))[1].endswith("a slow disk on a")


@pytest.mark.parametrize(
    ("waiting", "environments", "rank", "says"),
    [
        ([0.6, 0.7, 0.1, 0.1], 0.0, 1, "cluster.generate more nodes"),
        ([0.8, 0.7, 0.6, 0.6], 0.5, 0, "wait 50% for environments"),
        ([0.8, 0.7, 0.6, 0.6], 0.1, 0, "max_trajectory_age_steps"),
        ([0.1, 0.1, 0.9, 0.7], 0.1, 2, "cluster.train more nodes"),
    ],
)
def test_a_starved_queue_is_told_where_engines_run_ahead(waiting, environments, rank, says):
    values = HEALTHY | {"waiting": waiting, "environments": environments}
    ((found, message),) = resource_warnings.starved_queue(history(values, ahead=True))
    assert found == rank and says in message
    assert warned(resource_warnings.starved_queue, history(values)) == [], "components take turns"


def test_engines_that_wait_for_environments_do_not_wait_for_training():
    values = HEALTHY | {"waiting": [0.1, 0.1, 0.9, 0.9], "environments": 0.8}
    assert warned(resource_warnings.starved_queue, history(values, ahead=True)) == []


def test_a_leak_that_ends_the_run_is_told_with_its_step():
    leak = [1.0, 1.0, 1.0, lambda step: 1 + 0.05 * step]
    found = history({"children_gb": leak}, steps=40, max_steps=1000, node_memory_free_gb=5.0)
    ((rank, message),) = resource_warnings.host_leak(found)
    assert rank == 3 and "50 MB a step" in message and "at about step 141" in message and "environments" in message
    assert (
        warned(resource_warnings.host_leak, history({"children_gb": leak}, steps=40, max_steps=140, node_memory_free_gb=5.0))
        == []
    )
    both = history({"children_gb": leak, "rss_gb": [1.0, 1.0, leak[3], 1.0]}, steps=40, node_memory_free_gb=2.0)
    assert "at about step 61" in next(resource_warnings.host_leak(both))[1], "two leaks of a node add up"


def test_a_leak_of_gpu_memory():
    leak = [1.0, lambda step: 1 + 0.1 * step, 1.0, 1.0]
    ((rank, message),) = resource_warnings.gpu_leak(history({"gpu_memory_gb": leak}, steps=40, gpu_memory_free_gb=3.0))
    assert rank == 1 and "100 MB a step" in message and "step 71" in message
