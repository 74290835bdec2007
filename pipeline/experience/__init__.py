"""What a step learns from, gathered on rank 0: prompts go to the engines, judged groups come back, until the step is full.

dispatch.py      groups to engines and back
synchronous.py   sampling and training in turn
asynchronous.py  sampling that runs ahead of training, within the bounds of
buffer.py        which groups a step must and may train on; pure
record.py        what a checkpoint keeps of it
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.config import AsyncConfig, GenerationConfig, GRPOConfig, OnlineConfig
from pipeline.experience.asynchronous import Asynchronous
from pipeline.experience.base import Experience, Judge
from pipeline.experience.dispatch import Dispatch, Order
from pipeline.experience.failures import Failures
from pipeline.experience.synchronous import Synchronous
from pipeline.remote import Remote
from pipeline.types import Sampling

__all__ = ["Experience", "build"]


def build(
    name: str, section: OnlineConfig, generation: GenerationConfig, engines: Sequence[Remote], judge: Judge | None
) -> Experience:
    """name: of the section in the recipe. engines: one for the ranks of each. judge: None if no model gives rewards."""
    grpo = isinstance(section, GRPOConfig)
    ahead = section.async_grpo if grpo else AsyncConfig()
    failures = Failures(ahead.max_generation_failures, "grpo.async_grpo.max_generation_failures" if grpo else "env")
    dispatch = Dispatch(engines, section.seed, section.max_rollout_turns, failures)
    validation = Order("val", section.val_num_generations_per_prompt, validation_sampling(generation), urgent=True)
    apart = ahead.enabled and ahead.stragglers == "cut"
    train = Order("train", section.num_generations_per_prompt, training_sampling(generation), apart=apart)
    if ahead.enabled:
        return Asynchronous(section, dispatch, judge, train, validation)
    return Synchronous(name, section, dispatch, judge, train, validation)


def training_sampling(generation: GenerationConfig) -> Sampling:
    return _sampling(generation, generation.temperature, generation.top_p, generation.top_k)


def validation_sampling(generation: GenerationConfig) -> Sampling:
    return _sampling(generation, generation.val_temperature, generation.val_top_p, generation.val_top_k)


def _sampling(generation: GenerationConfig, temperature: float, top_p: float, top_k: int | None) -> Sampling:
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k or 0,
        max_new_tokens=generation.max_new_tokens,
        stop_token_ids=tuple(generation.stop_token_ids or ()),
    )
