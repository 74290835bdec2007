"""Estimate the memory of a generate rank: weights, vLLM's reserve, and the remaining KV cache.

On a GPU, vLLM 0.32 takes the share gpu_memory_utilization of the whole memory, in addition to the memory that the process has
taken before: CUDA's context and NCCL's communicators (vllm/v1/worker/gpu_worker.py, init_device). It profiles a forward pass of
max_num_batched_tokens and a sampler of max_num_seqs rows, estimates its CUDA graphs (determine_available_memory in the same
file), and gives the rest of its share to the KV cache. The refit's staging is allocated later, outside of this share. On a CPU
the cache has the size that `pipeline.generate.vllm` sets.

If there are fewer key-value heads than tensor-parallel ranks, several ranks hold the same keys and values. All ranks hold
latents (MLA). A sequence takes cache for all its tokens, in layers with a sliding window only for the window's tokens, and
takes the states of its Mamba layers. `engine_sizes` follows `get_batch_defaults` and
`_set_default_max_num_seqs_and_batched_tokens_args` of vllm/engine/arg_utils.py.

Not counted: other quantization in vllm_kwargs, speculative decoding, blocks that vLLM leaves partly empty, environments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from launch.plan.activations import latent_projections
from launch.plan.memory_parts import RUNTIME, GenerateMemory, add_parts
from pipeline.config import PRECISIONS, Problem, Recipe, engine_ranks, refits_by_ipc, refuse, trains
from pipeline.config.generation import MOST_SEQUENCES
from pipeline.config.hardware import memory_gb
from pipeline.models.mixers import kept_bytes
from pipeline.models.shape import ModelShape

ROOM = 0.8  # share of a GPU for an engine's weights, as is assumed for advice; the rest holds a KV cache
BLOCK = {True: 16, False: 128}  # tokens of a block of the KV cache, on a GPU and on a CPU (vllm/platforms/cpu.py)
CPU_CACHE_BYTES = 4 << 30  # at most, unless one sequence needs more: pipeline/generate/vllm.py
VOCABULARY_PADDING = 64  # vllm/model_executor/layers/vocab_parallel_embedding.py
SAMPLER_COPIES = 6
"""Copies of float32 logits in the profiled sampler: sorted values, 64-bit indices, probabilities, sums, a mask
(vllm/v1/sample/ops/topk_topp_sampler.py)."""
GRAPHS = 1.0 * 2**30
"""Bytes for CUDA graphs, if enforce_eager is not set. Assumed, between two figures that vLLM reported: 1.40 GiB for Llama 4
Maverick on 8 H100 (SGLang issue 8538), and 0.36 GiB for graphs of up to 16 sequences (github.com/gpustack/runner/pull/251)."""
FP8_BYTES = 1 + 4 / 128**2  # of a weight, with a float32 scale for 128 x 128 of them (pipeline/generate/vllm.py)
CACHE_BYTES = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}  # bytes of an element, by vllm_kwargs.kv_cache_dtype
STATE_BYTES = {"float16": 2, "bfloat16": 2}  # of an element of a state, by vllm_kwargs.mamba_ssm_cache_dtype; else float32
NEIGHBOUR_BYTES = 32 * 9.63e6
"""Bytes on a GPU for NCCL's 32 channels from another rank of its node, if all ranks are on one node: buffers of its three
protocols (computeBuffSizes in src/init.cc of NCCL 2.30.7; p2pRecvSetup in src/transport/p2p.cc). Counted, not measured."""
LARGE, MIDDLE = 160, 70  # GiB of a GPU (vllm/engine/arg_utils.py)
OF_CPUS = 256, 4096  # sequences and tokens of each rank (vllm/engine/arg_utils.py)
SIZES = ("max_num_batched_tokens", "kv_cache_memory_bytes")


@dataclass(frozen=True)
class EngineRank:
    """The fullest rank of an engine."""

    shape: ModelShape
    size: int  # bytes of an element
    tensor: int
    stages: int
    spreads_experts: bool
    fp8: bool = False  # whether the linear layers are in FP8

    @property
    def layers(self) -> int:
        """Return the number of layers of the largest stage."""
        return -(-self.shape.layers // self.stages)

    @property
    def cache_elements(self) -> float:
        """Return the number of elements of KV cache that a rank holds for each token."""
        return -(-self.shape.attention_layers // self.stages) * self.shape.rank_kv_width(self.tensor)

    def state_bytes(self, state_size: int) -> float:
        """Return the bytes of a sequence's states on this rank. state_size: the bytes of an element of a head's state."""
        if self.shape.state is None:
            return 0.0
        return -(-self.shape.state_layers // self.stages) * kept_bytes(self.shape.state, self.size, state_size) / self.tensor

    @property
    def rows(self) -> int:
        """Return the number of rows of the padded vocabulary on this rank."""
        return -(-(-(-self.shape.vocabulary // VOCABULARY_PADDING) * VOCABULARY_PADDING) // self.tensor)

    @property
    def linear(self) -> float:
        """Return a rank's number of parameters of attention, MLP and experts, in the stage with the most layers."""
        shape, tensor = self.shape, self.tensor
        copied = (tensor - 1) * latent_projections(shape)
        if not shape.latent and shape.kv_heads < tensor:
            copied += shape.hidden * (shape.head_dim + shape.value_dim) * (tensor - shape.kv_heads)
        whole = shape.attention + shape.mlp + shape.routed + shape.attention_layers * copied
        return whole / tensor * self.layers / shape.layers

    @property
    def parameters(self) -> float:
        """Return the number of all parameters on this rank.

        Tensor parallelism divides the embedding and the head, but not norms and routers.
        """
        shape = self.shape
        ends = 1 if shape.tied or self.stages > 1 else 2  # the first stage has the embedding, the last one the head
        embeddings = ends * self.rows * shape.hidden + shape.tables / self.tensor
        return self.linear + self.layers / shape.layers * shape.other + embeddings

    @property
    def received(self) -> float:
        """Return the bytes of weights that the rank receives in a refit, before quantization."""
        return self.size * self.parameters

    @property
    def weights(self) -> float:
        """Return the bytes of weights on this rank, after quantization."""
        return self.received - (self.size - FP8_BYTES) * self.linear * self.fp8

    def working(self, tokens: int, sequences: int) -> float:
        """Return the peak bytes of activations in the profiled pass: of one layer or of the sampler, whichever is more."""
        shape, size = self.shape, self.size
        inner = 3 * (shape.dense_width / self.tensor)
        if shape.experts:
            experts = shape.expert_width / (1 if self.spreads_experts else self.tensor)
            shared = 3 * shape.shared_width / self.tensor
            inner = max(inner, shape.experts_per_token * (3 * experts + shape.hidden) + shared)
        queries = (shape.heads * shape.head_dim + shape.kv_heads * (shape.head_dim + shape.value_dim)) / self.tensor
        layer = tokens * size * (3 * shape.hidden + max(inner, 2 * queries))
        return max(layer, size * tokens * shape.hidden + sequences * shape.vocabulary * 4 * SAMPLER_COPIES)


