"""Warnings about resources: each check is one small function that reads the history, and one line in a registry.

A check yields (rank, message); the message names the problem, the rank where it is, and a remedy.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from pipeline.monitor.gpu import reasons
from pipeline.monitor.history import History

Finding = tuple[int, str]
Check = Callable[[History], Iterator[Finding]]

SLOW = 1.3
"""A rank is slow if it works longer than this times the median of its peers."""
SLOW_ENGINE = 1.5
WAITED_FOR = 0.15
"""Share of time that the peers of a slow rank wait in collectives, on average."""
SLOW_CLOCK = 0.9
THROTTLED = 0.5
"""Least share of samples with a slowed clock that counts as throttling."""
STARVED, BUSY = 0.5, 0.3
"""Least share of time that a starved component waits, and most share that the component which starves it waits."""
FULL = 0.95
LEAST_FREE_GB = 2.0
LEAST_LEAK_GB = 0.1
"""A memory that grows less over half of a run does not count as a leak."""
FAR = 10
"""If a run has no last step, a leak counts if memory is full within FAR times the steps so far."""


def slow_rank(history: History) -> Iterator[Finding]:
    """Find a train or reward rank that works longer than its peers, which wait for it in collectives."""
    for name in ("train", "reward"):
        ranks = history.components.get(name, ())
        waiting = history.mean("waiting", ranks)
        blocked = history.mean("collective", ranks)
        work = {rank: max(0.0, 1 - share - blocked[rank]) for rank, share in waiting.items() if rank in blocked}
        for rank, usual in _above_peers(work, SLOW):
            if statistics.fmean(blocked[peer] for peer in work if peer != rank) > WAITED_FOR + blocked[rank]:
                message = (
                    f"{history.describe(rank)} computes {work[rank] / usual:.1f} times as long as its peers, which wait for it."
                    f" Look for other processes, a lower clock or a slow disk on {_or_leave_out(history, rank)}"
                )
                yield rank, message


def slow_engine(history: History) -> Iterator[Finding]:
    """Find an engine whose steps take longer than the steps of the other engines."""
    leaders = [engine[0] for engine in history.engines]
    counts, busy = (history.mean(name, leaders) for name in ("engine_steps", "engine_s"))
    seconds = {rank: busy[rank] / count for rank, count in counts.items() if count > 0 and rank in busy}
    for rank, usual in _above_peers(seconds, SLOW_ENGINE):
        message = (
            f"{history.describe(rank)} takes {1e3 * seconds[rank]:.1f} ms for a step of its engine; its peers take"
            f" {1e3 * usual:.1f} ms. Look for other processes or a lower clock on {_or_leave_out(history, rank)}"
        )
        yield rank, message


def _or_leave_out(history: History, rank: int) -> str:
    """Return the name of a rank's node and, if there are others, how to run without it."""
    node = history.nodes.get(rank, "its node")
    other_nodes = set(history.nodes.values()) - {node}
    return f"{node}, or leave the node out: cluster.sbatch_options={{exclude: {node}}}" if other_nodes else node


def _above_peers(values: dict[int, float], factor: float) -> Iterator[tuple[int, float]]:
    """Yield (rank, lower median of all ranks) for each rank above `factor` times this median; of two ranks it is the lower."""
    usual = statistics.median_low(values.values()) if len(values) > 1 else 0.0
    if usual > 0:
        yield from ((rank, usual) for rank, value in values.items() if value > factor * usual)


def slow_gpu(history: History) -> Iterator[Finding]:
    """Find a busy GPU whose clock is below the clocks of its peers."""
    for ranks in history.components.values():
        clocks, busy = (history.mean(name, ranks) for name in ("sm_clock_mhz", "gpu_util"))
        clocks = {rank: clock for rank, clock in clocks.items() if busy.get(rank, 0.0) > 0.5}
        usual = statistics.median_high(clocks.values()) if clocks else 0.0
        for rank, clock in clocks.items():
            if clock < SLOW_CLOCK * usual:
                message = (
                    f"the GPU of {history.describe(rank)} runs at {clock:.0f} MHz, its peers at {usual:.0f} MHz. Check its"
                    f" cooling and its power limit (nvidia-smi -q -d PERFORMANCE) on {_or_leave_out(history, rank)}"
                )
                yield rank, message


def throttling(history: History) -> Iterator[Finding]:
    """Find a GPU whose clock heat or power limits."""
    for ranks in history.components.values():
        for rank, share in history.mean("throttled", ranks).items():
            if share >= THROTTLED:
                why = ", ".join(reasons(history.now[rank].get("throttle_bits", 0))) or "no reason at this moment"
                message = (
                    f"the GPU of {history.describe(rank)} is throttled in {share:.0%} of the samples ({why}). Check its cooling"
                    " and its power limit: nvidia-smi -q -d PERFORMANCE"
                )
                yield rank, message


