"""Compute how many sequences an engine decodes at once, and the tokens of its largest batch, as vLLM 0.32 chooses them.

Both numbers follow two functions of vllm/engine/arg_utils.py: `get_batch_defaults`, which depends on the GPU's memory and name
and on the usage that `pipeline.generate.vllm` names, and `_set_default_max_num_seqs_and_batched_tokens_args`. On a CPU,
`pipeline.generate.vllm` sets the number of tokens. During a run, the engine itself reports how many sequences it decodes.
"""

from __future__ import annotations

from typing import Any

from pipeline.config import Recipe, engine_ranks
from pipeline.config.generation import MOST_SEQUENCES
from pipeline.config.hardware import memory_gb
from pipeline.models.shape import ModelShape

GIB = 2**30
LARGE, MIDDLE = 160, 70  # GiB of a GPU (vllm/engine/arg_utils.py)
OF_CPUS = 256, 4096  # sequences and tokens of each rank (vllm/engine/arg_utils.py)


def engine_sizes(recipe: Recipe, shape: ModelShape) -> tuple[int, int]:
    """Return (sequences that an engine decodes at once, tokens of its largest batch)."""
    generation = recipe.policy.generation
    if generation.backend == "transformers":
        return generation.max_num_seqs or MOST_SEQUENCES, 0
    kwargs, longest = generation.vllm_kwargs, generation.vllm_cfg.max_model_len
    configured = generation.max_num_seqs or (MOST_SEQUENCES if shape.state_layers else None)
    sequences, tokens = _defaults(recipe)
    doubled = 2 if kwargs.get("performance_mode") == "throughput" else 1
    most = configured or doubled * sequences
    if not recipe.cluster.generate.gpus_per_node:
        batched = max(longest, configured or sequences, 4096)
    else:
        longest_prompt = longest if kwargs.get("enable_chunked_prefill") is False else 0  # prompts are not cut
        batched = min(most * longest, max(longest_prompt, doubled * tokens))
    batched = _number(kwargs.get("max_num_batched_tokens"), batched)
    return most if configured else min(most, batched), batched


def _defaults(recipe: Recipe) -> tuple[int, int]:
    """Return vLLM's defaults of (sequences that an engine decodes at once, tokens of its largest batch)."""
    component = recipe.cluster.generate
    if not component.gpus_per_node:
        ranks = engine_ranks(recipe.policy.generation.vllm_cfg)
        return ranks * OF_CPUS[0], ranks * OF_CPUS[1]
    memory = memory_gb(component) * 1e9 / GIB
    large = memory >= LARGE or (memory >= MIDDLE and "a100" not in component.gpu.lower())
    return (1024, 16384) if large else (256, 8192)


def _number(value: Any, default: int) -> int:
    """Return a value of vllm_kwargs as an integer; `default` if it is not a number. null stands for vLLM's own default."""
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else default
