"""Profile our step's CPU time: torch's operators, then Python's functions.

`python -m tests.benchmarks.profile CASE FOLDER BACKEND`, by way of `python -m tests.benchmarks profile CASE --backend BACKEND`.
A backend that samples (transformers, vllm): rollout and training apart. One that trains (fsdp, megatron): a packed step of it.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.cases import CASES
from tests.benchmarks.our_step import OurStep, join_alone
from tests.benchmarks.train_step import TRAIN_BACKENDS, TrainStep

_ROWS = 20


def main(name: str, folder: str, backend: str) -> None:
    """Profile one step with each profiler, since both together would measure each other."""
    case = CASES[name]
    join_alone()
    if backend in TRAIN_BACKENDS:
        trained = TrainStep(case, Path(folder), backend, "packed")
        for _ in range(case.warmup):
            trained.step()
        for profiled in (_operators, _functions):
            profiled(f"{case.name}, {backend}, training", trained.step)
        return
    ours = OurStep(case, Path(folder), backend, case.packed_tokens)
    for _ in range(case.warmup):
        ours.step()
    for profiled in (_operators, _functions):
        groups = profiled(f"{case.name}, {backend}, rollout", ours.rollout)
        profiled(f"{case.name}, {backend}, training and refit", lambda groups=groups: ours.learn(groups))


def _operators(title: str, work: Callable[[], Any]) -> Any:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        result = work()
    table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=_ROWS, max_name_column_width=50)
    print(f"\n{title}: operators\n{table}")
    return result


def _functions(title: str, work: Callable[[], Any]) -> Any:
    profiler = cProfile.Profile()
    result = profiler.runcall(work)
    print(f"\n{title}: functions")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(_ROWS)
    return result


if __name__ == "__main__":
    main(*sys.argv[1:])
