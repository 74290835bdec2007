"""Propose changes to a recipe that needs more memory than its GPUs have, each with the memory that it would need.

Only keys that do not affect the results change, one or two at a time. No proposal changes the batch size or the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launch.plan.memory import train
from launch.plan.memory_generate import generate
from launch.plan.memory_parts import GenerateMemory, TrainMemory
from launch.plan.placement import Changes
from launch.plan.rank_division import GIGA
from pipeline import config
from pipeline.config import Recipe, collected, ranks, uses_megatron
from pipeline.models.shape import ModelShape

MOST = 4


def advice(recipe: Recipe, memory_needed: TrainMemory | GenerateMemory, room: float) -> list[str]:
    """Return at most MOST texts "key=value: memory" of changes with which a rank fits in `room` bytes of its GPU's memory.

    Changes for a train rank are sorted by its memory, least first; if none suffices, they are those that come closest. Return
    an empty list if the rank already fits.
    """
    if isinstance(memory_needed, GenerateMemory):
        return _generate_advice(recipe, memory_needed, room)
    if memory_needed.total <= room:
        return []
    variants = _valid(recipe, _train_changes(recipe, memory_needed.shapes["policy"]))
    tried = sorted((train(variant, memory_needed.shapes).total, text) for text, variant in variants)
    chosen = [change for change in tried if change[0] <= room] or tried
    return [f"{text}: {_of(total, room)}" for total, text in chosen[:MOST] if total < memory_needed.total]


def _generate_advice(recipe: Recipe, memory_needed: GenerateMemory, room: float) -> list[str]:
    if memory_needed.sequences >= 1 and memory_needed.total <= room:
        return []
    texts = []
    for text, variant in _valid(recipe, _generate_changes(recipe, memory_needed.shape)):
        memory_after = generate(variant, memory_needed.shape)
        if memory_after.sequences >= 1 and memory_after.total <= room:
            texts.append(f"{text}: room for {memory_after.sequences:,.0f} sequences of max_model_len tokens")
    return texts[:MOST]


def _of(total: float, room: float) -> str:
    return f"{total / GIGA:.1f} GB of {room / GIGA:g}" + ("" if total <= room else ", still too much")


def _valid(recipe: Recipe, proposals: Iterator[Changes]) -> Iterator[tuple[str, Recipe]]:
    """Yield (text of the changes, the changed recipe) for changes with which the recipe is valid."""
    for changes in proposals:
        with collected([]):
            variant = config.changed(recipe, changes)
            yield " ".join(config.format_override(key, value) for key, value in changes.items()), variant


def _train_changes(recipe: Recipe, shape: ModelShape) -> Iterator[Changes]:
    policy, longest = recipe.policy, recipe.policy.max_total_sequence_length
    megatron = uses_megatron(policy)
    section, settings = ("policy.megatron_cfg", policy.megatron_cfg) if megatron else ("policy.dtensor_cfg", policy.dtensor_cfg)
    if not settings.activation_checkpointing:
        yield {f"{section}.activation_checkpointing": True}
    for name in ("train_mb_tokens", "logprob_mb_tokens"):
        if (half := getattr(policy.sequence_packing, name) // 2) >= longest:
            yield {f"policy.sequence_packing.{name}": half}
    if policy.logprob_chunk_size is None or policy.logprob_chunk_size > 1024:
        yield {"policy.logprob_chunk_size": 1024}
    sizes = {"tensor_model": shape.kv_heads, "pipeline_model": shape.layers, "expert_model": shape.experts, "context": longest}
    for name, total in sizes.items() if megatron else [("tensor", 0 if shape.experts else shape.kv_heads)]:
        size = 2 * getattr(settings, f"{name}_parallel_size")
        if total and total % size == 0:
            more: dict[str, Any] = {f"{section}.sequence_parallel": True} if name == "tensor_model" else {}
            yield {f"{section}.{name}_parallel_size": size} | more
    if not megatron:
        yield {f"{section}.cpu_offload": True}
    yield {"cluster.train.nodes": 2 * recipe.cluster.train.nodes}


def _generate_changes(recipe: Recipe, shape: ModelShape) -> Iterator[Changes]:
    key, vllm = "policy.generation.vllm_cfg", recipe.policy.generation.vllm_cfg
    now = vllm.gpu_memory_utilization
    yield from ({f"{key}.gpu_memory_utilization": share} for share in (0.7, 0.8, 0.9) if now < share or now > share == 0.9)
    for tensor in (2, 4, 8, 16):
        engine = tensor * vllm.pipeline_parallel_size
        if vllm.tensor_parallel_size < tensor and not shape.heads % tensor and not ranks(recipe.cluster.generate) % engine:
            yield {f"{key}.tensor_parallel_size": tensor}
    yield {"policy.generation.refit_cfg.bucket_bytes": recipe.policy.generation.refit_cfg.bucket_bytes // 4}
