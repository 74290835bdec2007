"""Plan refits of models and runs too large for this machine, on one core: seconds, memory, distance from the floor.

Each case is planned in a process of its own, since memory is that process's peak; what it takes before planning counts.
"layouts" is the time that `launch.plan.refit_layouts` takes to tell every rank's boxes from the config, in whose place a run
has its backends; "plan" is what a run waits for; "rank" makes one rank's own list. The floor is the larger of what a generate
rank wants and what train ranks must send, as far as only they hold it. "waits" is the sum over rounds of the busiest rank's
bytes in each, over the busiest rank's bytes in all: 1 if nobody ever waits for another.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from pipeline.config import GenerationConfig, MegatronConfig, PolicyConfig, VLLMConfig
from pipeline.config.cluster import NetworkConfig

BUCKET_BYTES = 256 << 20
RANKS_PER_NODE = 8

# From their config.json on Hugging Face; K2 is moonshotai/Kimi-K2-Instruct as transformers' DeepseekV3.
LLAMA_70B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
QWEN3_235B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "tie_word_embeddings": False,
}
KIMI_K2 = {
    **DEEPSEEK_V3,
    "vocab_size": 163840,
    "first_k_dense_replace": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
}


@dataclass(frozen=True)
class Case:
    name: str
    config: dict[str, Any]
    train: int  # ranks
    generate: int
    megatron: dict[str, int]  # keys of policy.megatron_cfg
    vllm: VLLMConfig


def _megatron(tensor: int, pipeline: int, expert: int = 1, first: int | None = None, last: int | None = None) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "expert_model_parallel_size": expert,
        "num_layers_in_first_pipeline_stage": first,
        "num_layers_in_last_pipeline_stage": last,
    }


_CUT, _SPREAD = VLLMConfig(tensor_parallel_size=32), VLLMConfig(tensor_parallel_size=32, expert_parallel_size=32)
CASES = (
    Case("Llama-70B, tp8", LLAMA_70B, 64, 64, _megatron(4, 4), VLLMConfig(tensor_parallel_size=8)),
    Case("Qwen3-235B, tp8", QWEN3_235B, 128, 128, _megatron(4, 8, 8, 11, 11), VLLMConfig(tensor_parallel_size=8)),
    Case("DeepSeek-V3, tp32 ep32", DEEPSEEK_V3, 256, 256, _megatron(1, 16, 16, 3, 2), _SPREAD),
    Case("DeepSeek-V3, tp32 ep32", DEEPSEEK_V3, 2048, 1024, _megatron(1, 16, 64, 3, 2), _SPREAD),
    Case("DeepSeek-V3, tp32", DEEPSEEK_V3, 2048, 1024, _megatron(2, 16, 64, 3, 2), _CUT),
    Case("Kimi-K2, tp32 ep32", KIMI_K2, 2048, 1024, _megatron(1, 16, 64, 3, 2), _SPREAD),
    Case("Kimi-K2, tp32", KIMI_K2, 2048, 1024, _megatron(1, 16, 64, 3, 2), _CUT),
)


def measure(case: Case) -> dict[str, Any]:
    """Plan it in this process."""
    from launch.plan.refit_layouts import rank_layouts
    from pipeline.refit.plan import schedule

    policy = PolicyConfig(
        megatron_cfg=MegatronConfig(enabled=True, **case.megatron),
        generation=GenerationConfig(vllm_cfg=case.vllm),
    )
    began = time.perf_counter()
    owners = rank_layouts(case.config, policy, case.train, case.generate)
    told = time.perf_counter()
    before = _peak()
    nodes = {rank: f"node{rank // RANKS_PER_NODE}" for rank in range(case.train + case.generate)}
    made = schedule(owners.train, owners.generate, owners.engines, owners.shapes, 2, BUCKET_BYTES, nodes, NetworkConfig())
    planned = time.perf_counter()
    peak = _peak()
    rank_plans = [made.rank(rank) for rank in (0, case.train)]
    one = (time.perf_counter() - planned) / len(rank_plans)
    sums = made.traffic()
    busiest = max(found.sum(0).max() for found in sums)
    return {
        "layouts": told - began,
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
    "layouts s": ("11.1f", "layouts"),
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
