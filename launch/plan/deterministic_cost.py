"""Estimate the cost of policy.deterministic by factors on the time of matrix products, attention and reads of memory.

Both factors, for training and for generation, are published measurements, not our own.
"""

from __future__ import annotations

from pipeline.config import PolicyConfig, Recipe, generates, trains

TRAINING = 1.15
"""From docs/developer/determinism/op-catalog.md of Megatron-LM: roughly 15% of a step, from 4% for a large dense model to 17%
for a hybrid mixture of experts. Attention's backward alone may lose 38% of its speed (https://arxiv.org/abs/2601.21824)."""
GENERATION = 1.5
"""Between two measurements of vLLM with batch invariance: 1.45, from 31% less throughput on an H20
(https://github.com/vllm-project/vllm/issues/27433), and 1.6, from 42 s instead of 26 s in
https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference."""


def training(policy: PolicyConfig) -> float:
    """Return the factor by which policy.deterministic lengthens kernels on train ranks; 1 without it."""
    return TRAINING if policy.deterministic else 1.0


def generation(policy: PolicyConfig) -> float:
    """Return the factor by which policy.deterministic lengthens kernels in engines; 1 without it."""
    return GENERATION if policy.deterministic else 1.0


def assumed_factors(recipe: Recipe) -> str:
    """Return the plan's line about the factors that it assumes for a recipe with policy.deterministic."""
    factors = [f"{TRAINING:g} times as long in training"] if trains(recipe) else []
    factors += [f"{GENERATION:g} times as long in engines"] if generates(recipe) else []
    return f"policy.deterministic: kernels take {' and '.join(factors)} (sources in launch/plan/deterministic_cost.py)"