def generate(recipe: Recipe, shape: ModelShape) -> GenerateMemory:
    """Return the memory of the fullest generate rank. Raises RecipeError for sizes in vllm_kwargs that are no such numbers."""
    policy, component = recipe.policy, recipe.cluster.generate
    size, cuda = PRECISIONS[policy.precision], component.gpus_per_node > 0
    if policy.generation.backend == "transformers":
        return _transformers(recipe, shape, size, cuda)
    vllm = policy.generation.vllm_cfg
    arguments = {key: value for key, value in policy.generation.vllm_kwargs.items() if value is not None}
    refuse(
        Problem(f"policy.generation.vllm_kwargs.{key}", "wrong-type", f"got {arguments[key]!r}; expected a number above 0")
        for key in SIZES
        if key in arguments and not _is_size(arguments[key])
    )
    ignored = vllm.quantization_ignored_layer_kws
    fp8, spread = vllm.precision == "fp8" and not ignored, vllm.expert_parallel_size > 1
    rank = EngineRank(shape, size, vllm.tensor_parallel_size, vllm.pipeline_parallel_size, spread, fp8)
    longest = vllm.max_model_len
    sequences, batched = engine_sizes(recipe, shape)
    parts = {"weights": rank.weights, "buffers": _staging(recipe, rank) + _connections(recipe)}
    uncounted = (
        "quantization_ignored_layer_kws" if ignored else "vllm_kwargs.quantization" if arguments.get("quantization") else ""
    )
    assumptions = [f"an engine's weights without quantization: the plan does not count {uncounted}"] if uncounted else []
    if cuda:
        budget = vllm.gpu_memory_utilization * memory_gb(component) * 1e9
        working = rank.working(batched, sequences)
        graphs = 0.0 if vllm.enforce_eager else GRAPHS
        cache = budget - rank.weights - working - graphs
        parts |= {"activations": working, "runtime": RUNTIME + graphs}
        assumptions.append(
            f"{RUNTIME / 2**30:g} GiB for CUDA's context and NCCL, {graphs / 2**30:g} GiB for CUDA graphs; a profiling pass of"
            f" {batched:,} tokens"
        )
    else:
        cache = _cpu_cache(rank, longest, sequences)
    cache = _number(arguments.get("kv_cache_memory_bytes"), cache)
    parts["KV cache"] = max(0.0, cache)
    token_bytes = rank.cache_elements * CACHE_BYTES.get(str(arguments.get("kv_cache_dtype")), size)
    block = BLOCK[cuda]
    tokens = (math.floor(cache / (token_bytes * block)) - 1) * block  # vLLM keeps one block for itself
    states = rank.state_bytes(STATE_BYTES.get(str(arguments.get("mamba_ssm_cache_dtype")), 4)) / token_bytes
    memory = GenerateMemory(add_parts(parts), rank.received, not uncounted, tokens, 0, tuple(assumptions), shape, states)
    return replace(memory, sequences=math.floor(memory.holds(-(-longest // block) * block)))


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
    memory = memory_gb(component) * 1e9 / 2**30
    large = memory >= LARGE or (memory >= MIDDLE and "a100" not in component.gpu.lower())
    return (1024, 16384) if large else (256, 8192)


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e300


def _number(value: Any, default: float) -> int:
    """Return a value of vllm_kwargs as an integer; `default` if it is not a number. null stands for vLLM's own default."""
    return int(value if isinstance(value, int | float) and not isinstance(value, bool) else default)


def weights_problems(recipe: Recipe, memory: GenerateMemory) -> Iterator[Problem]:
    """Yield a problem if the weights alone, counted exactly, exceed the memory of a generate rank's GPU."""
    component, size = recipe.cluster.generate, recipe.policy.generation.vllm_cfg.tensor_parallel_size
    weights, has = memory.parts.get("weights", 0.0) if memory.exact else 0.0, memory_gb(component)
    if component.gpus_per_node and weights > has * 1e9:
        message = (
            f"got {size}, with which the weights take {weights / 1e9:.4g} GB on a generate rank; expected at most the"
            f" {has:g} GB of its GPU (cluster.generate.gpu, gpu_memory_gb). Try"
            f" {2 ** math.ceil(math.log2(size * weights / (ROOM * has * 1e9)))}"
        )
        yield Problem("policy.generation.vllm_cfg.tensor_parallel_size", "out-of-memory", message)


def small_cache(recipe: Recipe, memory: GenerateMemory) -> str:
    """Return the warning for an engine whose KV cache may hold no sequence of max_model_len tokens."""
    longest = recipe.policy.generation.vllm_cfg.max_model_len
    return (
        f"an engine's KV cache may hold only {max(0.0, memory.tokens):,.0f} tokens; a sequence of"
        f" policy.generation.vllm_cfg.max_model_len has {longest:,}"
    )


def _cpu_cache(rank: EngineRank, longest: int, sequences: int) -> float:
    """Return the bytes of KV cache for all layers, as `_cpu_cache_bytes` of pipeline/generate/vllm.py computes them."""
    block_bytes = BLOCK[False] * rank.shape.attention_layers * rank.shape.rank_kv_width(rank.tensor) * rank.size
    blocks = -(-longest // BLOCK[False])
    return max(min((sequences * blocks + 1) * block_bytes, CPU_CACHE_BYTES), (blocks + 1) * block_bytes)


def _staging(recipe: Recipe, rank: EngineRank) -> float:
    """Return the bytes in which a generate rank stages a refit.

    These are two received rounds and one relayed round (`pipeline.refit.planned`), each at most a bucket, and at most the
    rank's weights; with IPC two relayed rounds and, if there are several nodes, two received rounds. A broadcast takes one
    bucket and one tensor. A delta refit also takes the rank's weights.
    """
    if not trains(recipe):
        return 0.0  # weights come from files
    generation = recipe.policy.generation
    bucket = generation.refit_cfg.bucket_bytes
    if generation.refit_transport == "broadcast":
        return bucket + rank.size * rank.shape.vocabulary * rank.shape.hidden
    base = rank.received if generation.refit_transport == "delta" else 0.0
    rounds = 3
    if refits_by_ipc(recipe):
        rounds = 2 if recipe.cluster.generate.nodes == 1 else 4
    return rounds * min(bucket, rank.received) + base


def _connections(recipe: Recipe) -> float:
    """Return the bytes of NCCL's buffers on a generate rank for a refit from train ranks of its node."""
    cluster = recipe.cluster
    shared = trains(recipe) and cluster.share_nodes and cluster.train.nodes == 1 and cluster.generate.gpus_per_node
    near = 1 if recipe.policy.generation.refit_transport == "broadcast" else cluster.train.gpus_per_node + 1
    return NEIGHBOUR_BYTES * near if shared else 0.0


def _transformers(recipe: Recipe, shape: ModelShape, size: int, cuda: bool) -> GenerateMemory:
    """Return the memory of a rank of the Transformers backend.

    It holds the whole model, and the KV cache of max_num_seqs sequences of the greatest length.
    """
    generation = recipe.policy.generation
    columns = -(-generation.vllm_cfg.max_model_len // 64) * 64  # pipeline/generate/kv_cache.py
    sequences, _ = engine_sizes(recipe, shape)
    tokens = sequences * columns
    parts = {
        "weights": size * shape.parameters,
        "KV cache": tokens * size * shape.attention_layers * shape.kv_heads * (shape.head_dim + shape.value_dim),
        "buffers": _staging(recipe, EngineRank(shape, size, 1, 1, False)),
        "runtime": RUNTIME if cuda else 0.0,
    }
    return GenerateMemory(add_parts(parts), parts["weights"], True, tokens, sequences, (), shape)