def host_leak(history: History) -> Iterator[Finding]:
    """Find host memory that grows steadily, so that it is full before the run ends."""
    for node in sorted(set(history.nodes.values())):
        here = [rank for rank, host in history.nodes.items() if host == node]
        free = [history.now[rank]["node_memory_free_gb"] for rank in here if "node_memory_free_gb" in history.now.get(rank, {})]
        slopes = {
            (rank, name): slope
            for rank in here
            for name in ("rss_gb", "children_gb")
            if (rank, name) in history.growth and (slope := history.growth[rank, name].slope(LEAST_LEAK_GB)) is not None
        }
        if not (free and slopes and (ends := _ends(history, min(free), sum(slopes.values())))):
            continue
        rank, name = max(slopes, key=slopes.__getitem__)
        whose = "its process" if name == "rss_gb" else "the processes that it started, such as environments"
        message = (
            f"host memory of {history.describe(rank)} grows by {1e3 * slopes[rank, name]:.3g} MB a step, in {whose}: the node's"
            f" memory ({min(free):.3g} GB free) is full at about step {ends}. Look for what a reward function or an environment"
            " keeps between calls; a restart from a checkpoint frees it"
        )
        yield rank, message


def gpu_leak(history: History) -> Iterator[Finding]:
    """Find GPU memory that grows steadily, so that it is full before the run ends."""
    for (rank, name), growth in history.growth.items():
        free = history.now[rank].get("gpu_memory_free_gb")
        if name != "gpu_memory_gb" or free is None or (slope := growth.slope(LEAST_LEAK_GB)) is None:
            continue
        if ends := _ends(history, free, slope):
            message = (
                f"GPU memory of {history.describe(rank)} grows by {1e3 * slope:.3g} MB a step: the GPU ({free:.3g} GB free) is"
                f" full at about step {ends}. Compare resources/*_torch_allocated_gb with torch_reserved_gb. If only"
                " torch_reserved_gb grows, memory is fragmented: check that PYTORCH_ALLOC_CONF has"
                " expandable_segments:True there"
            )
            yield rank, message


def _ends(history: History, free_gb: float, gb_per_step: float) -> int | None:
    """Return the step at which memory is full; None if the run ends before."""
    step = history.step
    ends = step + free_gb / gb_per_step
    return round(ends) if ends < (history.max_steps or FAR * step) else None


def starved_queue(history: History) -> Iterator[Finding]:
    """Find train ranks that wait for generate ranks, or the reverse, in runs in which both should work at the same time."""
    if not history.runs_ahead or not {"train", "generate"} <= history.components.keys():
        return
    shares = {name: history.mean("waiting", ranks) for name, ranks in history.components.items()}
    train, generate = shares["train"], shares["generate"]
    if not (train and generate):
        return
    trains, samples = statistics.fmean(train.values()), statistics.fmean(generate.values())
    outside = statistics.fmean(history.mean("environments", generate).values() or [0.0])
    waits = f"train ranks wait {trains:.0%} of the time, generate ranks {samples:.0%}"
    if trains > STARVED:
        rank = max(train, key=train.__getitem__)
        if outside > BUSY:
            cure = f"the engines wait {outside:.0%} for environments. Speed them up, or raise policy.generation.max_num_seqs"
        elif samples < BUSY:
            cure = "give cluster.generate more nodes, or cluster.train fewer"
        else:
            cure = "engines wait because of the bound on age. Raise max_trajectory_age_steps of asynchronous generation"
        yield rank, f"{waits}: {history.describe(rank)} waits for rollouts; {cure}"
    elif samples - outside > STARVED and trains < BUSY:
        rank = max(generate, key=generate.__getitem__)
        yield (
            rank,
            f"{waits}: {history.describe(rank)} waits for training; give cluster.train more nodes, or cluster.generate fewer",
        )


def full_cache(history: History) -> Iterator[Finding]:
    """Find an engine that preempts requests because its KV cache is full."""
    leaders = [engine[0] for engine in history.engines]
    use = history.mean("kv_cache", leaders)
    for rank, rate in history.mean("preemptions", leaders).items():
        if rate > 0 and use.get(rank, 0.0) > 0.8:
            message = (
                f"the engine of {history.describe(rank)} preempts requests, {60 * rate:.1f} a minute, because its KV cache is"
                " full. Lower policy.generation.max_num_seqs, or raise vllm_cfg.gpu_memory_utilization"
            )
            yield rank, message


def full_memory(history: History) -> Iterator[Finding]:
    """Find a node whose host memory is nearly full."""
    for rank, sample in history.now.items():
        if sample.get("node_memory", 0.0) > FULL and sample["node_memory_free_gb"] < 4 * LEAST_FREE_GB:
            message = (
                f"host memory of {history.nodes.get(rank)} is {sample['node_memory']:.1%} full,"
                f" {sample['node_memory_free_gb']:.2g} GB are free, as {history.describe(rank)} sees it."
                " Use fewer ranks on a node, or more memory: cluster.COMPONENT.mem"
            )
            yield rank, message


def full_disk(history: History) -> Iterator[Finding]:
    """Find a node on which the file system of the run folder is nearly full."""
    for rank, sample in history.now.items():
        if sample.get("disk", 0.0) > FULL and sample["disk_free_gb"] < LEAST_FREE_GB:
            message = (
                f"the run folder's file system is {sample['disk']:.1%} full, {sample['disk_free_gb']:.2g} GB are free, as"
                f" {history.describe(rank)} sees it. Free space, or keep fewer checkpoints: checkpointing.keep_top_k"
            )
            yield rank, message
            return  # all ranks share it


AFTER_A_STEP: tuple[Check, ...] = (
    slow_rank,
    slow_engine,
    slow_gpu,
    throttling,
    host_leak,
    gpu_leak,
    starved_queue,
    full_cache,
)
"""Checks after each step."""
AT_ANY_TIME: tuple[Check, ...] = (full_memory, full_disk)
"""Checks of the latest samples, which also run during a step."""
