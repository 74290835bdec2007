"""Translate recipes of NeMo-RL (https://github.com/NVIDIA-NeMo/RL, examples/configs) into Hetstep's keys.

One rule or function consumes each leaf of the resolved NeMo-RL recipe, with one of these results:
    same        the key is copied
    changed     the key is translated; a note in `changed` describes a difference in meaning
    ignored     the key has no effect here; a note in `ignored` gives the reason if a user might miss it
    problem     the key is unknown, or asks for a feature that Hetstep does not support
Where NeMo-RL's default differs from Hetstep's, the translation sets NeMo-RL's explicitly.

Start at `translate`. Each module translates some sections, by tables of rules (`rules.py`). The tables follow NeMo-RL of August
2026. Recipes for vision, for audio and for evaluation only are not supported.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
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
from launch.recipes.nemo_rl.translator import Translator
from pipeline.algorithms import OFFLINE
from pipeline.config import Problem

__all__ = ["Translation", "translate"]


@dataclass(frozen=True)
class Translation:
    """The result of translating one recipe of NeMo-RL."""

    layer: dict[str, Any]  # the recipe in Hetstep's keys
    origins: dict[str, str]  # Hetstep's dotted key -> "file:line", or "file:line (NeMo-RL's key)" if the keys differ
    changed: list[str]  # notes on keys with another meaning, one line each
    ignored: list[str]  # notes on keys without effect, one line each
    problems: list[Problem]


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
    return Translation(t.layer, t.our_origins, t.changed, t.ignored, list(dict.fromkeys(t.problems)))


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
    names = sorted(t.consumed)
    for key, _ in t.unconsumed_leaves():
        near = difflib.get_close_matches(key, names, 1, cutoff=0.8)
        hint = f"; did you mean '{near[0]}'?" if near else ". Try without it"
        t.problem(key, "unknown-key", f"is neither a key of NeMo-RL nor of Hetstep{hint}")
