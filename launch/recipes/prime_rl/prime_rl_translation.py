"""Translate a configuration of prime-rl, part by part."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Set
from typing import Any

from launch.recipes.prime_rl import prime_rl_defaults, prime_rl_loss, prime_rl_sft, prime_rl_training, tasksets
from launch.recipes.translation.translator import Translation, Translator


def translate(values: Mapping[str, Any], origins: Mapping[str, str], kind: str, ours: Set[str]) -> Translation:
    """Translate a configuration with prime-rl's defaults.

    values: the configuration. origins: dotted key -> "file:line", for keys that are no defaults. kind: the entry point, rl or
    sft. ours: our keys on the command line.
    """
    t = Translator(values, origins)
    if kind == "sft":
        prime_rl_sft.translate(t)
    else:
        _online(t, ours)
    t.refuse_unknown("prime-rl", _names())
    return t.result()


def _online(t: Translator, ours: Set[str]) -> None:
    t.put("algorithm", "grpo", "orchestrator.algo.type")
    prime_rl_loss.translate(t)
    tasksets.translate(t)
    prime_rl_training.engines(t, ours)
    prime_rl_training.model(t, "trainer.model")
    steps = prime_rl_training.length(t, "grpo", "trainer.")
    prime_rl_training.optimizer(t, "trainer.", steps)
    prime_rl_training.shared(t, "trainer.")
    prime_rl_training.ignore(t)


def knows(key: str) -> bool:
    """Return whether a dotted key is one of prime-rl's."""
    return key in _names()


@functools.cache
def _names() -> frozenset[str]:
    """Return keys of prime-rl that have a name without wildcards."""
    tables = (*prime_rl_loss.RULES, *tasksets.RULES, *prime_rl_training.RULES, *prime_rl_sft.RULES)
    plain = {pattern for rule in tables for pattern in rule.patterns if "*" not in pattern}
    sections = {f"trainer.model.{key}" for key in prime_rl_training.MODEL_KEYS.split()}
    optimizers = {f"trainer.optim.{key}" for values in prime_rl_defaults.OPTIMIZERS.values() for key in values}
    return frozenset({*plain, *sections, *optimizers, *prime_rl_defaults.of_rl(), *prime_rl_defaults.of_sft()})
