"""Estimate the memory of a generate rank: weights, vLLM's reserve, and the remaining KV cache.

On a GPU, vLLM 0.32 takes the share gpu_memory_utilization of the whole memory, in addition to the memory that the process has
taken before: CUDA's context and NCCL's communicators (vllm/v1/worker/gpu_worker.py, init_device). It profiles a forward pass of
max_num_batched_tokens and a sampler of max_num_seqs rows, estimates its CUDA graphs (determine_available_memory in the same
file), and gives the rest of its share to the KV cache. The refit's staging and NCCL's buffers between the refit's ranks are
allocated later, outside of this share. On a CPU the cache has the size that `pipeline.generate.vllm` sets.

If there are fewer key-value heads than tensor-parallel ranks, several ranks hold the same keys and values. All ranks hold
latents (MLA). With vllm_cfg.precision=fp8, vLLM quantizes one layer at a time when it loads and refits, so the linear layers
never all exist in bfloat16 (vllm/model_executor/layers/quantization/online/fp8.py). A sequence takes cache for all its tokens,
in layers with a sliding window only for the window's tokens, and takes the states of its Mamba layers.

Not counted: other quantization in vllm_kwargs, speculative decoding, blocks that vLLM leaves partly empty, memory of
environments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from launch.plan.activations import latent_projections
from launch.plan.engine_sizes import engine_sizes
from launch.plan.memory_parts import RUNTIME, GenerateMemory, add_parts
from launch.plan.rank_division import engine_stages, engines
from pipeline.config import PRECISIONS, Problem, Recipe, colocated, ranks_per_node, refits_by_ipc, refuse, trains
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
CHANNEL_BYTES = 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8 + (4 << 20)
"""Bytes on a rank's GPU for each channel from another rank of its node: the buffers of NCCL's three protocols
(computeBuffSizes in src/init.cc of NCCL 2.30.7; p2pRecvSetup in src/transport/p2p.cc)."""
CHANNELS = {True: 32, False: 2}
"""NCCL's channels from another rank of the same node, by whether all ranks are on one node with NVLink. On one node there are
two for each link, rounded to a power of two, at most as many as collectives have (ncclTopoComputeP2pChannels in
src/graph/paths.cc). Assumed, not measured."""
NETWORK_BYTES = 2 * 32 * 16 * (128 << 10)
"""Bytes of NCCL's buffers on a GPU for messages to and from all other nodes (sharedNetBuffersInit in src/transport/net.cc, for
32 channels)."""
SIZES = ("max_model_len", "gpu_memory_utilization", "max_num_batched_tokens", "kv_cache_memory_bytes")


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
    def kv_heads(self) -> int:
        """Return the number of key-value heads on one rank."""
        return max(1, self.shape.kv_heads // self.tensor)  # vLLM copies heads where there are fewer than ranks

    @property
    def cache_elements(self) -> int:
        """Return the number of elements of KV cache that a rank holds for each token."""
        layers = -(-self.shape.attention_layers // self.stages)
        return layers * (self.shape.kv_width if self.shape.latent else 2 * self.kv_heads * self.shape.head_dim)

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
        """Return a rank's number of parameters of attention, MLP and experts, in the pipeline stage with the most."""
        return max(map(self._linear, engine_stages(self.shape.layers, self.stages)))

    def _linear(self, stage: range) -> float:
        shape, tensor, layers = self.shape, self.tensor, len(stage)
        attention = layers * (shape.attention_layer + (tensor - 1) * latent_projections(shape))
        if not shape.latent and shape.kv_heads < tensor:
            attention += layers * shape.hidden * (shape.head_dim + shape.value_dim) * (tensor - shape.kv_heads)
        sparse = sum(shape.sparse[layer] for layer in stage)
        mlp = (layers - sparse) * shape.mlp_layer + sparse * (shape.shared_layer + shape.routed_layer)
        return (attention + mlp) / tensor

    @property
    def parameters(self) -> float:
        """Return the number of all parameters on this rank.

        Tensor parallelism divides the embedding and the head, but not norms and routers.
        """
        shape = self.shape
        ends = 1 if shape.tied or self.stages > 1 else 2  # the first stage has the embedding, the last one the head
        return self.linear + self.layers / shape.layers * shape.other + ends * self.rows * shape.hidden

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
    vllm, arguments = policy.generation.vllm_cfg, _set_arguments(policy.generation.vllm_kwargs)
    ignored = vllm.quantization_ignored_layer_kws
    fp8, spread = vllm.precision == "fp8" and not ignored, vllm.expert_parallel_size > 1
    rank = EngineRank(shape, size, vllm.tensor_parallel_size, vllm.pipeline_parallel_size, spread, fp8)
    longest = arguments.get("max_model_len", vllm.max_model_len)
    sequences, batched = engine_sizes(recipe, shape)
    parts = {"weights": rank.weights, "buffers": _staging(recipe, rank) + _connections(recipe)}
    uncounted = (
        "quantization_ignored_layer_kws" if ignored else "vllm_kwargs.quantization" if arguments.get("quantization") else ""
    )
    assumptions = [f"an engine's weights without quantization: the plan does not count {uncounted}"] if uncounted else []
    if cuda:
        budget = arguments.get("gpu_memory_utilization", vllm.gpu_memory_utilization) * memory_gb(component) * 1e9
        working = rank.working(batched, sequences)
        graphs = 0.0 if arguments.get("enforce_eager", vllm.enforce_eager) else GRAPHS
        cache = budget - rank.weights - working - graphs
        parts |= {"activations": working, "runtime": RUNTIME + graphs}
        assumptions.append(
            f"{RUNTIME / 2**30:g} GiB for CUDA's context and NCCL, {graphs / 2**30:g} GiB for CUDA graphs; a profiling pass of"
            f" {batched:,} tokens"
        )
    else:
        cache = _cpu_cache(rank, longest, sequences)
    cache = arguments.get("kv_cache_memory_bytes", cache)
    parts["KV cache"] = max(0.0, cache)
    token_bytes = rank.cache_elements * CACHE_BYTES.get(str(arguments.get("kv_cache_dtype")), size)
    block = BLOCK[cuda]
    tokens = (math.floor(cache / (token_bytes * block)) - 1) * block  # vLLM keeps one block for itself
    states = rank.state_bytes(STATE_BYTES.get(str(arguments.get("mamba_ssm_cache_dtype")), 4)) / token_bytes
    memory = GenerateMemory(add_parts(parts), rank.received, not uncounted, tokens, 0, tuple(assumptions), shape, states)
    return replace(memory, sequences=math.floor(memory.holds(-(-longest // block) * block)))


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


def _set_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of vllm_kwargs without those that are null, which stands for vLLM's own default.

    Raises RecipeError for a size that is not a number above 0.
    """
    arguments = {key: value for key, value in kwargs.items() if value is not None}
    refuse(
        Problem(f"policy.generation.vllm_kwargs.{key}", "wrong-type", f"got {arguments[key]!r}; expected a number above 0")
        for key in SIZES
        if key in arguments and not _is_size(arguments[key])
    )
    return arguments


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e300


def _cpu_cache(rank: EngineRank, longest: int, sequences: int) -> float:
    """Return the bytes of KV cache for all layers, as `_cpu_cache_bytes` of pipeline/generate/vllm.py computes them."""
    block_bytes = BLOCK[False] * 2 * rank.shape.attention_layers * rank.kv_heads * rank.shape.head_dim * rank.size
    blocks = -(-longest // BLOCK[False])
    return max(min((sequences * blocks + 1) * block_bytes, CPU_CACHE_BYTES), (blocks + 1) * block_bytes)


def _staging(recipe: Recipe, rank: EngineRank) -> float:
    """Return the bytes in which a generate rank stages a refit.

    A rank stages two received rounds and one relayed round (`pipeline.refit.planned`), each at most a bucket, and at most the
    rank's weights. With IPC it stages two relayed rounds and, if there are several nodes, two received rounds
    (`pipeline.refit.shared_memory`). A broadcast takes one bucket and one tensor. A delta refit also takes the rank's weights.
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
    """Return the bytes of NCCL's buffers on a generate rank for a refit's messages. NCCL allocates them at the first refit.

    Within its node, a rank receives from every train rank and from the preceding engine. Other nodes share one set of buffers.
    """
    cluster = recipe.cluster
    if not trains(recipe) or colocated(recipe) or not cluster.generate.gpus_per_node:
        return 0.0  # nothing, or over gloo
    one_node = cluster.share_nodes and cluster.train.nodes == 1
    near = ranks_per_node(cluster.train) if cluster.share_nodes else 0
    near += engines(recipe.policy, cluster.generate) > 1
    if recipe.policy.generation.refit_transport == "broadcast":
        near = 1
    return near * CHANNELS[one_node] * CHANNEL_BYTES + (0 if one_node else NETWORK_BYTES)


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
        "buffers": _staging(recipe, EngineRank(shape, size, 1, 1, False)) + _connections(recipe),
        "runtime": RUNTIME if cuda else 0.0,
    }
    return GenerateMemory(add_parts(parts), parts["weights"], True, tokens, sequences, (), shape)
