"""Memory of a generate rank: weights, what vLLM sets aside, and the KV cache that is left.

On a GPU vLLM 0.32 takes gpu_memory_utilization of the whole memory, profiles a forward pass of max_num_batched_tokens and a
sampler of max_num_seqs rows, estimates its CUDA graphs (vllm/v1/worker/gpu_worker.py, determine_available_memory), and gives
the rest to the KV cache. The refit's staging comes afterwards, outside of that share. On a CPU the cache has the size that
`pipeline.generate.vllm` asks for. Keys and values that are fewer heads than tensor-parallel ranks are held by several; latents
(MLA) are held by all. With vllm_cfg.precision fp8 vLLM quantizes layer by layer as it loads and refits, so that the linear
layers are never all there in bfloat16 (vllm/model_executor/layers/quantization/online/fp8.py).

Left out: other quantization, which vllm_kwargs may ask for, speculative decoding, sliding windows, environments' own memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from launch.model_shape import ModelShape
from launch.plan.activations import latent_projections
from launch.plan.memory_parts import RUNTIME, GenerateMemory, add
from pipeline.config import PRECISIONS, Recipe, RecipeError, refits_by_ipc
from pipeline.config.hardware import memory_gb

BLOCK = {True: 16, False: 128}  # tokens of a block of the KV cache, on a GPU and on a CPU (vllm/platforms/cpu.py)
CPU_CACHE_BYTES = 4 << 30  # at most, unless one sequence needs more: pipeline/generate/vllm.py
VOCABULARY_PADDING = 64  # vllm/model_executor/layers/vocab_parallel_embedding.py
SAMPLER_COPIES = 6  # of float32 logits in the profiled sampler: sorted values, 64-bit indices, probabilities, sums, a mask
GRAPHS = 1.0 * 2**30  # bytes for CUDA graphs unless enforce_eager: an assumption
FP8_BYTES = 1 + 4 / 128**2  # of a weight, with a float32 scale for each block of 128 x 128
CACHE_BYTES = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}  # of a number, by vllm_kwargs.kv_cache_dtype


@dataclass(frozen=True)
class Rank:
    """The fullest rank of an engine."""

    shape: ModelShape
    size: int  # bytes of a number
    tensor: int
    stages: int
    spreads_experts: bool
    fp8: bool = False  # whether the linear layers are

    @property
    def layers(self) -> int:
        return -(-self.shape.layers // self.stages)

    @property
    def kv_heads(self) -> int:
        """vLLM copies heads where there are fewer than ranks."""
        return max(1, self.shape.kv_heads // self.tensor)

    @property
    def latent(self) -> bool:
        return self.shape.family == "deepseek_v3"

    @property
    def cached(self) -> int:
        """Numbers of the KV cache for each token."""
        return self.layers * (self.shape.kv_width if self.latent else 2 * self.kv_heads * self.shape.head_dim)

    @property
    def rows(self) -> int:
        """Of the vocabulary, padded."""
        return -(-(-(-self.shape.vocabulary // VOCABULARY_PADDING) * VOCABULARY_PADDING) // self.tensor)

    @property
    def linear(self) -> float:
        """Parameters of attention, MLP and experts, of the stage with the most layers, all of them mixtures if there are as
        many."""
        shape, tensor, layers = self.shape, self.tensor, self.layers
        attention = layers * (shape.attention_layer + (tensor - 1) * latent_projections(shape))
        if not self.latent and shape.kv_heads < tensor:
            attention += layers * shape.hidden * (shape.head_dim + shape.value_dim) * (tensor - shape.kv_heads)
        sparse = min(layers, shape.sparse_layers)
        mlp = (layers - sparse) * shape.mlp_layer
        if sparse:
            mlp += sparse * (3 * shape.hidden * shape.shared_width + shape.routed / shape.sparse_layers)
        return (attention + mlp) / tensor

    @property
    def parameters(self) -> float:
        """With embedding and head, cut, and norms and routers, which are whole."""
        shape = self.shape
        ends = 1 if shape.tied or self.stages > 1 else 2  # the first stage has the embedding, the last one the head
        return self.linear + self.layers / shape.layers * shape.other + ends * self.rows * shape.hidden

    @property
    def weights(self) -> float:
        """Bytes."""
        return self.size * self.parameters - (self.size - FP8_BYTES) * self.linear * self.fp8

    def working(self, tokens: int, sequences: int) -> float:
        """Bytes of activations in the profiled pass: a layer's at once, or the sampler's."""
        shape, size = self.shape, self.size
        width = shape.dense_width / self.tensor
        inner = 3 * width
        if shape.experts:
            experts = shape.expert_width / (1 if self.spreads_experts else self.tensor)
            shared = 3 * shape.shared_width / self.tensor
            inner = max(inner, shape.experts_per_token * (3 * experts + shape.hidden) + shared)
        queries = (shape.heads * shape.head_dim + shape.kv_heads * (shape.head_dim + shape.value_dim)) / self.tensor
        layer = tokens * size * (3 * shape.hidden + max(inner, 2 * queries))
        return max(layer, size * tokens * shape.hidden + sequences * shape.vocabulary * 4 * SAMPLER_COPIES)


SIZES = ("max_model_len", "max_num_seqs", "gpu_memory_utilization", "max_num_batched_tokens", "kv_cache_memory_bytes")


def _given(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those that are not null, which is vLLM's own default. Raises RecipeError."""
    given = {key: value for key, value in kwargs.items() if value is not None}
    for key in SIZES:
        value = given.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
            raise RecipeError(f"policy.generation.vllm_kwargs.{key}: got {value!r}; expected a number above 0")
    return given


