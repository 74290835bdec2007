"""Translate recipes of NeMo-RL (https://github.com/NVIDIA-NeMo/RL, examples/configs) into Hetstep's keys.

One rule or function consumes each leaf of the resolved NeMo-RL recipe, with one of these results:
    same        the key is copied
    changed     the key is translated; a note in `changed` describes a difference in meaning
    ignored     the key has no effect here; a note in `ignored` gives the reason if a user might miss it
    problem     the key is unknown, or asks for a feature that Hetstep does not support
Where NeMo-RL's default differs from Hetstep's, the translation sets NeMo-RL's explicitly.

Start at `translate`. Each module translates some sections, by tables of rules (`launch/recipes/translation/rules.py`). The
tables follow NeMo-RL of August 2026. Recipes for vision, for audio and for evaluation only are not supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.recipes.nemo_rl import (
    algorithm_keys,
    cluster_keys,
    critic_and_teacher_keys,
    data_keys,
    environment_keys,
    generation_keys,
    logger_keys,
    policy_keys,
    teacher_keys,
)
from launch.recipes.translation.translator import Translation, Translator
from pipeline.algorithms import OFFLINE

__all__ = ["Translation", "translate"]


def translate(tree: Mapping[str, Any], origins: Mapping[str, str], path: Path) -> Translation:
    """Translate a merged and resolved NeMo-RL recipe.

    tree: the recipe. origins: dotted key of the tree -> "file:line". path: the recipe's file. Files that the recipe names are
    searched below the parent folders of `path`.
    """
    t = Translator(tree, origins)
    if name := algorithm_keys.algorithm_name(t):
        _sections(t, name, path)
    else:
        message = f"{path} has no section of an algorithm; expected one of: {', '.join(algorithm_keys.NAMES)}"
        t.problem("algorithm", "missing-value", message)
    return t.result()


def _sections(t: Translator, name: str, path: Path) -> None:
    samples = name not in OFFLINE
    t.put("algorithm", name, name)
    judges = data_keys.environments(t) if samples else []
    cluster_keys.translate(t, samples, "env.reward_model" if "reward_model" in judges else None)
    if name == "distillation":
        critic_and_teacher_keys.teacher(t)
    policy_keys.translate(t, name, path)
    generation_keys.translate(t, samples)
    algorithm_keys.translate(t, name, data_keys.translate(t, name, path))
    if samples:
        environment_keys.translate(t, judges)
    else:
        t.consume("env")
    if name == "ppo":
        critic_and_teacher_keys.critic(t)
    teacher_keys.translate(t)
    logger_keys.translate(t)
    t.refuse_unknown("NeMo-RL")
