"""Algorithms from their section alone, and losses, without the rest of a recipe."""

from __future__ import annotations

from types import SimpleNamespace

from pipeline.algorithms import ALGORITHMS, OFFLINE
from pipeline.algorithms.algorithm import Algorithm
from pipeline.config import (
    AdvantageConfig,
    DataConfig,
    DTensorConfig,
    EnvironmentConfig,
    GRPOConfig,
    LossConfig,
    MegatronConfig,
    OfflineConfig,
    OnlineConfig,
    ValueLossConfig,
)
from pipeline.config.policy import TeachersConfig


def made(
    section: OnlineConfig | OfflineConfig,
    loss: LossConfig | None = None,
    updates: int = 1,
    value: ValueLossConfig | None = None,
    env: dict[str, EnvironmentConfig] | None = None,
) -> Algorithm:
    """Return the algorithm of this section.

    updates: of one pass over the samples of a step.
    """
    name = next(name for name, kind in ALGORITHMS.items() if kind.Section is type(section))
    samples = 1 if name in OFFLINE else section.num_prompts_per_step * section.num_generations_per_prompt
    recipe = {
        "algorithm": name,
        name: section,
        "loss_fn": loss or LossConfig(),
        "value_loss_fn": value or ValueLossConfig(),
        "on_policy_distillation": TeachersConfig(),
        "data": DataConfig(),
        "env": env or {},
        "policy": SimpleNamespace(
            train_global_batch_size=samples // updates, dtensor_cfg=DTensorConfig(), megatron_cfg=MegatronConfig()
        ),
    }
    return ALGORITHMS[name](SimpleNamespace(**recipe))


def grpo(
    loss: LossConfig | None = None,
    updates: int = 1,
    estimator: AdvantageConfig | None = None,
    env: dict[str, EnvironmentConfig] | None = None,
    **keys,
) -> Algorithm:
    """Return GRPO with these keys of its section; by default it divides by the deviation and leaves one out."""
    return made(GRPOConfig(adv_estimator=estimator or AdvantageConfig(), **keys), loss, updates, env=env)


def weighed(kind: str | None = None, high: float | None = None, low: float | None = None, **keys) -> LossConfig:
    """Return a loss with importance sampling, truncated to these bounds."""
    return LossConfig(
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type=kind,
        truncated_importance_sampling_ratio=high,
        truncated_importance_sampling_ratio_min=low,
        **keys,
    )
