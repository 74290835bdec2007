"""Translate the sections of a configuration of verl, in order."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from launch.recipes.translation.rules import Rule, fits, under
from launch.recipes.translation.translator import Translation, Translator
from launch.recipes.verl import (
    batch_sizes,
    critics,
    distilling,
    loss_and_advantages,
    optimizers,
    rollout_section,
    scored_files,
    supervised,
    train_engines,
    trainers,
    verl_defaults,
)
from launch.recipes.verl.verl_defaults import ACTOR, MODEL

TABLES: tuple[Rule, ...] = (
    *loss_and_advantages.RULES,
    *batch_sizes.RULES,
    *critics.RULES,
    *scored_files.RULES,
    *distilling.RULES,
    *rollout_section.RULES,
    *under(f"{ACTOR}.optim", optimizers.RULES),
    *under(MODEL, train_engines.MODEL),
    *under(f"{ACTOR}.fsdp_config", train_engines.FSDP),
    *under(f"{ACTOR}.megatron", train_engines.MEGATRON_RULES),
    *under(f"{ACTOR}.megatron.override_transformer_config", train_engines.TRANSFORMER),
    *trainers.RULES,
    *supervised.RULES,
)


def translate(
    values: Mapping[str, Any], origins: Mapping[str, str], kind: str, engine: str, has_environment: bool
) -> Translation:
    """Translate a configuration with verl's defaults.

    values: the resolved configuration. origins: dotted key -> "file:line", for keys that are no defaults. kind: ppo or sft.
    engine: dp (FSDP) or megatron. has_environment: whether the command line has keys of our section `env`.
    """
    t = Translator(values, origins)
    if kind == "sft":
        supervised.translate(t, engine)
    else:
        _online(t, engine, has_environment)
    t.refuse_unknown("verl", _names())
    return t.result()


def _online(t: Translator, engine: str, has_environment: bool) -> None:
    distills = t.on("distillation.enabled")
    algorithm = distilling.name(t) if distills else loss_and_advantages.name(t)
    steps = trainers.steps(t, "data.train_batch_size")
    t.put("algorithm", algorithm, "distillation.enabled" if distills else "algorithm.adv_estimator")
    loss_and_advantages.translate(t, algorithm)
    batch_sizes.translate(t, algorithm, train_engines.sequence_ranks(t, ACTOR, engine))
    scored_files.translate(t, algorithm, has_environment)
    rollout_section.translate(t, algorithm)
    train_engines.translate(t, MODEL, ACTOR, engine)
    optimizers.translate(t, f"{ACTOR}.optim", "policy", engine, steps)
    if engine == "dp":
        t.put("policy.max_grad_norm", t.consume(f"{ACTOR}.grad_clip"), f"{ACTOR}.grad_clip")
    if distills:
        distilling.translate(t, algorithm)
    t.consume("distillation")
    if algorithm == "ppo":
        critics.translate(t, engine, steps)
    else:
        t.consume("critic")
    trainers.translate(t, algorithm)


def knows(key: str) -> bool:
    """Return whether a dotted key is one of verl's."""
    return any(fits(pattern, key) for rule in TABLES for pattern in rule.patterns) or key in _names()


@functools.cache
def _names() -> frozenset[str]:
    """Return the keys of verl that have a name without wildcards."""
    plain = {pattern for rule in TABLES for pattern in rule.patterns if "*" not in pattern}
    kinds = [(kind, engine) for kind in ("ppo", "sft") for engine in ("dp", "megatron")]
    defaults = {key for kind, engine in kinds for key in verl_defaults.of(kind, engine)}
    return frozenset(plain | defaults)
