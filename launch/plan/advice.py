"""Propose changes to a recipe that needs more memory than its GPUs have, each with the memory that it would need.

Only keys that do not affect the results change, one or two at a time. No proposal changes the batch size or the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from launch.plan.memory import train
from launch.plan.memory_generate import generate
from launch.plan.memory_parts import GenerateMemory, TrainMemory
from launch.plan.rank_division import GIGA, train_parallelism
from pipeline.config import Recipe, compiles, ranks, uses_megatron
from pipeline.models.shape import ModelShape

MOST = 4
SELECTIVE = "recompute_granularity=selective"
"""Selective recomputation, which the plan proposes for FSDP2 only. On Megatron-Core it saves no memory, because flash attention
keeps nothing that could be recomputed."""


def advice(recipe: Recipe, memory_needed: TrainMemory | GenerateMemory, room: float) -> list[str]:
    """Return at most MOST texts "key=value: memory" of changes with which a rank fits in `room` bytes of its GPU's memory.

    Changes for a train rank are sorted by its memory, least first, but after selective recomputation if that suffices. If no
    change suffices for a train rank, return the changes that come closest. Return an empty list if the rank already fits.
    """
    if isinstance(memory_needed, GenerateMemory):
        return _generate_advice(recipe, memory_needed, room)
    if memory_needed.total <= room:
        return []
    changes = _train_changes(recipe, memory_needed.shapes["policy"])
    tried = sorted((train(variant, memory_needed.shapes).total, text) for text, variant in changes)
    fitting = [(total, text) for total, text in tried if total <= room]
    if any(SELECTIVE in text for _, text in fitting):  # full recomputation costs another forward pass
        fitting = [(total, text) for total, text in fitting if not text.endswith("activation_checkpointing=true")]
        fitting.sort(key=lambda change: SELECTIVE not in change[1])
    return [f"{text}: {_of(total, room)}" for total, text in (fitting or tried)[:MOST] if total < memory_needed.total]


def _generate_advice(recipe: Recipe, memory_needed: GenerateMemory, room: float) -> list[str]:
    if memory_needed.sequences >= 1 and memory_needed.total <= room:
        return []
    texts = []
    for text, variant in _generate_changes(recipe, memory_needed.shape):
        memory_after = generate(variant, memory_needed.shape)
        if memory_after.sequences >= 1 and memory_after.total <= room:
            texts.append(f"{text}: room for {memory_after.sequences:,.0f} sequences of max_model_len tokens")
    return texts[:MOST]


def _of(total: float, room: float) -> str:
    return f"{total / GIGA:.1f} GB of {room / GIGA:g}" + ("" if total <= room else ", still too much")


def _train_changes(recipe: Recipe, shape: ModelShape) -> Iterator[tuple[str, Recipe]]:
    packing, longest = "policy.sequence_packing", recipe.policy.max_total_sequence_length
    section = "policy.megatron_cfg" if uses_megatron(recipe.policy) else "policy.dtensor_cfg"
    for text, variant in _change(recipe, f"{section}.activation_checkpointing", lambda on: None if on else True):
        yield text, variant
        if not uses_megatron(recipe.policy) and not compiles(recipe.policy, shape.mixture):
            yield f"{text} {section}.{SELECTIVE}", set_key(variant, f"{section}.recompute_granularity", "selective")
    for key in (f"{packing}.train_mb_tokens", f"{packing}.logprob_mb_tokens"):
        yield from _change(recipe, key, lambda tokens: tokens // 2 if tokens // 2 >= longest else None)
    yield from _change(recipe, "policy.logprob_chunk_size", lambda rows: 1024 if rows is None or rows > 1024 else None)
    if uses_megatron(recipe.policy):
        yield from _megatron_changes(recipe, shape, section)
    else:
        if not shape.experts:
            yield from _double(recipe, f"{section}.tensor_parallel_size", shape.kv_heads)
        yield from _change(recipe, f"{section}.cpu_offload", lambda on: None if on else True)
    yield from _change(recipe, "cluster.train.nodes", lambda nodes: 2 * nodes)


def _megatron_changes(recipe: Recipe, shape: ModelShape, section: str) -> Iterator[tuple[str, Recipe]]:
    for text, variant in _double(recipe, f"{section}.tensor_model_parallel_size", shape.kv_heads):
        sequence = set_key(variant, f"{section}.sequence_parallel", True)
        yield f"{text} {section}.sequence_parallel=true", sequence
    if shape.layers % (2 * recipe.policy.megatron_cfg.pipeline_model_parallel_size) == 0:
        yield from _double(recipe, f"{section}.pipeline_model_parallel_size", shape.layers)
    yield from _double(recipe, f"{section}.context_parallel_size", recipe.policy.max_total_sequence_length)
    if shape.experts:
        yield from _double(recipe, f"{section}.expert_model_parallel_size", shape.experts)


def _double(recipe: Recipe, key: str, of: int) -> Iterator[tuple[str, Recipe]]:
    """Yield ("key=value", the recipe with this parallel size doubled) if the new size divides `of` and the number of ranks."""
    for text, variant in _change(recipe, key, lambda size: None if of % (2 * size) else 2 * size):
        layout = train_parallelism(variant.policy, variant.cluster.train)
        dense, experts = (
            layout.tensor * layout.pipeline * layout.context,
            layout.expert * layout.expert_tensor * layout.pipeline,
        )
        if not ranks(variant.cluster.train) % dense and not ranks(variant.cluster.train) % experts:
            yield text, variant


def _generate_changes(recipe: Recipe, shape: ModelShape) -> Iterator[tuple[str, Recipe]]:
    key = "policy.generation.vllm_cfg"
    size = recipe.policy.generation.vllm_cfg.pipeline_parallel_size
    for share in (0.7, 0.8, 0.9):
        yield from _change(recipe, f"{key}.gpu_memory_utilization", lambda now, share=share: share if now < share else None)
    for tensor in (2, 4, 8, 16):
        if not shape.heads % tensor and not ranks(recipe.cluster.generate) % (tensor * size):
            yield from _change(recipe, f"{key}.tensor_parallel_size", lambda now, to=tensor: to if now < to else None)
    yield from _change(recipe, "policy.generation.refit_cfg.bucket_bytes", lambda now: now // 4)
    yield from _change(recipe, f"{key}.gpu_memory_utilization", lambda now: 0.9 if now > 0.9 else None)


def _change(recipe: Recipe, key: str, to: Callable[[Any], Any]) -> Iterator[tuple[str, Recipe]]:
    """Yield ("key=value", the recipe with the key set to this value).

    to: a function from the key's present value to its new one, or to None if there is nothing to change.
    """
    value = recipe
    for name in key.split("."):
        value = getattr(value, name)
    if (new_value := to(value)) is not None:
        value_text = str(new_value).lower() if isinstance(new_value, bool) else new_value
        yield f"{key}={value_text}", set_key(recipe, key, new_value)


def set_key(section: Any, key: str, value: Any) -> Any:
    """Return a copy of a recipe's section in which the dotted `key` has the value `value`."""
    name, _, subkey = key.partition(".")
    return replace(section, **{name: set_key(getattr(section, name), subkey, value) if subkey else value})