def generate(recipe: Recipe, shape: ModelShape) -> GenerateMemory:
    """Return the memory of the fullest generate rank. Raises RecipeError for vllm_kwargs that are not sizes."""
    policy, component = recipe.policy, recipe.cluster.generate
    size, cuda = PRECISIONS[policy.precision], component.gpus_per_node > 0
    if policy.generation.backend == "transformers":
        return _transformers(recipe, shape, size, cuda)
    vllm_cfg, given = policy.generation.vllm_cfg, _given(policy.generation.vllm_kwargs)
    ignored = vllm_cfg.quantization_ignored_layer_kws
    rank = Rank(
        shape,
        size,
        vllm_cfg.tensor_parallel_size,
        vllm_cfg.pipeline_parallel_size,
        vllm_cfg.expert_parallel_size > 1,
        fp8=vllm_cfg.precision == "fp8" and not ignored,
    )
    longest = given.get("max_model_len", vllm_cfg.max_model_len)
    sequences = given.get("max_num_seqs", policy.generation.max_num_seqs)
    weights = rank.weights
    parts = {"weights": weights, "buffers": _staging(recipe, rank)}
    token_bytes = rank.cached * CACHE_BYTES.get(str(given.get("kv_cache_dtype")), size)
    less = "quantization_ignored_layer_kws" if ignored else "vllm_kwargs.quantization" if given.get("quantization") else ""
    assumptions = [f"an engine's weights as if none were quantized: what {less} leaves is not counted"] if less else []
    if cuda:
        share = given.get("gpu_memory_utilization", vllm_cfg.gpu_memory_utilization)
        budget = share * memory_gb(component) * 1e9
        tokens = given.get("max_num_batched_tokens", _batched_tokens(memory_gb(component)))
        working = rank.working(tokens, sequences)
        graphs = 0.0 if given.get("enforce_eager", vllm_cfg.enforce_eager) else GRAPHS
        cache = budget - weights - working - RUNTIME - graphs
        parts |= {"activations": working, "runtime": RUNTIME + graphs}
        assumptions.append(
            f"{RUNTIME / 2**30:g} GiB for CUDA's context and NCCL, {graphs / 2**30:g} GiB for CUDA graphs; a profiled pass of"
            f" {tokens:,} tokens"
        )
    else:
        cache = _cpu_cache(rank, longest, sequences)
    cache = given.get("kv_cache_memory_bytes", cache)
    parts["KV cache"] = max(0.0, cache)
    blocks = math.floor(cache / (token_bytes * BLOCK[cuda])) - 1  # vLLM keeps one for itself
    fit = blocks // -(-longest // BLOCK[cuda])
    tokens = blocks * BLOCK[cuda]
    return GenerateMemory(add(parts), size * rank.parameters, not less, tokens, max(0, fit), tuple(assumptions), shape)


def _batched_tokens(memory: float) -> int:
    """vLLM's default (vllm/engine/arg_utils.py, get_batch_defaults) by the GB of a GPU."""
    return 16384 if memory * 1e9 >= 70 * 2**30 else 8192


def _cpu_cache(rank: Rank, longest: int, sequences: int) -> float:
    """`_cpu_cache_bytes` of pipeline/generate/vllm.py, for all layers."""
    token_bytes = 2 * rank.shape.layers * rank.kv_heads * rank.shape.head_dim * rank.size
    blocks = -(-longest // BLOCK[False])
    wanted = (sequences * blocks + 1) * BLOCK[False] * token_bytes
    return max(min(wanted, CPU_CACHE_BYTES), (blocks + 1) * BLOCK[False] * token_bytes)


def _staging(recipe: Recipe, rank: Rank) -> float:
    """Two rounds received and one passed on (`pipeline.refit.planned`), none larger than the rank's weights. With IPC two are
    passed on, and two are received only from other nodes (`pipeline.refit.shared_memory`)."""
    generation = recipe.policy.generation
    bucket, own = generation.refit_cfg.bucket_bytes, rank.size * rank.parameters
    if generation.refit_transport == "broadcast":
        return bucket + rank.size * rank.shape.vocabulary * rank.shape.hidden
    base = own if generation.refit_transport == "delta" else 0.0
    rounds = 3
    if refits_by_ipc(recipe):
        rounds = 2 if recipe.cluster.generate.nodes == 1 else 4
    return rounds * min(bucket, own) + base


def _transformers(recipe: Recipe, shape: ModelShape, size: int, cuda: bool) -> GenerateMemory:
    """The whole model on each rank, and rows for max_num_seqs sequences as long as they get."""
    generation = recipe.policy.generation
    columns = -(-generation.vllm_cfg.max_model_len // 64) * 64  # pipeline/generate/kv_cache.py
    tokens = generation.max_num_seqs * columns
    rank = Rank(shape, size, 1, 1, False)
    parts = {
        "weights": size * shape.parameters,
        "KV cache": tokens * size * shape.layers * shape.kv_heads * (shape.head_dim + shape.value_dim),
        "buffers": _staging(recipe, rank),
    }
    if cuda:
        parts["runtime"] = RUNTIME
    return GenerateMemory(add(parts), parts["weights"], True, tokens, generation.max_num_seqs, (), shape)
