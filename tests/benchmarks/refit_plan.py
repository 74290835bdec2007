"""Plan refits of models and runs too large for this machine, on one core: seconds, memory, distance from the floor.

Each case is planned in a process of its own, since memory is that process's peak; what it takes before planning counts.
"record" is the time to record every rank's boxes in one process, in whose place a run has its ranks: minutes with experts;
"plan" is what a run waits for; "rank" makes one rank's own list. The floor is the larger of what a generate rank wants and what
train ranks must send, as far as only they hold it. "waits" is the sum over rounds of the busiest rank's bytes in each, over the
busiest rank's bytes in all: 1 if nobody ever waits for another.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from pipeline.config.cluster import NetworkConfig

BUCKET_BYTES = 256 << 20
RANKS_PER_NODE = 8


@dataclass(frozen=True)
class Case:
    name: str
    model: str  # in recipes/models
    train: int  # ranks, each of which holds other boxes or has other data
    copies: int  # data-parallel copies of these ranks
    generate: int
    pipeline: int
    keys: tuple[str, ...]  # further keys of policy.megatron_cfg and of policy.generation.vllm_cfg, without these sections


_LLAMA, _QWEN = "meta-llama/Llama-3.3-70B-Instruct", "Qwen/Qwen3-235B-A22B"
_DEEPSEEK, _KIMI = "unsloth/DeepSeek-V3-bf16", "unsloth/Kimi-K2-Instruct-BF16"
_TENSOR_8 = ("tensor_model_parallel_size=4", "tensor_parallel_size=8")
_FIRST_AND_LAST = ("num_layers_in_first_pipeline_stage=3", "num_layers_in_last_pipeline_stage=2")
_CUT = ("expert_model_parallel_size=16", *_FIRST_AND_LAST, "tensor_parallel_size=32")
_SPREAD = (*_CUT, "expert_parallel_size=32")
_OF_QWEN = ("expert_model_parallel_size=8", "num_layers_in_first_pipeline_stage=11", "num_layers_in_last_pipeline_stage=11")
CASES = (
    Case("Llama-70B, tp8", _LLAMA, 16, 4, 64, 4, _TENSOR_8),
    Case("Qwen3-235B, tp8", _QWEN, 64, 2, 128, 8, (*_TENSOR_8, *_OF_QWEN)),
    Case("DeepSeek-V3, tp32 ep32", _DEEPSEEK, 256, 1, 256, 16, _SPREAD),
    Case("DeepSeek-V3, tp32 ep32", _DEEPSEEK, 256, 8, 1024, 16, _SPREAD),
    Case("DeepSeek-V3, tp32", _DEEPSEEK, 256, 8, 1024, 16, _CUT),
    Case("Kimi-K2, tp32 ep32", _KIMI, 256, 8, 1024, 16, _SPREAD),
)


def measure(case: Case) -> dict[str, Any]:
    """Plan it in this process."""
    from launch.plan_refit import PlanRefitRequest, load, recorded
    from launch.recipes.model_files import planning_config
    from pipeline.refit.plan import schedule

    megatron = [f"policy.megatron_cfg.{key}" for key in case.keys if not key.startswith(("tensor_parallel", "expert_parallel"))]
    vllm = [f"policy.generation.vllm_cfg.{key}" for key in case.keys if key.startswith(("tensor_parallel", "expert_parallel"))]
    nodes = {"train": case.train, "generate": case.generate}
    keys = [f"cluster.{realm}.nodes={count // RANKS_PER_NODE}" for realm, count in nodes.items()]
    keys += [f"cluster.{realm}.ranks_per_node={RANKS_PER_NODE}" for realm in nodes]
    keys += [f"policy.model_name={case.model}", "policy.precision=bfloat16", "policy.megatron_cfg.enabled=true", "needs=[]"]
    keys += [f"policy.megatron_cfg.pipeline_model_parallel_size={case.pipeline}", *megatron, *vllm]
    recipe, _ = load(PlanRefitRequest("tiny_grpo", keys), None)
    model = planning_config(recipe.policy)
    assert model is not None
    began = time.perf_counter()
    sides = recorded(recipe, model)
    told = time.perf_counter()
    before = _peak()
    stage = case.train // case.pipeline  # ranks of a pipeline stage, which have consecutive numbers
    count, more = case.train * case.copies, case.train * (case.copies - 1)
    train = {rank: sides.train[rank // (stage * case.copies) * stage + rank % stage] for rank in range(count)}
    generate = {rank + more: table for rank, table in sides.generate.items()}
    engines = [[rank + more for rank in engine] for engine in sides.engines]
    names = {rank: f"node{rank // RANKS_PER_NODE}" for rank in range(count + case.generate)}
    made = schedule(train, generate, engines, sides.shapes, 2, BUCKET_BYTES, names, NetworkConfig())
    planned = time.perf_counter()
    peak = _peak()
    rank_plans = [made.rank(rank) for rank in (0, count)]
    one = (time.perf_counter() - planned) / len(rank_plans)
    sums = made.traffic()
    busiest = max(found.sum(0).max() for found in sums)
    return {
        "record": told - began,
        "plan": planned - told,
        "rank": one,
        "before": before,
        "peak": peak,
        "flows": int(made.source.size),
        "groups": len(made.groups),
        "rounds": made.rounds,
        "busiest": busiest / 1e9,
        "floor": busiest / made.lower_bound_bytes,
        "waits": sum(max(one.max(), other.max()) for one, other in zip(*sums, strict=True)) / busiest,
    }


def _peak() -> float:
    """GB"""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


COLUMNS = {  # title: (format, what)
    "record s": ("11.1f", "record"),
    "plan s": ("8.2f", "plan"),
    "rank s": ("8.3f", "rank"),
    "before GB": ("11.2f", "before"),
    "peak GB": ("9.2f", "peak"),
    "flows": ("11,d", "flows"),
    "groups": ("8d", "groups"),
    "rounds": ("8d", "rounds"),
    "busiest GB": ("12.2f", "busiest"),
    "/ floor": ("9.3f", "floor"),
    "waits": ("7.2f", "waits"),
}


def run() -> None:
    """Print a row for each case."""
    print(f"{'model, engine':24s}{'ranks':>14s}" + "".join(f"{title:>{_width(form)}s}" for title, (form, _) in COLUMNS.items()))
    for i, case in enumerate(CASES):
        command = [sys.executable, "-m", "tests.benchmarks.refit_plan", str(i)]
        found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.splitlines()[-1])
        values = "".join(format(found[name], form) for form, name in COLUMNS.values())
        print(f"{case.name:24s}{f'{case.train} -> {case.generate}':>14s}{values}", flush=True)


def _width(form: str) -> int:
    return int(form.rstrip("df").split(".")[0].rstrip(","))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(CASES[int(sys.argv[1])])))
    else:
        run()
