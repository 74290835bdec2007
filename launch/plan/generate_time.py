"""Estimate the time of a rollout on the generate ranks.

An engine's step produces one token for each running sequence. It takes the time of reading weights and KV cache or the time of
the operations, whichever is longer, plus an overhead and the all-reduces of tensor parallelism. A step of a mixture of experts
reads every expert that at least one of its tokens selects; tokens are assumed to select experts uniformly.

An engine runs as many sequences at once as `max_num_seqs` allows and its KV cache holds. While sequences wait, one starts
whenever another ends. Then the last sequences end one after another, and the longest ends the rollout. Lengths have the
distribution of `launch/plan/lengths.py`. Waiting sequences are assumed to be as long as running ones, which is exact if lengths
are exponential or equal.

Not counted: further turns (an episode counts as one answer), preemption, speculative decoding, launches of single kernels
(enforce_eager), environments that run on the CPU, and all but the first batch of dynamic sampling, since their number is
unknown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launch.plan import roofline
from launch.plan.lengths import Lengths
from launch.plan.memory_generate import engine_sizes
from launch.plan.memory_parts import GenerateMemory
from launch.plan.rank_division import engines
from launch.plan.roofline import Phase, Rates
from pipeline.config import OnlineConfig, Recipe, engine_ranks, section
from pipeline.config.cluster import LATENCY_US
from pipeline.config.hardware import GPUSpec
from pipeline.models import flops
from pipeline.models.mixers import kept_bytes
from pipeline.models.shape import ModelShape

SAMPLING = ("prefill", "decode")
"""Names of the phases of a rollout in which engines compute."""
POINTS = 200  # points of the numerical integral over the last sequences


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine: its model, its ranks, and the rates at which they compute and communicate."""

    shape: ModelShape
    rates: Rates
    ranks: int
    tensor: int

    def weights(self, batch: float) -> float:
        """Return the bytes of weights that a rank reads in a step of `batch` tokens, without the embedding table."""
        shape = self.shape
        chosen = 1 - (1 - shape.experts_per_token / shape.experts) ** batch if shape.experts else 0.0
        linear = shape.attention + shape.mlp + chosen * shape.routed
        unquantized = shape.vocabulary * shape.hidden + shape.other  # the output layer, which is the embedding if it is tied
        return (linear * (1 if self.rates.fp8 else self.rates.itemsize) + unquantized * self.rates.itemsize) / self.ranks

    @property
    def cache_bytes(self) -> float:
        """Return the bytes of KV cache that a rank reads for each cached token.

        If there are more tensor-parallel ranks than key-value heads, several ranks hold the same head. All ranks hold latents.
        """
        shape = self.shape
        width = shape.rank_kv_width(self.tensor)
        return width * shape.attention_layers * self.rates.itemsize / (self.ranks // self.tensor)

    def read(self, context: float) -> float:
        """Return the bytes of cache and states that a rank reads and writes to add a token to a sequence of `context` tokens.

        A layer with a sliding window reads only the window's tokens. A layer with a state reads and writes the whole state.
        """
        states = self.shape.state_layers * kept_bytes(self.shape.state, self.rates.itemsize) if self.shape.state else 0.0
        return self.shape.cached_tokens(context) * self.cache_bytes + 2 * states / self.ranks

    def parts(self, batch: float, context: float) -> dict[str, float]:
        """Return part -> seconds, for a step of `batch` sequences with `context` tokens each."""
        weights, cache = self.weights(batch) / self.rates.memory, batch * self.read(context) / self.rates.memory
        work = 2 * self.shape.active * batch + flops.decode_attention(self.shape, batch * context)
        products = work / (self.ranks * self.rates.flops)
        parts = {"reading weights": weights, "reading the KV cache": cache} if weights + cache > products else {}
        parts = parts or {"matrix products": products}
        parts["engine overhead"] = self.rates.gpu.assumed.engine_step_ms / 1e3
        if self.tensor > 1:
            parts["tensor parallelism"] = self._all_reduces(batch)
        return parts

    def _all_reduces(self, batch: float) -> float:
        latency = self.rates.gpu.assumed.all_reduce_us + (2 * LATENCY_US if self.tensor > self.rates.island else 0.0)
        moved = 2 * self.rates.ring_seconds(self.tensor, batch * self.shape.hidden * self.rates.itemsize)
        shape = self.shape
        reduces = shape.attention_layers + shape.state_layers + shape.mlp_layers + shape.sparse_layers
        return reduces * (latency / 1e6 + moved)


def rollout_size(recipe: Recipe) -> tuple[int, int]:
    """Return the numbers of (prompts, answers) of a rollout; with dynamic sampling, those of its first batch."""
    online = section(recipe)
    assert isinstance(online, OnlineConfig), recipe.algorithm
    prompts = int(online.num_prompts_per_step * getattr(online, "batch_multiplier", 1))
    return prompts, prompts * online.num_generations_per_prompt


def slots(recipe: Recipe, memory: GenerateMemory, lengths: Lengths) -> int:
    """Return how many sequences an engine decodes at once. memory: the memory of the fullest generate rank."""
    context = lengths.prompt + lengths.squared_answer / (2 * lengths.answer)
    return max(1, min(engine_sizes(recipe, memory.shape)[0], int(memory.holds(context))))


def engine(recipe: Recipe, shape: ModelShape, gpu: GPUSpec) -> Engine:
    """Return the engine that a recipe describes; the Transformers backend has one rank per engine."""
    vllm_cfg, vllm = recipe.policy.generation.vllm_cfg, recipe.policy.generation.backend == "vllm"
    ranks, tensor = (engine_ranks(vllm_cfg), vllm_cfg.tensor_parallel_size) if vllm else (1, 1)
    rates = roofline.generation(recipe, gpu, shape.experts > 0)
    return Engine(shape, rates, ranks, tensor)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The answers that the busiest engine decodes in a rollout."""

    engine: Engine
    count: float  # answers
    slots: int  # sequences that it decodes at once
    lengths: Lengths
    answers: float  # answers of all engines together


def load(recipe: Recipe, shape: ModelShape, lengths: Lengths, gpu: GPUSpec, memory: GenerateMemory) -> EngineLoad:
    """Return the load of the engine with the most answers to sample in a step."""
    prompts, answers = rollout_size(recipe)
    prompts_of_engine = math.ceil(prompts / engines(recipe.policy, recipe.cluster.generate)) * answers / prompts
    return EngineLoad(engine(recipe, shape, gpu), prompts_of_engine, slots(recipe, memory, lengths), lengths, answers)


def phases(recipe: Recipe, shape: ModelShape, lengths: Lengths, gpu: GPUSpec, memory: GenerateMemory) -> list[Phase]:
    """Return the phases of a step on the generate ranks."""
    engine_count, engine_load = engines(recipe.policy, recipe.cluster.generate), load(recipe, shape, lengths, gpu, memory)
    prompts, answers = rollout_size(recipe)
    caches_prefixes = recipe.policy.generation.backend == "vllm" and recipe.policy.generation.vllm_cfg.enable_prefix_caching
    read = prompts if caches_prefixes else answers
    prefill = flops.forward(shape, read * lengths.prompt, read * lengths.prompt**2 / 2)
    share = engine_load.count * engine_count / answers  # the busiest engine's prompts against the mean
    seconds = share * prefill / (engine_count * engine_load.engine.ranks * engine_load.engine.rates.flops)
    phases_of_step = [Phase("rollout", SAMPLING[0], prefill, {"matrix products": seconds})]
    pairs = answers * (lengths.prompt * lengths.answer + lengths.squared_answer / 2)
    work = 2 * shape.active * answers * lengths.answer + flops.decode_attention(shape, pairs)
    parts = decoding(engine_load.engine, engine_load.count, engine_load.slots, lengths, answers)
    return [*phases_of_step, Phase("rollout", SAMPLING[1], work, parts)]


def decoding(engine: Engine, count: float, slots: int, lengths: Lengths, answers: float) -> dict[str, float]:
    """Return part -> seconds, for one engine that decodes `count` answers, at most `slots` at once.

    answers: the number of answers of all engines together. The longest of them ends the rollout.
    """
    batch = min(count, slots)
    steady = (count - batch) * lengths.answer / batch  # steps while sequences wait
    total: dict[str, float] = {}

    def add(steps: float, batch: float, context: float) -> None:
        for name, seconds in engine.parts(batch, context).items():
            total[name] = total.get(name, 0.0) + steps * seconds

    add(steady, batch, lengths.prompt + lengths.squared_answer / (2 * lengths.answer))
    longest, scale = lengths.longest(answers * batch / count), lengths.scale
    for point in range(POINTS):
        step = (point + 0.5) / POINTS * longest
        add(longest / POINTS, max(1.0, batch * math.exp(-step / scale)), lengths.prompt + step)
    return total


def validation(recipe: Recipe, shape: ModelShape, lengths: Lengths, gpu: GPUSpec, memory: GenerateMemory, count: int) -> float:
    """Return the seconds of sampling one answer to each of `count` prompts."""
    engine_count, engine_rates = engines(recipe.policy, recipe.cluster.generate), engine(recipe, shape, gpu)
    parts = decoding(engine_rates, math.ceil(count / engine_count), slots(recipe, memory, lengths), lengths, count)
    return sum(parts.values())
