"""The catalogue of readings. A level is a value at one moment. A counter only grows, and its rate is reported."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of a sample."""

    meaning: str
    counter: bool = False
    shown: bool = True  # whether metrics.jsonl has it, as min, mean and max over ranks
    averaged: bool = False  # a level whose mean over a step's samples counts, not its last value


GB = 1e9
RATE = True
READINGS: dict[str, Reading] = {
    # a rank's process and its children, such as the process of its environments
    "rss_gb": Reading("host memory of the rank's process, GB"),
    "children_gb": Reading("host memory of the process's descendants, such as environments, GB"),
    "cpu": Reading("CPU cores that the process and its descendants use", RATE),
    "waiting": Reading("share of time without work: no verb, waiting, or only environments work", RATE),
    "environments": Reading("part of waiting: only environments work", RATE),
    "collective": Reading("share of time that the main thread is blocked in a collective, by samples of its stack", RATE),
    # its node
    "node_memory": Reading("share of the node's or the cgroup's host memory in use"),
    "node_memory_free_gb": Reading("host memory that is still available, GB", shown=False),
    "node_cpu": Reading("share of the node's CPU cores that are busy", RATE),
    "disk": Reading("share of the run folder's file system in use"),
    "disk_free_gb": Reading("free space on the run folder's file system, GB", shown=False),
    "nic_gb_per_s": Reading("bytes that the node's NICs send and receive, GB/s", RATE),
    # its GPU
    "gpu_index": Reading("NVML's index of the rank's GPU", shown=False),
    "gpu_util": Reading("share of time in which the GPU ran any kernel", averaged=True),
    "gpu_memory_gb": Reading("GPU memory in use, by all processes, GB"),
    "gpu_memory_free_gb": Reading("free GPU memory, GB", shown=False),
    "torch_allocated_gb": Reading("GPU memory of this process's tensors, GB"),
    "torch_reserved_gb": Reading("GPU memory that torch's allocator holds, GB"),
    "power_w": Reading("power, W", averaged=True),
    "energy_j": Reading("energy since the driver was loaded, J", RATE, shown=False),
    "temperature_c": Reading("temperature, degrees C", averaged=True),
    "sm_clock_mhz": Reading("clock of the multiprocessors, MHz", averaged=True),
    "throttled": Reading("1 if heat or power slows the clocks down, else 0", averaged=True),
    "throttle_bits": Reading("NVML's clock event reasons, as bits", shown=False),
    "nvlink_gb_per_s": Reading("bytes over NVLink in both directions, GB/s", RATE),
    # its engine
    "kv_cache": Reading("share of the KV cache in use", averaged=True),
    "running": Reading("requests that the engine decodes", averaged=True),
    "queued": Reading("requests that wait in the engine", averaged=True),
    "engine_steps": Reading("steps of the engine", RATE, shown=False),
    "engine_s": Reading("share of time in the engine's steps", RATE, shown=False),
    "prefix_queries": Reading("tokens looked up in the prefix cache", RATE, shown=False),
    "prefix_hits": Reading("tokens found there", RATE, shown=False),
    "preemptions": Reading("requests preempted because the KV cache was full", RATE, shown=False),
}
AVERAGED = frozenset(name for name, reading in READINGS.items() if reading.averaged)
COUNTERS = frozenset(name for name, reading in READINGS.items() if reading.counter)
Sample = dict[str, float]
"""Name -> reading. A sampler adds `at`, its monotonic clock in seconds; `count`, the number of its samples so far; and
`sum:NAME`, the sum of the level NAME over these samples, for each level that is averaged."""
TAKEN, COUNT, SUM = "at", "count", "sum:"
