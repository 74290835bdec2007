"""Translate recipes of NeMo-RL (https://github.com/NVIDIA-NeMo/RL, examples/configs) into our keys.

One rule or function consumes each leaf of their resolved tree. It means the same; or it is translated, with a line in `changed`
if that changes what it means; or it means nothing here, with a line in `ignored` if somebody might miss it; or it is a problem,
because it asks for a feature that we do not have, or because the key is unknown. Their defaults that differ from ours are set.

Each module has the tables of rules (`rules.py`) of its sections. Read against NeMo-RL of August 2026.

Leaves out: recipes for vision and audio, and for evaluation alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.nemo_rl import algorithm, cluster, data, environments, generation, models, policy, run
from launch.nemo_rl.translator import Translator
from pipeline.algorithms import OFFLINE
from pipeline.config import Problem

__all__ = ["Translation", "translate"]


@dataclass(frozen=True)
class Translation:
    """The result of translating one recipe of NeMo-RL."""

    layer: dict[str, Any]  # in our keys
    origins: dict[str, str]  # of our dotted keys: "file:line", with (their key) behind it where that is another
    changed: list[str]  # what is done otherwise than there, one line each
    ignored: list[str]  # what means nothing here, one line each
    problems: list[Problem]


def translate(tree: Mapping[str, Any], origins: Mapping[str, str], path: Path) -> Translation:
    """Translate a recipe of theirs, merged and resolved.

    origins: of the tree's dotted keys. path: the recipe's file; files it names are looked for below the folders it lies in.
    """
    t = Translator(tree, origins)
    if name := algorithm.algorithm_name(t):
        _sections(t, name, path)
    else:
        message = f"{path} has no section of an algorithm; expected one of: {', '.join(algorithm.NAMES)}"
        t.problem("algorithm", "missing-value", message)
    return Translation(t.layer, t.our_origins, t.changed, t.ignored, list(dict.fromkeys(t.problems)))


def _sections(t: Translator, name: str, path: Path) -> None:
    samples = name not in OFFLINE
    t.put("algorithm", name, name)
    judges = data.environments(t) if samples else []
    cluster.translate(t, samples, "env.reward_model" if "reward_model" in judges else None)
    if name == "distillation":
        models.teacher(t)
    policy.translate(t, name, path)
    generation.translate(t, samples)
    algorithm.translate(t, name, data.translate(t, name, path))
    if samples:
        environments.translate(t, judges)
    else:
        t.consume("env")
    if name == "ppo":
        models.critic(t)
    run.translate(t)
    known = sorted(t.consumed)
    for key, _ in t.unconsumed():
        near = difflib.get_close_matches(key, known, 1, cutoff=0.8)
        hint = f"; did you mean '{near[0]}'?" if near else ". Try without it"
        t.problem(key, "unknown-key", f"is not a key that we know, neither ours nor NeMo-RL's{hint}")
